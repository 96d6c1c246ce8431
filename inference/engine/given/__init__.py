"""What a caller hands over with a text: refused by name or taken, and a cache given back filled."""
