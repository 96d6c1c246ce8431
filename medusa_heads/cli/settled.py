"""What a command does with the choice of device, dtype and threads."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from medusa_heads.machine import Choice

_untold: dict[str, Choice] = {}


def settle(choice: Choice, what: str = "target", *, threads: bool = True) -> None:
    """Set the threads; the rest is told when the command begins its work."""
    import torch

    if threads and choice.threads != torch.get_num_threads():
        torch.set_num_threads(choice.threads)
    _untold[what] = choice


def tell_choices() -> None:
    """A line on standard error for each that was settled; to be called when nothing can be refused
    any more, so that a mistake is answered in one line."""
    for what, choice in _untold.items():
        print(f"{what}: {choice}", file=sys.stderr)
    forget_choices()


def forget_choices() -> None:
    """What a command that failed has not told, the next one of the process does not tell."""
    _untold.clear()
