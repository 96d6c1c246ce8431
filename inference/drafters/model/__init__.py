"""Drafts of a small model: chains, trees, drawn ones, and whether to ask it at all."""
