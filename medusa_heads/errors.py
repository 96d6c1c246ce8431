"""Errors and warnings with names of their own. All errors are ValueErrors: something the user can
change."""

from __future__ import annotations

import errno
import os
import warnings

# In the system's words, which safetensors repeats, and in those of torch.save.
_FULL_DISK = (os.strerror(errno.ENOSPC), "PytorchStreamWriter", "unexpected pos")


class UnsupportedArchitecture(ValueError):
    """The target cannot be decoded exactly with a token tree: what in the architecture prevents it,
    by name, and what to do instead."""

    def __init__(
        self, reason: str, suggestion: str = "decode with transformers' own generate()"
    ) -> None:
        super().__init__(f"{reason}: {suggestion}")
        self.reason = reason
        self.suggestion = suggestion


class NoModel(ValueError):
    """Where a model was named there is none, or none that can be loaded."""


class MedusaWarning(UserWarning):
    """What a user should know of a call that goes on: a sentence, which commands print as such."""


def warn(sentence: str, *, above: int = 1) -> None:
    """Tell a user; of Python's warnings, one of the line that called so many functions above."""
    warnings.warn(sentence, MedusaWarning, stacklevel=above + 2)


def first_line(error: BaseException) -> str:
    """What a library says of an error in its first line, or in all of them where that one only
    announces the others."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(" ".join(lines).split()) if lines[0].endswith(":") else lines[0]


def is_disk_full(error: BaseException) -> bool:
    """Whether the system or a library says that a file could not be written for want of room."""
    return any(words in str(error) for words in _FULL_DISK)


def forget_frames(error: BaseException) -> None:
    """Of where it was raised, and what it was raised from: what the calls held there is freed at
    once. Where they hold what keeps the error, nothing but Python's collection of cycles frees it,
    which counts objects, and knows no gigabytes."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        if (each := left.pop()) is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            left += [each.__cause__, each.__context__]
