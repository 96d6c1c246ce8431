"""What a run of training can be told: every field once, with type and default."""
