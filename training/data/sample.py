"""One row as people see it: what is only read, and what is learnt."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset, IterableDataset
from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from medusa_heads.config import IGNORED

_SHOWN_TOKENS = 300
_BEFORE = 100


def show_sample(
    rows: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase | None, console: Console
) -> None:
    """Print the first row: context dim, supervised text green, a bar between packed documents. A
    long row is shown from a little before its first supervised token on. Without a tokenizer its
    token ids are shown."""
    row: Mapping[str, Any] = next(iter(rows))
    ids, labels = list(row["input_ids"]), list(row["labels"])
    positions = list(row.get("position_ids", range(len(ids))))
    supervised = [label != IGNORED for label in labels]
    start = max(supervised.index(True) - _BEFORE, 0) if any(supervised) else 0
    stop = min(start + _SHOWN_TOKENS, len(ids))
    text = Text()
    if start:
        text.append("... ", style="dim")
    parts = itertools.groupby(range(start, stop), key=lambda t: (supervised[t], t - positions[t]))
    document = start - positions[start]
    for (learnt, first), part in parts:
        if first != document:
            text.append("\n----\n", style="bold")
            document = first
        text.append(_written([ids[t] for t in part], tokenizer), style="green" if learnt else "dim")
    if stop < len(ids):
        text.append(" ...", style="dim")
    title = f"First row: {sum(supervised)} of {len(ids)} tokens are learnt (green)"
    console.print(Panel(text, title=title, title_align="left"))


def _written(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase | None) -> str:
    if tokenizer is None:
        return " ".join(str(token) for token in ids) + " "
    return str(tokenizer.decode(list(ids)))
