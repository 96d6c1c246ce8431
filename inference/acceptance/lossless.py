"""The exact acceptance rule: sample, then match.

Shapes: B active rows, N tree nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from medusa_heads.inference.acceptance.base import looks_at_one_row
from medusa_heads.inference.row import Row
from medusa_heads.tree import TokenTree


class SampleThenMatch:
    """The exact rule for drafts chosen deterministically.

    At each node the target's own next token is drawn from its own (processed) distribution, exactly
    as generate() draws it; a child that carries this token is descended to, otherwise the token is
    the bonus. Whatever was drafted, every committed token so comes from the target, in order, with
    the random numbers that generate() would have used: same seed, same tokens. Greedy is the same
    walk with argmax.

    Args:
        processors: transformers' logits processors and warpers, run on walked nodes only.
        do_sample: draw, rather than take the most likely token.
    """

    lossless = True

    def __init__(self, processors: LogitsProcessorList, do_sample: bool) -> None:
        self._processors = processors
        self._do_sample = do_sample
        self._by_batch_row = not looks_at_one_row(processors)

    def __call__(self, tree: TokenTree, logits_BNV: Tensor, rows: Sequence[Row]) -> list[list[int]]:
        plain = not self._do_sample and not self._processors
        recorded = any(row.recorder for row in rows)
        if plain and not recorded and logits_BNV.device.type != "cpu":
            # All nodes at once, and a single wait for the device. On a CPU nobody waits, and the
            # walked nodes alone are less work.
            greedy_BN = logits_BNV.argmax(dim=-1)
            tokens, parents, greedy = torch.stack(
                [tree.tokens_BN, tree.parents_BN, greedy_BN]
            ).tolist()
            return [
                [] if row.done else _walk(tokens[b], parents[b], row, greedy[b].__getitem__)
                for b, row in enumerate(rows)
            ]
        tokens, parents = torch.stack([tree.tokens_BN, tree.parents_BN]).tolist()
        return [
            []
            if row.done
            else _walk(tokens[b], parents[b], row, partial(self._draw, logits_BNV[b], row))
            for b, row in enumerate(rows)
        ]

    def _draw(self, logits_NV: Tensor, row: Row, node: int) -> int:
        scores_1V = self._scores(logits_NV, row, node)
        if self._do_sample:
            return int(torch.multinomial(torch.softmax(scores_1V, dim=-1), num_samples=1))
        return int(scores_1V.argmax(dim=-1))

    def _scores(self, logits_NV: Tensor, row: Row, node: int) -> Tensor:
        """What the processors make of a node's logits, [1, V] in fp32, and recorded if asked."""
        ids: Any = row.ids_1T()
        # In fp32 and on the ids' device, as generate() hands logits to the processors.
        logits: Any = logits_NV[node, None].to(copy=True, dtype=torch.float32, device=ids.device)
        if self._by_batch_row:
            # Some processors keep a setting for every row of the batch: they see it whole.
            ids, logits = ids.repeat(row.batch_size, 1), logits.repeat(row.batch_size, 1)
        # Processors may write into what they are given.
        raw = logits.clone() if row.recorder else logits
        scores_1V = self._processors(ids, logits)[row.index if self._by_batch_row else 0, None]
        if row.recorder:
            row.recorder.record(scores_1V, raw[:1])
        return scores_1V


def _walk(
    tokens: Sequence[int], parents: Sequence[int], row: Row, target_token: Callable[[int], int]
) -> list[int]:
    path = [0]
    while True:
        token = target_token(path[-1])
        if row.commit(token):
            return path
        child = _child(tokens, parents, path[-1], token)
        if child is None:
            return path
        path.append(child)


def _child(tokens: Sequence[int], parents: Sequence[int], node: int, token: int) -> int | None:
    for child in range(node + 1, len(tokens)):
        if parents[child] == node and tokens[child] == token:
            return child
    return None
