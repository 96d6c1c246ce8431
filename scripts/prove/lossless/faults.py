"""Engines broken on purpose, each in one place: what a proof must notice.

Shapes: B active rows, N tree nodes, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from medusa_heads.inference.acceptance import lossless
from medusa_heads.inference.acceptance.base import RowProcessors
from medusa_heads.inference.acceptance.lossless import SampleThenMatch
from medusa_heads.inference.engine.rows import Row, StopCheck
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.target.attention import TreeMask
from medusa_heads.target.cache import IndexedRowLayer, RowCache, RowLayer
from medusa_heads.target.recurrent import RecurrentCache, StateLayer
from medusa_heads.trees.tree import TokenTree
from scripts.prove.lossless.targets import ProofTarget
from scripts.prove.lossless.texts import Reference

Broken = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Fault:
    """One way to break the engine.

    Attributes:
        name: of it.
        broken: within the block, the engine is broken so.
        matters: whether it can change this text of this target.
    """

    name: str
    broken: Broken
    matters: Callable[[ProofTarget, Reference], bool]


def _siblings_seen() -> AbstractContextManager[Any]:
    """A plain causal mask in place of the tree's own."""
    own = DecodingState.tree_mask

    def tree_mask(state: DecodingState, tree: TokenTree) -> TreeMask:
        causal_BNN = torch.ones_like(tree.ancestors_BNN).tril()
        return own(state, replace(tree, ancestors_BNN=causal_BNN))

    return patch.object(DecodingState, "tree_mask", tree_mask)


def _parents_unseen() -> AbstractContextManager[Any]:
    """Every node sees the text and itself, but no other node."""
    own = DecodingState.tree_mask

    def tree_mask(state: DecodingState, tree: TokenTree) -> TreeMask:
        alone_NN = torch.eye(tree.num_nodes, dtype=torch.bool, device=tree.tokens_BN.device)
        return own(state, replace(tree, ancestors_BNN=alone_NN.expand_as(tree.ancestors_BNN)))

    return patch.object(DecodingState, "tree_mask", tree_mask)


def _positions_off_by_one() -> AbstractContextManager[Any]:
    """Drafted nodes stand one place too far."""
    own = DecodingState.tree_mask

    def tree_mask(state: DecodingState, tree: TokenTree) -> TreeMask:
        mask = own(state, tree)
        further_BN = mask.query_positions_BN + (tree.depth_BN > 0).long()
        return replace(mask, query_positions_BN=further_BN)

    return patch.object(DecodingState, "tree_mask", tree_mask)


def _neighbours_row_kept() -> AbstractContextManager[Any]:
    """Of every accepted node the cache keeps the row before its own."""
    own = RowCache.keep_paths

    def keep_paths(
        cache: RowCache, paths: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> list[int]:
        return own(cache, [[max(node - 1, 0) for node in path] for path in paths], lengths)

    return patch.object(RowCache, "keep_paths", keep_paths)


def _state_not_put_back() -> AbstractContextManager[Any]:
    """A recurrent state keeps what drafts did to it that were refused."""
    return patch.object(RecurrentCache, "put_back", lambda cache, batch=None: None)


def _all_rows_put_back() -> AbstractContextManager[Any]:
    """Where one row's state is put back, those of all others are too."""
    own = RecurrentCache.put_back
    return patch.object(RecurrentCache, "put_back", lambda cache, batch=None: own(cache))


def _convolution_not_put_back() -> AbstractContextManager[Any]:
    """Of the two parts of a state, the recurrent one alone is put back."""

    def states(layer: StateLayer) -> list[Tensor]:
        return [state for state in layer.recurrent_states.values() if state is not None]

    return patch.object(StateLayer, "states", states)


def _stale_snapshot() -> AbstractContextManager[Any]:
    """A recurrent state is put back to what it was before the first drafts."""
    return patch.object(RecurrentCache, "move_on", lambda cache: None)


def _index_not_dropped() -> AbstractContextManager[Any]:
    """Index keys of refused drafts stay, where their rows are dropped."""
    return patch.object(IndexedRowLayer, "set_length", RowLayer.set_length)


def _one_too_many() -> AbstractContextManager[Any]:
    """A draft that the target does not confirm is accepted all the same."""
    own = lossless._child

    def child(tokens: Sequence[int], parents: Sequence[int], node: int, token: int) -> int | None:
        right = own(tokens, parents, node, token)
        wrong = parents.index(node) if node in parents else None
        return wrong if right is None else right

    return patch.object(lossless, "_child", child)


def _draw_ignored() -> AbstractContextManager[Any]:
    """The likeliest token, where one should be drawn."""
    own = SampleThenMatch._draw

    def draw(
        rule: SampleThenMatch,
        logits_BNV: Tensor,
        rows: Sequence[Row],
        walking: Sequence[int],
        nodes: Sequence[int],
    ) -> list[int]:
        with patch.object(rule, "_do_sample", False):
            return own(rule, logits_BNV, rows, walking, nodes)

    return patch.object(SampleThenMatch, "_draw", draw)


def _rows_exchanged() -> AbstractContextManager[Any]:
    """Every row meets the processors of the next one."""
    own = lossless.row_processors

    def row_processors(processors: Any, batch_size: int) -> list[RowProcessors]:
        of_row = own(processors, batch_size)
        return [*of_row[1:], of_row[0]]

    return patch.object(lossless, "row_processors", row_processors)


def _half_the_text() -> AbstractContextManager[Any]:
    """Processors see the first half of the text."""
    own = RowProcessors.__call__

    def call(of_row: RowProcessors, ids_1T: Tensor, scores_1V: Tensor) -> Tensor:
        return own(of_row, ids_1T[:, : ids_1T.shape[1] // 2], scores_1V)

    return patch.object(RowProcessors, "__call__", call)


def _end_ignored() -> AbstractContextManager[Any]:
    """A row writes on behind the token that ends it."""
    own = StopCheck.__call__

    def call(check: StopCheck, row: Row) -> bool:
        with patch.object(check, "_eos", set()):
            return own(check, row)

    return patch.object(StopCheck, "__call__", call)


FAULTS = (
    Fault("siblings seen", _siblings_seen, lambda target, made: target.tree),
    Fault(
        "parents unseen",
        _parents_unseen,
        # What attention beside a recurrent state does not see, the state may well tell a draw.
        lambda target, made: target.attends and not (target.recurrent and made.text.draws),
    ),
    Fault(
        "position off by one",
        _positions_off_by_one,
        # Attention beside a recurrent state may well go without positions.
        lambda target, made: target.positions and not target.recurrent,
    ),
    Fault("neighbour's row kept", _neighbours_row_kept, lambda target, made: not target.recurrent),
    Fault("state not put back", _state_not_put_back, lambda target, made: target.recurrent),
    Fault(
        "convolution not put back",
        _convolution_not_put_back,
        lambda target, made: target.recurrent and target.convolves,
    ),
    Fault(
        "all rows put back",
        _all_rows_put_back,
        lambda target, made: target.recurrent and made.text.batch > 1 and not made.text.in_step,
    ),
    Fault("stale snapshot", _stale_snapshot, lambda target, made: target.recurrent),
    Fault("index not dropped", _index_not_dropped, lambda target, made: target.indexed),
    Fault("one draft too many accepted", _one_too_many, lambda target, made: True),
    Fault("draw ignored", _draw_ignored, lambda target, made: made.text.sampled),
    Fault("another row's processors", _rows_exchanged, lambda target, made: made.text.by_row),
    Fault("half of the text read", _half_the_text, lambda target, made: made.text.reads_text),
    Fault("end ignored", _end_ignored, lambda target, made: made.ends_early),
)
