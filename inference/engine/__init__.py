"""The decoding step and loop, its state, and what a target can be trusted to verify."""
