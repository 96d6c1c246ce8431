"""Rows that stand in a cache, as decoding keeps them between two steps.

Shapes: B rows, T tokens, N tree nodes, D hidden.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, StoppingCriteriaList

from medusa_heads.inference.engine.rows import Row, StopCheck
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.target.cache import RowCache

NODES, HIDDEN = 64, 32
# Within it, what is made without a word on where lies on another device than the tests' tensors.
ELSEWHERE = torch.device("meta")


def rows_of(lengths: list[int], criteria: StoppingCriteriaList | None = None) -> list[Row]:
    """Rows of so many tokens, padding included: a prompt of two, the others committed, 1, 2, .."""
    stop = StopCheck(criteria or StoppingCriteriaList(), len(lengths))
    rows = [Row(i, len(lengths), torch.tensor([7, 7]), stop) for i in range(len(lengths))]
    for row, length in zip(rows, lengths, strict=True):
        for token in range(1, length - 1):
            row.commit(token)
    return rows


def in_cache(
    lengths: list[int], padding: list[int], max_length: int | None = None, slots: int | None = None
) -> DecodingState:
    cache = RowCache(LlamaConfig(num_hidden_layers=1))
    cache.fixed_capacity = slots
    numbers_BT = torch.arange(40.0) + 1000 * torch.arange(len(lengths))[:, None]
    rows_B1TX = numbers_BT[:, None, :, None].expand(-1, 1, -1, 2)
    cache.update(rows_B1TX, -rows_B1TX, 0)
    of = DecodingState(rows_of(lengths), cache, padding, max_length)
    of.hidden_BD = torch.zeros(len(lengths), HIDDEN, dtype=torch.float64)
    return of
