"""Corpora and data files of all kinds, row by row, and chats as a model reads them."""
