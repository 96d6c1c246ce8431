"""The decoding step and loop, its state, what a target can be trusted to verify."""
