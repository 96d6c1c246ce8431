"""The same over caches of fixed size: compiled, recorded on a GPU, or as scripts."""
