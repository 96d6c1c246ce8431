"""Layers through which heads read a text so far, beside what stands at its end."""
