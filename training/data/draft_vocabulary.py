"""The tokens that heads draft. Of a large vocabulary a text holds a part, and every level of drafts
multiplies by the vocabulary matrix: with fewer rows drafts cost less (FR-Spec, Zhao et al. 2025,
arXiv:2502.14856). The target writes all other tokens itself.

How many are enough is asked of held-out text: the training text covers itself, however short it is.

Shapes: V vocabulary of the target, C tokens that can be drafted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from medusa_heads.config import HeadsConfig
from medusa_heads.heads import frequent_tokens
from medusa_heads.training.arguments.vocabulary import DraftVocab
from medusa_heads.training.data.prepare import TrainingData
from medusa_heads.training.data.row_facts import TOKENS_PER_ENTRY, count_tokens

COVERED = 0.99
"""The share of held-out text that chosen tokens must be."""
LEAST = 4096
"""So many tokens are chosen at least: fewer are hardly faster, and other text may want them."""

_MULTIPLE = 128
_MEASURED = 2000  # held-out tokens that tell shares apart: COVERED leaves twenty of them out
_OF_A_STREAM = 1 << 22  # tokens that are counted


@dataclass(frozen=True)
class DraftVocabulary:
    """What heads draft, and why."""

    tokens_C: Tensor | None  # token ids, ascending; None for all of the target's
    vocab_size: int
    # The share of held-out text that these tokens are; None where it was not asked.
    covered: float | None = None
    # Of heads that draft every token the reason, as far as it is worth saying.
    why: str | None = None

    @property
    def size(self) -> int | None:
        """How many tokens; None for all."""
        return None if self.tokens_C is None else len(self.tokens_C)

    def sentence(self) -> str | None:
        """For the user, where there is anything to say."""
        if self.size is not None and self.covered is not None:
            return (
                f"heads draft {self.size:,} of the target's {self.vocab_size:,} tokens, the "
                f"commonest of the training text, which make up {100 * self.covered:.2f} % of the "
                "held-out text (draft_vocab_size)"
            )
        if self.why is None:
            return None
        return f"heads draft all of the target's {self.vocab_size:,} tokens: {self.why}"

    def record(self) -> dict[str, Any]:
        """For the story of a run."""
        told = {"tokens": self.size or self.vocab_size, "of": self.vocab_size}
        return told | {"held_out_share": self.covered, "why_all": self.why}


def choose_vocabulary(
    data: TrainingData,
    vocab_size: int,
    config: HeadsConfig,
    asked: DraftVocab,
    *,
    known_C: Tensor | None = None,
    whole_matrix: bool = False,
) -> DraftVocabulary:
    """What heads of this shape draft: the tokens that are known from before, else the commonest of
    the text, as many as the configuration says, or as few as cover it; else all. Raises ValueError:
    the configuration asks for more tokens than there are.

    Args:
        known_C: what a run that goes on has drafted so far.
        whole_matrix: whether a copy of the target's whole vocabulary matrix goes with the heads.
    """
    size = config.draft_vocab_size
    if known_C is None and size is not None:
        known_C = frequent_tokens(_count(data, vocab_size, size * TOKENS_PER_ENTRY), size)
    if known_C is not None:
        held_V = count_tokens(data.held_out, vocab_size, most=0)
        covered = float(held_V[known_C].sum()) / max(int(held_V.sum()), 1)
        return DraftVocabulary(known_C, vocab_size, covered)
    every = partial(DraftVocabulary, None, vocab_size)
    if asked == "all" or vocab_size < 2 * LEAST:
        return every()
    if whole_matrix:
        return every(why="with_vocab_matrix lays the whole vocabulary matrix beside them")
    if config.is_plain_medusa and config.vocab_matrix == "own":
        return every(
            why="no other engine holds medusa heads that have matrices of their own for a part of "
            "the vocabulary; draft_vocab_size with a number chooses one nevertheless"
        )
    return _fewest(data, vocab_size)


def _fewest(data: TrainingData, vocab_size: int) -> DraftVocabulary:
    every = partial(DraftVocabulary, None, vocab_size)
    held_V = count_tokens(data.held_out, vocab_size, most=0)
    measured = int(held_V.sum())
    if measured < _MEASURED:
        return every(
            why=f"the held-out text has {measured:,} tokens that are learnt, and fewer than "
            f"{_MEASURED:,} do not tell what others will need"
        )
    counts_V = _count(data, vocab_size, _OF_A_STREAM)
    order_V = counts_V.argsort(descending=True, stable=True)
    shares_V = held_V[order_V].cumsum(0).double() / measured
    seen = int((counts_V > 0).sum())
    enough = int((shares_V < COVERED).sum()) + 1
    if enough > seen:
        return every(
            why=f"the training text holds {seen:,} of them, which make up "
            f"{100 * float(shares_V[seen - 1]):.2f} % of the held-out text, and "
            f"{100 * COVERED:g} % are wanted of fewer: more text may allow that"
        )
    size = max(math.ceil(enough / _MULTIPLE) * _MULTIPLE, LEAST)
    if 2 * size > vocab_size:
        return every(
            why=f"{100 * COVERED:g} % of the held-out text takes {enough:,}, and more than half "
            "are hardly cheaper than all"
        )
    return DraftVocabulary(frequent_tokens(counts_V, size), vocab_size, float(shares_V[size - 1]))


def _count(data: TrainingData, vocab_size: int, most: int) -> Tensor:
    """How often each token is learnt, [V]; of a stream's pass, about so many of all."""
    rows = data.known_rows if data.one_pass is None else data.one_pass
    return count_tokens(rows, vocab_size, most=most)
