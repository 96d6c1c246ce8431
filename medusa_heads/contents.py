"""What lies in a folder: heads, a draft model, or another model, which users may mix up."""

from __future__ import annotations

import os
from pathlib import Path

from medusa_heads.files import expanded, read_json

SIDECAR_FILE = "medusa_heads.json"  # beside heads
DRAFT_FILE = "draft_model.json"  # beside a draft model
MTP_FILE = "mtp_modules.json"  # beside multi-token-prediction modules that were trained
_CONFIG_FILE = "config.json"


def is_heads(folder: str | os.PathLike[str]) -> bool:
    """Whether heads of this package lie there."""
    return (Path(folder) / SIDECAR_FILE).is_file()


def is_draft(folder: str | os.PathLike[str]) -> bool:
    """Whether a draft model that names its target lies there."""
    return (Path(folder) / DRAFT_FILE).is_file()


def is_mtp(folder: str | os.PathLike[str]) -> bool:
    """Whether multi-token-prediction modules that were trained for a target lie there."""
    return (Path(folder) / MTP_FILE).is_file()


def is_model(folder: str | os.PathLike[str]) -> bool:
    """Whether a whole model lies there, which heads are not: those say nothing of an architecture.
    ValueError where its configuration cannot be read."""
    file = Path(folder) / _CONFIG_FILE
    return file.is_file() and not is_heads(folder) and "model_type" in read_json(file)


def refuse_heads(name: str | os.PathLike[str]) -> None:
    """Raises ValueError where heads stand in the place of a model."""
    if is_heads(expanded(name)):
        raise ValueError(
            f"expected a causal language model at {os.fspath(name)!r}, found heads, which only "
            "draft on their target: name a whole model here, and heads where a command asks for a "
            "heads checkpoint"
        )


def instead_of_heads(folder: str | os.PathLike[str]) -> str:
    """What was found where heads were expected, and what to do about it."""
    if is_draft(folder):
        return (
            "found a draft model: use it with medusa-heads generate and chat, or as --draft_model "
            "of its target, or train heads with train-heads"
        )
    if is_mtp(folder):
        return (
            "found multi-token-prediction modules: use them with medusa-heads generate and chat, "
            "or write them into a copy of their target with medusa-heads export --to transformers"
        )
    if is_model(folder):
        return (
            "found a model without heads: train some with train-heads, convert another project's "
            "with medusa-heads convert, or draft without any (--drafter auto)"
        )
    return (
        "found none: train one with train-heads, or convert another project's with medusa-heads "
        "convert"
    )
