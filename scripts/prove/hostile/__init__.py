"""Inputs that nobody should have to trust, by kinds; `scripts.prove.inputs` tries them."""
