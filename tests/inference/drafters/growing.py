"""A tree as large as it may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from medusa_heads.inference.drafters.growing import Growing, Proposal
from medusa_heads.trees.prefix_tree import PrefixTree


def grow(root: int, proposals: Sequence[Proposal], most: int, **options: Any) -> PrefixTree:
    """The likeliest nodes of all that is offered, in the order of their chances: see Growing."""
    growing = Growing(root, proposals, most, **options)
    growing.to(most)
    return growing.tree
