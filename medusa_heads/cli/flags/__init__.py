"""Flags and YAML files, read into dataclasses."""
