"""What a run can be told: every field once, with its type and default."""
