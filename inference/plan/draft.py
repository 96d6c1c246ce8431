"""The user's words for a draft model's tokens, made into a drafter.

auto            a tree that grows as long as its next tokens gain more than they cost; drawn where
                the target's are drawn
chain, chain:6  the likeliest tokens in a row
dynamic:12      the 12 likeliest nodes of a tree
sampled:6       tokens in a row, drawn where the target's are drawn
sampled:3x2x1   a tree: 3 drawn tokens behind the text, 2 behind each of them, 1 behind each of
                those
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.drafters.model.draft_model import AdaptiveTree, DraftModelDrafter
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.tree import check_size

_NODES_A_PATH = 6  # of a tree, for each path that is read at a time


class DraftPlan(NamedTuple):
    """What to draft, whichever draft model does it: in words, and as options of its drafter. Where
    it is adaptive, what is drafted depends on what it costs."""

    tree: str
    options: Mapping[str, Any]
    adaptive: bool = False

    def drafter(
        self, draft: TargetModel, vocab_size: int, clock: Clock
    ) -> DraftModelDrafter | AdaptiveTree:
        """A drafter with this draft model, whose forwards take what the clock says. Raises
        ValueError: more nodes than the draft model will offer; UnsupportedArchitecture: the draft
        model cannot draft so."""
        if self.adaptive:
            return AdaptiveTree(draft, vocab_size, clock, **self.options)
        return DraftModelDrafter(draft, vocab_size, **self.options)


def draft_plan(tree: str, depth: int, *, chain_only: bool, one_size: bool) -> DraftPlan:
    """What the words at the head of this file ask for. Raises ValueError: an unknown form, or a
    draft without tokens or of too many.

    Args:
        depth: tokens that a chain without a number, or a tree, is deep.
        chain_only: the target verifies chains alone; of any tree its best chain is taken.
        one_size: all drafts must be of one size: instead of an adaptive tree, a chain.
    """
    if tree == "auto" and not one_size:
        return DraftPlan(tree, {"chain_only": chain_only}, adaptive=True)
    kind, _, number = tree.partition(":")
    numbers = number.split("x") if kind == "sampled" else [number]
    if number and not all(each.isdecimal() and int(each) for each in numbers):
        raise ValueError(f"a draft has at least 1 token, got {tree!r}")
    if number:
        check_size(map(int, numbers), tree)
    check_size([depth], f"depth {depth}")
    if kind == "sampled" and number:
        levels = [int(each) for each in numbers]
        if chain_only or len(levels) == 1:
            levels = [1] * (len(levels) if len(levels) > 1 else levels[0])
        words = f"sampled:{len(levels)}" if max(levels) == 1 else tree
        return DraftPlan(words, {"branching": levels})
    if kind == "dynamic" and number and not chain_only:
        width = max(2, -(-int(number) // _NODES_A_PATH))
        return DraftPlan(tree, {"depth": depth, "width": width, "num_drafted": int(number)})
    if tree != "auto" and kind != "chain" and not (kind == "dynamic" and number):
        raise ValueError(
            "a draft model's tree must be auto, chain, chain:N, dynamic:N, sampled:N or "
            f"sampled:AxBx.., got {tree!r}"
        )
    if kind == "chain" and number:
        depth = int(number)
    return DraftPlan(f"chain:{depth}", {"depth": depth})
