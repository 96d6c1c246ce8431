"""This machine: what it has, what it multiplies fastest, where that is remembered."""
