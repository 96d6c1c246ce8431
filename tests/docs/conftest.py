"""Shared by tests of the pages: what those of scripts share."""

from tests.scripts.conftest import short_demo

__all__ = ["short_demo"]
