"""The loops, of heads with or without an adapter and of draft models; their records."""
