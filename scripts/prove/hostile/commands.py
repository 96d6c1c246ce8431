"""The program's own doors: commands, and readers behind the commands' error path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from medusa_heads.cli.flags.arguments import run_command
from medusa_heads.cli.main import main as medusa_heads


def read_by(call: Callable[[], Any], into: list[Any]) -> Callable[[], int]:
    """A reader as the commands run it: ValueError and OSError become a sentence and exit code 2.

    Args:
        call: reads.
        into: gets what it returns.
    """
    return lambda: run_command(lambda: into.append(call()))


def command(verb: str, argv: Sequence[str]) -> Callable[[], int]:
    """`train-heads`, `train-draft` or a verb of `medusa-heads`, with these arguments."""

    def run() -> int:
        from medusa_heads.cli import train_draft, train_heads

        mains = {"train-heads": train_heads.main, "train-draft": train_draft.main}
        main = mains.get(verb)
        return medusa_heads([verb, *argv]) if main is None else main(list(argv))

    return run
