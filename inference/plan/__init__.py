"""The user's words, made into drafters."""
