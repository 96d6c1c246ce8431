"""Heads on a hub: found by name, pulled, and pushed with a model card."""
