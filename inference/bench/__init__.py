"""Methods measured side by side, what that costs, and what theory expects."""
