"""Heads in engines of other projects, which verify chains and no trees."""
