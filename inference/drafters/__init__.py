"""Drafters: each proposes a token tree from the decoding state."""
