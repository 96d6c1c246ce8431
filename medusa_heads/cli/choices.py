"""What a command does with the choice of device, dtype and threads."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from medusa_heads.machine.choice import Choice

_unprinted: dict[str, Choice] = {}


def apply_choice(choice: Choice, what: str = "target", *, threads: bool = True) -> None:
    """Set the threads, and keep the choice until `print_choices`."""
    import torch

    if threads and choice.threads != torch.get_num_threads():
        torch.set_num_threads(choice.threads)
    _unprinted[what] = choice


def print_choices() -> None:
    """Print a line for each choice on standard error. A command calls this when nothing can be
    refused any more, so that a mistake is answered in one line."""
    for what, choice in _unprinted.items():
        print(f"{what}: {choice}", file=sys.stderr)
    forget_choices()


def forget_choices() -> None:
    """Drop what a failed command has not printed, so that the next one in the process does not."""
    _unprinted.clear()
