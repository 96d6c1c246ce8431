"""How heads are used: draft a token tree, verify it in one forward, keep a path."""
