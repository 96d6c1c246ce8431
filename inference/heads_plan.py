"""The user's word for a tree of heads, made into drafters: one for any batch, or one for each size
of it."""

from __future__ import annotations

from collections.abc import Callable

from medusa_heads.compiled import CompiledTarget
from medusa_heads.heads import DraftHeads
from medusa_heads.inference.blend_plan import blended, blends, continues_text
from medusa_heads.inference.corpus_index import CorpusIndex
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.by_rows import ByRowsDrafter, rounded_up
from medusa_heads.inference.tree_plan import TreeSpec, make_drafter
from medusa_heads.inference.tree_size import best_tree
from medusa_heads.statistics import HeadStatistics
from medusa_heads.target import TargetModel

UNMEASURED_TREE = "chain"  # heads without statistics: nothing says where branches would pay
DRAFT_PROBABILITY_RULES = ("threshold", "log_ratio")  # compare with the draft's own probabilities

ReadCorpus = Callable[[], CorpusIndex | None]


class HeadsPlan:
    """What heads draft, in batches of any size.

    Where `auto` chooses, it goes by what steps cost for one row; a batch is measured when it first
    comes, and its number of rows decides.

    Args:
        target, heads, statistics: that belong together; the heads as drafters read them.
        tree: which one: words as in tree_plan.py and blend_plan.py, or the tree itself.
        chain_only: the target verifies chains alone; of any tree its best chain is taken.
        acceptance: name of the rule that walks the trees.
        read_corpus: gives the text that drafts also continue; None for none.

    Attributes:
        tree: which it is, also where `auto` chose.
        drafter: for one row.

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
    ) -> None:
        self._target, self._heads, self._statistics = target, heads, statistics
        self._chain_only = chain_only
        self._compares = acceptance in DRAFT_PROBABILITY_RULES
        if tree == "auto" and (statistics is None or chain_only):
            tree = UNMEASURED_TREE
        elif tree == "auto" and self._compares:
            # What the text itself suggests comes without a probability.
            assert statistics is not None
            tree = best_tree(target, heads, statistics)
        self.tree = tree
        self._corpus: CorpusIndex | None = None
        if read_corpus is not None:
            if not continues_text(tree):
                raise ValueError(
                    f"a corpus is continued by the trees auto, N+suffix and suffix, and the tree "
                    f"here is {tree!r}: use one of them, or leave the corpus out"
                )
            self._corpus = read_corpus()  # only now: to index one may take a while
        self._by_rows: dict[int, Drafter] = {}
        self.drafter = self._made(1)

    def drafter_for(self, batch_size: int) -> Drafter | None:
        """The drafter for a batch; None where it is the one for a single row."""
        if not str(self.tree).startswith("auto") or batch_size == 1:
            return None
        rows = rounded_up(batch_size)
        # Rows of a compiled target stay to the end, and what has read the prompt must go on.
        if isinstance(self._target, CompiledTarget) or self.drafter.reads_prompt:
            return self._for_rows(rows)
        return ByRowsDrafter(self._for_rows, rows)

    def _for_rows(self, rows: int) -> Drafter:
        if rows not in self._by_rows:
            self._by_rows[rows] = self._made(rows)
        return self._by_rows[rows]

    def _made(self, rows: int) -> Drafter:
        if not isinstance(self.tree, str) or not blends(self.tree):
            return make_drafter(
                self.tree,
                self._heads,
                self._statistics,
                chain_only=self._chain_only,
                with_log_probs=self._compares,
                corpus=self._corpus,
            )
        if self._statistics is None or self._chain_only or self._compares:
            raise ValueError(
                f"the tree {self.tree!r} needs heads with statistics, a target that verifies "
                f"branches, and a rule other than {' and '.join(DRAFT_PROBABILITY_RULES)}"
            )
        return blended(
            self.tree,
            self._target,
            self._heads,
            self._statistics,
            batch_size=rows,
            corpus=self._corpus,
        )
