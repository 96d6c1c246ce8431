"""Drafts from the target's own parallel guesses at what comes later: lookahead decoding.

Every forward that verifies drafts also runs a window of guesses through the target, one Jacobi
iteration a step. Each column of the window holds the guesses that the last iterations made for
consecutive positions; what the target takes to follow them completes an n-gram. N-grams are kept in
a pool by their first token, and are drafted when the text comes to that token.

The window hangs below the root like any draft, each guess behind the ones it was made from, so that
the verifying forward and its mask know nothing of it. Here are 3 columns of 4-grams: a first row
that is a chain, and below each of its guesses the later ones for the positions behind it.

    root --- a0 ------- b0 ------- c0
              `- a1      `- b1      `- c1
                  `- a2      `- b2      `- c2       a0 a1 a2 and what the target says next: a 4-gram

A window takes time in every step. Where the same drafts bring more tokens per second without it, it
is left out, and tried again now and then.

Shapes: B active rows, N nodes of the tree below which the window hangs, W nodes of the window, V
vocabulary.
Source: Fu et al. 2024, "Break the sequential dependency of LLM inference using lookahead decoding",
arXiv:2402.02057; Jacobi iterations: Santilli et al. 2023, arXiv:2305.10427.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from medusa_heads.inference.drafters.blended import BlendedDrafter
from medusa_heads.inference.ngram_pool import NgramPool
from medusa_heads.inference.step_costs import StepCosts
from medusa_heads.prefix_tree import PrefixTree
from medusa_heads.tree import TokenTree, TreeShape

if TYPE_CHECKING:
    from medusa_heads.inference.corpus_index import CorpusIndex
    from medusa_heads.inference.row import Row
    from medusa_heads.inference.state import DecodingState

COLUMNS = 5
NGRAM = 4
WINDOW = COLUMNS * (NGRAM - 1)  # guesses that every forward carries
# Level by level: the last `COLUMNS` nodes are those that the target's new guesses come behind.
_CELLS = [(level, column) for level in range(NGRAM - 1) for column in range(COLUMNS)]
_FIRST = (0.35, 0.17, 0.12, 0.09, 0.07, 0.06, 0.05, 0.04)  # that the latest n-grams begin rightly
_NEXT = 0.6  # and go on so; how far both hold here is learnt
_WITH_WINDOW = 0  # the first way to go
_TRIAL = 24  # steps
_BETWEEN_TRIALS = 480
_FORGET = 0.98  # what was seen fifty steps ago counts little


class LookaheadDrafter:
    """N-grams of the pool, as many as pay, and the window that fills it.

    The pool is carried from text to text; a window belongs to one row.

    Args:
        costs: what steps cost here that verify so many nodes beside a window of `WINDOW`.
        alone: what steps cost here without a window; None for a window in every step.
        suffix: whether the continuation of the text's longest suffix is merged in.
        corpus: whose continuation of it is merged in as well; None for none.
    """

    reads_prompt = False

    def __init__(
        self,
        costs: StepCosts,
        alone: StepCosts | None = None,
        *,
        suffix: bool = False,
        corpus: CorpusIndex | None = None,
    ) -> None:
        self.pool = NgramPool(NGRAM, len(_FIRST))
        self._ways = [_Way(self.pool, costs, suffix, corpus)]
        if alone is not None:
            self._ways.append(_Way(self.pool, alone, suffix, corpus))
        self.choice = Choice(len(self._ways))
        # The first level is a chain; what hangs below it is named by rank 1.
        self._shape = TreeShape([(0,) * (column + 1) + (1,) * level for level, column in _CELLS])
        self._asked: tuple[TokenTree, list[_Window]] | None = None

    @property
    def num_nodes(self) -> int:
        """The most nodes that a proposed tree has, the root included."""
        return max(way.drafts.num_nodes for way in self._ways) + WINDOW

    def propose(self, state: DecodingState) -> TokenTree:
        """Drafts for every active row, and the row's window behind them where that pays."""
        text: _Text = state.memories.setdefault(self, _Text())
        if text.lengths:
            known = [row for row in state.rows if row.index in text.lengths]
            committed = sum(row.length - text.lengths[row.index] for row in known)
            self.choice.learn(text.way, committed / len(known), text.seconds)
            self._ways[text.way].drafts.learn(state)
        text.way = self.choice.next()
        way = self._ways[text.way]
        drafts = way.drafts.propose(state)
        text.seconds = way.costs.seconds(drafts.num_nodes - 1)
        # A compiled batch keeps rows that have ended.
        text.lengths = {row.index: row.length for row in state.rows if not row.done}
        if text.way != _WITH_WINDOW:
            text.windows.clear()  # their positions are passed by
            return drafts
        return self._beside_windows(drafts, state, text.windows)

    def _beside_windows(
        self, drafts: TokenTree, state: DecodingState, known: dict[int, _Window]
    ) -> TokenTree:
        windows = []
        for row, padding in zip(state.rows, state.padding, strict=True):
            if row.index not in known:
                known[row.index] = _Window(row, padding)
            windows.append(known[row.index])
            windows[-1].follow(row.length)
        tokens_BW = torch.tensor([window.tokens() for window in windows])
        tree = self._with_window(drafts, tokens_BW.to(drafts.tokens_BN.device))
        self._asked = (tree, windows)
        return tree

    def observe(self, tree: TokenTree, logits_BNV: Tensor) -> None:
        """Take what the target says behind each column: an n-gram, and the column's next guess."""
        asked, self._asked = self._asked, None
        if asked is None or asked[0] is not tree:
            return  # the prompt, or a tree whose verification came to nothing
        for window, said in zip(
            asked[1], logits_BNV[:, -COLUMNS:].argmax(-1).tolist(), strict=True
        ):
            for ngram in window.learn(said):
                self.pool.add(ngram)

    def _with_window(self, drafts: TokenTree, tokens_BW: Tensor) -> TokenTree:
        """The window's nodes behind the drafts', the first of them below the root."""
        nodes = drafts.num_nodes
        window = self._shape.tree(torch.cat([drafts.tokens_BN[:, :1], tokens_BW], dim=1))
        parents_BW = window.parents_BN[:, 1:]
        ancestors_BNN = F.pad(drafts.ancestors_BNN, (0, WINDOW, 0, WINDOW))
        ancestors_BNN[:, nodes:, 0] = True
        ancestors_BNN[:, nodes:, nodes:] = window.ancestors_BNN[:, 1:, 1:]
        return TokenTree(
            torch.cat([drafts.tokens_BN, tokens_BW], dim=1),
            torch.cat(
                [drafts.parents_BN, parents_BW.where(parents_BW == 0, parents_BW + nodes - 1)],
                dim=1,
            ),
            torch.cat([drafts.depth_BN, window.depth_BN[:, 1:]], dim=1),
            ancestors_BNN,
        )


class _Way:
    """Drafts of the pool at one kind of costs."""

    def __init__(
        self, pool: NgramPool, costs: StepCosts, suffix: bool, corpus: CorpusIndex | None
    ) -> None:
        self.costs = costs
        self.drafts = BlendedDrafter(
            None, costs, cheap=PoolTrees(pool), suffix=suffix, corpus=corpus
        )


class _Text:
    """Where the texts being decoded stood when they were last drafted for, and how."""

    def __init__(self) -> None:
        self.way = _WITH_WINDOW
        self.seconds = 0.0
        self.lengths: dict[int, int] = {}
        self.windows: dict[int, _Window] = {}


class Choice:
    """Which of several ways is the fastest: each is tried, then the best one gone, and the others
    tried again from time to time.

    Args:
        ways: how many there are.
    """

    def __init__(self, ways: int) -> None:
        self._tokens = [0.0] * ways
        self._seconds = [0.0] * ways
        self._way = 0
        self._left = 2 * _TRIAL  # the first one also has a pool to fill
        self._gone = 0  # steps along the best way since another was tried

    def next(self) -> int:
        """The way of the next step."""
        if len(self._tokens) == 1:
            return 0
        if self._left == 0:
            untried = [way for way, seconds in enumerate(self._seconds) if not seconds]
            best = max(range(len(self._tokens)), key=self._speed)
            if untried:
                self._way, self._left = untried[0], _TRIAL
            elif self._way == best and self._gone >= _BETWEEN_TRIALS:
                self._way, self._left, self._gone = (best + 1) % len(self._tokens), _TRIAL, 0
            else:
                self._gone = self._gone + 1 if self._way == best else 0
                self._way, self._left = best, 1
        self._left -= 1
        return self._way

    def learn(self, way: int, tokens: float, seconds: float) -> None:
        """What a step that went this way brought a row, and what it cost."""
        self._tokens[way] = _FORGET * self._tokens[way] + tokens
        self._seconds[way] = _FORGET * self._seconds[way] + seconds

    def _speed(self, way: int) -> float:
        return self._tokens[way] / max(self._seconds[way], 1e-9)


class PoolTrees:
    """What the pool holds of each row's last token: a grower, so that other drafts merge in."""

    reads_prompt = False

    def __init__(self, pool: NgramPool) -> None:
        self._pool = pool

    def grow(self, state: DecodingState) -> list[PrefixTree]:
        """See Grower."""
        return [self._grow(root) for root in state.roots_B.tolist()]

    def _grow(self, root: int) -> PrefixTree:
        tree = PrefixTree(root)
        for first, tokens in zip(_FIRST, self._pool.behind(root), strict=False):
            tree.add_path(tokens, [first * _NEXT**depth for depth in range(len(tokens))])
        return tree


class _Window:
    """One row's guesses: for each level of iteration, a token a column.

    At first they are the end of the prompt, as if it came again.
    """

    def __init__(self, row: Row, padding: int) -> None:
        end = row.ids_1T()[0, padding:].tolist()[-(COLUMNS + NGRAM) :]
        self._levels = [
            [end[(level + column) % len(end)] for column in range(COLUMNS)]
            for level in range(NGRAM - 1)
        ]
        self._length = row.length - 1

    def follow(self, length: int) -> None:
        """The text has this length now: guesses at positions that it has reached are dropped."""
        reached = min(length - self._length - 1, COLUMNS)
        self._length = length
        for level, guesses in enumerate(self._levels):
            # What comes in at the far end is guessed from what stands there.
            self._levels[level] = guesses[reached:] + guesses[:reached]

    def tokens(self) -> list[int]:
        """All guesses, level by level."""
        return [self._levels[level][column] for level, column in _CELLS]

    def learn(self, said: list[int]) -> list[tuple[int, ...]]:
        """Take the target's tokens behind the columns; returns the n-grams they complete."""
        self._levels.append(said)
        ngrams = list(zip(*self._levels, strict=True))
        del self._levels[0]
        return ngrams
