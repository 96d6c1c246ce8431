"""What lies on disk: read with suspicion, written whole, and put on its own target alone."""
