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

from dataclasses import dataclass
from typing import TYPE_CHECKING

from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.model.adaptive_tree import AdaptiveTree
from medusa_heads.inference.drafters.model.chain import DraftModelDrafter
from medusa_heads.inference.drafters.model.sampled_tree import SampledTreeDrafter
from medusa_heads.target.target import TargetModel

if TYPE_CHECKING:
    from medusa_heads.inference.adapt.clock import Clock

_NODES_A_PATH = 6  # of a tree, for each path that is read at a time


@dataclass(frozen=True)
class DraftPlan:
    """What to draft, whichever draft model does it.

    Attributes:
        tree: in words.
        branching: of drawn tokens, children by level.
        depth: of chosen tokens: levels; 0 for other kinds.
        width: paths read at a time.
        num_drafted: nodes; None for a chain.
        chain_only: what depends on costs never has more than one token behind another.
    """

    tree: str
    branching: tuple[int, ...] = ()
    depth: int = 0
    width: int = 1
    num_drafted: int | None = None
    chain_only: bool = False

    @property
    def adaptive(self) -> bool:
        """Whether what is drafted depends on what it costs."""
        return not (self.branching or self.depth)

    def drafter(
        self, draft: TargetModel, vocab_size: int, clock: Clock | None = None
    ) -> Drafter | AdaptiveTree:
        """A drafter with this draft model.

        Args:
            draft: the draft model.
            vocab_size: of the target.
            clock: of the draft model's forwards, where drafts depend on it.

        Raises:
            ValueError: more nodes than the draft model will offer.
            UnsupportedArchitecture: the draft model cannot draft so.
        """
        if self.branching:
            return SampledTreeDrafter(draft, vocab_size, self.branching)
        if self.depth:
            return DraftModelDrafter(
                draft,
                vocab_size,
                depth=self.depth,
                width=self.width,
                num_drafted=self.num_drafted,
            )
        assert clock is not None
        return AdaptiveTree(draft, vocab_size, clock, chain_only=self.chain_only)


def draft_plan(tree: str, depth: int, *, chain_only: bool, one_size: bool) -> DraftPlan:
    """What the words at the head of this file ask for.

    Args:
        tree: the words.
        depth: tokens that a chain without a number, or a tree, is deep.
        chain_only: the target verifies chains alone; of any tree its best chain is taken.
        one_size: all drafts must be of one size: instead of an adaptive tree, a chain.

    Raises:
        ValueError: an unknown form, or a draft without tokens.
    """
    if tree == "auto":
        if one_size:
            return DraftPlan(f"chain:{depth}", depth=depth)
        return DraftPlan(tree, chain_only=chain_only)
    kind, _, number = tree.partition(":")
    numbers = number.split("x") if kind == "sampled" else [number]
    if number and not all(each.isdigit() and int(each) for each in numbers):
        raise ValueError(f"a draft has at least 1 token, got {tree!r}")
    if kind == "sampled" and number:
        levels = [int(each) for each in numbers]
        if len(levels) == 1:
            levels = [1] * levels[0]
        elif chain_only:
            levels = [1] * len(levels)
        words = f"sampled:{len(levels)}" if max(levels) == 1 else tree
        return DraftPlan(words, branching=tuple(levels))
    if kind == "chain":
        depth = int(number) if number else depth
    elif kind != "dynamic" or not number:
        raise ValueError(
            "a draft model's tree must be auto, chain, chain:N, dynamic:N, sampled:N or "
            f"sampled:AxBx.., got {tree!r}"
        )
    elif not chain_only:
        nodes = int(number)
        width = max(2, -(-nodes // _NODES_A_PATH))
        return DraftPlan(tree, depth=depth, width=width, num_drafted=nodes)
    return DraftPlan(f"chain:{depth}", depth=depth)
