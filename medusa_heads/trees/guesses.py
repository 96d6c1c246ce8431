"""What heads take to follow, as candidates with probabilities.

Shapes: B batch, F paths drafted so far, J tokens of a path (the root first), K heads, R ranks,
D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from medusa_heads.heads import DraftHeads, HydraHeads


class Guess(Protocol):
    """The candidates for the token at depth `level` + 1, after every path [B, F, J = level + 1]:
    token ids and log-probabilities, each [B, F, R], best first."""

    def __call__(self, level: int, paths_BFJ: Tensor) -> tuple[Tensor, Tensor]: ...


def guesses(
    heads: DraftHeads,
    hidden_BD: Tensor,
    num_ranks: int,
    temperatures: Sequence[float] | None = None,
) -> Guess:
    """The heads' guesses at one position of every row.

    Args:
        heads: of any kind.
        hidden_BD: h_t, as `heads.encode` left it.
        num_ranks: R, candidates after each path.
        temperatures: by which each head's logits are divided.
    """
    temperatures = temperatures or [1.0] * heads.config.num_heads
    if isinstance(heads, HydraHeads):
        return _after_each_path(heads, hidden_BD, num_ranks, temperatures)
    tokens_BKR, log_probs_BKR = candidates(heads, hidden_BD, num_ranks, temperatures)

    def guess(level: int, paths_BFJ: Tensor) -> tuple[Tensor, Tensor]:
        shape = (-1, paths_BFJ.shape[1], -1)
        return tokens_BKR[:, level, None].expand(shape), log_probs_BKR[:, level, None].expand(shape)

    return guess


def candidates(
    heads: DraftHeads, hidden_BD: Tensor, num_ranks: int, temperatures: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Of heads that do not see each other: tokens and log-probabilities [B, K, R], best first."""
    logits_BKV = heads(hidden_BD)
    inverse_K1 = logits_BKV.new_tensor([1 / t for t in temperatures], dtype=torch.float32)[:, None]
    return best(heads, logits_BKV, num_ranks, inverse_K1)


def best(
    heads: DraftHeads, logits_V: Tensor, num_ranks: int, inverse_temperature: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Token ids and log-probabilities of the largest logits, (..., V) -> (..., R)."""
    best_R, ids_R = logits_V.topk(num_ranks, dim=-1)
    total_1 = (logits_V.float() * inverse_temperature).logsumexp(dim=-1, keepdim=True)
    return heads.token_ids(ids_R), best_R.float() * inverse_temperature - total_1


def _after_each_path(
    heads: HydraHeads, hidden_BD: Tensor, num_ranks: int, temperatures: Sequence[float]
) -> Guess:
    def guess(level: int, paths_BFJ: Tensor) -> tuple[Tensor, Tensor]:
        logits_BFV = heads.after_paths(level, hidden_BD, paths_BFJ)
        return best(heads, logits_BFV, num_ranks, 1 / temperatures[level])

    return guess
