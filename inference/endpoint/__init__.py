"""A running batch behind an HTTP endpoint: for one machine, and for evaluation."""
