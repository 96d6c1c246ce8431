"""The public classes: transformers' generate() with drafts."""
