"""The user's word for a tree of heads, made into a drafter."""

from __future__ import annotations

from collections.abc import Callable

from medusa_heads.heads import DraftHeads
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.blended import BlendedDrafter
from medusa_heads.inference.lookup.corpus_index import CorpusIndex
from medusa_heads.inference.plan.adaptive import (
    blends,
    continues_text,
    unvarying,
    with_heads,
)
from medusa_heads.inference.plan.tree_size import best_tree
from medusa_heads.inference.plan.trees import TreeSpec, make_drafter
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.statistics import HeadStatistics, prior_statistics

DRAFT_PROBABILITY_RULES = ("threshold", "log_ratio")  # compare with the draft's own probabilities

ReadCorpus = Callable[[], CorpusIndex | None]


class HeadsPlan:
    """What heads draft.

    Args:
        target, heads, statistics: that belong together; the heads as drafters read them. Without
            statistics a prior stands for them.
        tree: which one: words as in trees.py and adaptive.py, or the tree itself.
        chain_only: the target verifies chains alone; of any tree its best chain is taken.
        acceptance: name of the rule that walks the trees.
        read_corpus: gives the text that drafts also continue; None for none.
        deterministic: the drafter goes by no clock, and is for one text alone.

    Attributes:
        tree: which it is, also where `auto` chose.
        drafter: proposes it.

    Raises:
        ValueError: an unknown form, or a tree that does not fit the heads, or continues no corpus.
    """

    def __init__(
        self,
        target: TargetModel,
        heads: DraftHeads,
        statistics: HeadStatistics | None,
        tree: TreeSpec,
        *,
        chain_only: bool = False,
        acceptance: str = "lossless",
        read_corpus: ReadCorpus | None = None,
        deterministic: bool = False,
    ) -> None:
        if statistics is None:
            statistics = prior_statistics(heads.config.num_heads, heads.config.num_candidates)
        compares = acceptance in DRAFT_PROBABILITY_RULES
        if tree == "auto" and compares:
            # What the text itself suggests comes without a probability.
            tree = "dynamic:15" if deterministic else best_tree(target, heads, statistics)
        self.tree = tree
        corpus: CorpusIndex | None = None
        if read_corpus is not None:
            if not continues_text(tree):
                raise ValueError(
                    f"a corpus is continued by the trees auto, N+suffix and suffix, and the tree "
                    f"here is {tree!r}: use one of them, or leave the corpus out"
                )
            corpus = read_corpus()  # only now: to index one may take a while
        self.drafter: Drafter
        if isinstance(tree, str) and blends(tree):
            if compares or (chain_only and tree != "auto"):
                raise ValueError(
                    f"the tree {tree!r} needs a target that verifies branches, and a rule other "
                    f"than {' and '.join(DRAFT_PROBABILITY_RULES)}"
                )
            self.drafter = with_heads(
                tree,
                target,
                heads,
                statistics,
                corpus=corpus,
                chain_only=chain_only,
                deterministic=deterministic,
            )
            return
        self.drafter = make_drafter(
            tree,
            heads,
            statistics,
            chain_only=chain_only,
            with_log_probs=compares,
            corpus=corpus,
        )
        if deterministic and isinstance(self.drafter, BlendedDrafter):
            self.drafter = unvarying(
                self.drafter.num_nodes - 1, target, corpus=corpus, chain_only=True
            )
