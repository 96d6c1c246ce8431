"""Where the end of a text occurred before, in itself or in a corpus."""
