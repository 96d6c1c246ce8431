"""Drafts from the text itself, or a corpus: what followed the last time that it ended as now.

Source: prompt lookup (Saxena 2023) with the longest match of any length, as in SAM-Decoding (Hu et
al. 2024, arXiv:2411.10666); the size of a draft by expected tokens over measured cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from medusa_heads.inference.drafters.suffix_memory import SuffixMemory, SuffixSources
from medusa_heads.inference.step_costs import StepCosts
from medusa_heads.prefix_tree import PrefixTree

if TYPE_CHECKING:
    from medusa_heads.inference.corpus_index import CorpusIndex
    from medusa_heads.inference.state import DecodingState
    from medusa_heads.tree import TokenTree


class SuffixDrafter:
    """A chain for every row: the continuation of its longest suffix that occurred before, as long
    as its chances pay. A row that never ended like this before drafts nothing.

    Args:
        costs: what steps of each size cost here; the largest is the longest draft.
        corpus: continued instead where it promises more; None for none.
    """

    reads_prompt = False

    def __init__(self, costs: StepCosts, corpus: CorpusIndex | None = None) -> None:
        self._costs = costs
        self._sources = SuffixSources(corpus)

    @property
    def num_nodes(self) -> int:
        """The most nodes that a proposed tree has, the root included."""
        return self._costs.most + 1

    def propose(self, state: DecodingState) -> TokenTree:
        """A chain for every active row, all of one length."""
        memory = state.memories.get(self)
        if memory is None:
            memory = state.memories[self] = SuffixMemory(self._sources, self._costs.most)
        trees = [PrefixTree(root) for root in state.roots_B.tolist()]
        for tree, paths in zip(trees, memory.continuations(state), strict=True):
            tree.add_path(*max(paths, key=lambda path: sum(path[1])))
        return self._costs.cut(trees, state.roots_B.device)[0]

    def took(self, nodes: int, seconds: float) -> None:
        """See Timed."""
        self._costs.took(nodes, seconds)
