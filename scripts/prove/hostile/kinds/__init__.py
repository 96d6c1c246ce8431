"""The kinds of bad input, one file each, and what they are made of."""
