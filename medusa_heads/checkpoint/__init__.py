"""What lies on disk: read with suspicion, written whole, put on its own target alone."""
