"""What a forked process does before it computes."""

from __future__ import annotations

import sys


def settle_threads() -> None:
    """Make the threads of torch anew, where it is imported, in the process that was forked. Else
    the first ones that compute make them all at once, and some are told of an invalid thread
    pool."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(torch.get_num_threads())
