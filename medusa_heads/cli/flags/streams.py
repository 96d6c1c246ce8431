"""Standard streams that take whatever a command prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import TextIOWrapper, UnsupportedOperation


@contextmanager
def usable_streams() -> Iterator[None]:
    """Within the block each standard stream is there, an empty one where the program was started
    without; and standard output spells characters that its encoding lacks, as standard error does:
    a name or a text must not end a run. What is read and not of its encoding is kept as Python
    keeps it in the arguments of a command, for whoever reads it to refuse."""
    with ExitStack() as before:
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            if getattr(sys, name) is None:
                nowhere = before.enter_context(open(os.devnull, mode, encoding="utf-8"))
                before.callback(setattr, sys, name, None)
                setattr(sys, name, nowhere)
        source, output = sys.stdin, sys.stdout
        if isinstance(source, TextIOWrapper) and source.errors == "strict":
            before.callback(_take_errors, source, "strict")
            _take_errors(source, "surrogateescape")
        if isinstance(output, TextIOWrapper) and output.errors in ("strict", "surrogateescape"):
            before.callback(output.reconfigure, errors=output.errors)
            output.reconfigure(errors="backslashreplace")
        before.callback(_drop_unwritten)
        yield


def _take_errors(source: TextIOWrapper, errors: str) -> None:
    with suppress(UnsupportedOperation):  # somebody has read of it: it stays as it is
        source.reconfigure(errors=errors)


def _drop_unwritten() -> None:
    """What standard output could not take has been told of: Python would try once more in the end,
    complain, and end with a code of its own."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
