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


def _in_place_of(owner: Any, name: str) -> Callable[[Callable[..., Any]], Broken]:
    """Makes a fault of a function that stands in the place of the engine's own, which it is given
    before the arguments."""

    def fault(wrong: Callable[..., Any]) -> Broken:
        own = getattr(owner, name)

        def broken(*given: Any, **named: Any) -> Any:
            return wrong(own, *given, **named)

        return lambda: patch.object(owner, name, broken)

    return fault


@_in_place_of(DecodingState, "tree_mask")
def _siblings_seen(own: Any, state: DecodingState, tree: TokenTree) -> Any:
    """A plain causal mask in place of the tree's own."""
    causal_BNN = torch.ones_like(tree.ancestors_BNN).tril()
    return own(state, replace(tree, ancestors_BNN=causal_BNN))


@_in_place_of(DecodingState, "tree_mask")
def _parents_unseen(own: Any, state: DecodingState, tree: TokenTree) -> Any:
    """Every node sees the text and itself, but no other node."""
    alone_NN = torch.eye(tree.num_nodes, dtype=torch.bool, device=tree.tokens_BN.device)
    return own(state, replace(tree, ancestors_BNN=alone_NN.expand_as(tree.ancestors_BNN)))


@_in_place_of(DecodingState, "tree_mask")
def _positions_off_by_one(own: Any, state: DecodingState, tree: TokenTree) -> TreeMask:
    """Drafted nodes stand one place too far."""
    mask: TreeMask = own(state, tree)
    further_BN = mask.query_positions_BN + (tree.depth_BN > 0).long()
    return replace(mask, query_positions_BN=further_BN)


@_in_place_of(RowCache, "keep_paths")
def _neighbours_row_kept(
    own: Any, cache: RowCache, paths: Sequence[Sequence[int]], lengths: Sequence[int]
) -> Any:
    """Of every accepted node the cache keeps the row before its own."""
    return own(cache, [[max(node - 1, 0) for node in path] for path in paths], lengths)


@_in_place_of(RecurrentCache, "put_back")
def _state_not_put_back(own: Any, cache: RecurrentCache, batch: Any = None) -> None:
    """A recurrent state keeps what drafts did to it that were refused."""


@_in_place_of(RecurrentCache, "put_back")
def _all_rows_put_back(own: Any, cache: RecurrentCache, batch: Any = None) -> None:
    """Where one row's state is put back, those of all others are too."""
    own(cache)


@_in_place_of(StateLayer, "states")
def _convolution_not_put_back(own: Any, layer: StateLayer) -> list[Tensor]:
    """Of the two parts of a state, the recurrent one alone is put back."""
    return [state for state in layer.recurrent_states.values() if state is not None]


@_in_place_of(RecurrentCache, "move_on")
def _stale_snapshot(own: Any, cache: RecurrentCache) -> None:
    """A recurrent state is put back to what it was before the first drafts."""


@_in_place_of(IndexedRowLayer, "set_length")
def _index_not_dropped(own: Any, *given: Any) -> None:
    """Index keys of refused drafts stay, where their rows are dropped."""
    RowLayer.set_length(*given)


@_in_place_of(lossless, "_child")
def _one_too_many(
    own: Any, tokens: Sequence[int], parents: Sequence[int], node: int, token: int
) -> Any:
    """A draft that the target does not confirm is accepted all the same."""
    right = own(tokens, parents, node, token)
    wrong = parents.index(node) if node in parents else None
    return wrong if right is None else right


@_in_place_of(SampleThenMatch, "_draw")
def _draw_ignored(own: Any, rule: SampleThenMatch, *given: Any) -> Any:
    """The likeliest token, where one should be drawn."""
    with patch.object(rule, "_do_sample", False):
        return own(rule, *given)


@_in_place_of(lossless, "row_processors")
def _rows_exchanged(own: Any, processors: Any, batch_size: int) -> list[RowProcessors]:
    """Every row meets the processors of the next one."""
    of_row = own(processors, batch_size)
    return [*of_row[1:], of_row[0]]


@_in_place_of(RowProcessors, "__call__")
def _half_the_text(own: Any, of_row: RowProcessors, ids_1T: Tensor, scores_1V: Tensor) -> Any:
    """Processors see the first half of the text."""
    return own(of_row, ids_1T[:, : ids_1T.shape[1] // 2], scores_1V)


@_in_place_of(StopCheck, "__call__")
def _end_ignored(own: Any, check: StopCheck, row: Row) -> Any:
    """A row writes on behind the token that ends it."""
    with patch.object(check, "_eos", set()):
        return own(check, row)


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
