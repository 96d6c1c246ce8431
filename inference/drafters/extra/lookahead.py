"""Drafts from the target's own parallel guesses at what comes later: lookahead decoding.

Every forward that verifies drafts also runs a window of guesses through the target, one Jacobi
iteration a step. Each column of the window holds the guesses that the last iterations made for
consecutive positions; what the target takes to follow them completes an n-gram, which is drafted
when the text comes to its first token.

The window hangs below the root like any draft, each guess behind the ones it was made from, so that
the verifying forward and its mask know nothing of it. Here are 3 columns of 4-grams: a first row
that is a chain, and below each of its guesses the later ones for the positions behind it.

    root --- a0 ------- b0 ------- c0
              `- a1      `- b1      `- c1
                  `- a2      `- b2      `- c2       a0 a1 a2 and what the target says next: a 4-gram

A window takes time in every step. Where steps without it bring more tokens per second, it is left
out, and tried again now and then.

Shapes: B active rows, N nodes of the tree below which the window hangs, W nodes of the window, V
vocabulary.
Source: Fu et al. 2024, "Break the sequential dependency of LLM inference using lookahead decoding",
arXiv:2402.02057; Jacobi iterations: Santilli et al. 2023, arXiv:2305.10427.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from medusa_heads.inference.adapt.bandit import Allowance, Bandit
from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.adapt.evidence import Evidence
from medusa_heads.inference.drafters.base import Drafter, Memory
from medusa_heads.inference.drafters.blended import BlendedDrafter
from medusa_heads.inference.drafters.growing import Proposal, Source, by_drawing
from medusa_heads.inference.engine.rows import Row
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.trees.tree import TokenTree, TreeShape

COLUMNS = 5
NGRAM = 4
WINDOW = COLUMNS * (NGRAM - 1)  # guesses that every forward carries
# Level by level: the last `COLUMNS` nodes are those that the target's new guesses come behind.
_CELLS = [(level, column) for level in range(NGRAM - 1) for column in range(COLUMNS)]
_FIRST = (0.35, 0.17, 0.12, 0.09, 0.07, 0.06, 0.05, 0.04)  # that the latest n-grams begin rightly
_NEXT = 0.6  # and go on so; how far both hold here is learnt
_WITHOUT, _WITH = 0, 1  # ways
_STRETCH = 24  # steps of one way: what a window found is drafted in later steps
_WORTH = 1.5  # tokens a step that a window is expected to make of 1, before any was run


class NgramPool:
    """Of every token the `most` n-grams that began with it last."""

    def __init__(self, most: int = len(_FIRST)) -> None:
        self._most = most
        self._behind: dict[int, dict[tuple[int, ...], None]] = {}  # in order, the latest last

    def add(self, ngram: Sequence[int]) -> None:
        """Keep an n-gram, or make it the latest again."""
        known = self._behind.setdefault(ngram[0], {})
        rest = tuple(ngram[1:])
        known.pop(rest, None)
        known[rest] = None
        if len(known) > self._most:
            del known[next(iter(known))]

    def behind(self, token: int) -> list[tuple[int, ...]]:
        """What followed the token in its n-grams, the latest first."""
        return list(reversed(self._behind.get(token, {})))


def ngram_proposal(evidence: Evidence, pool: NgramPool, root: int) -> Proposal:
    """The n-grams of a token. A place is the tokens that were followed behind it."""
    ngrams = pool.behind(root)

    def behind(place: tuple[int, ...]) -> list[tuple[int, float, int, Any]]:
        depth = len(place)
        tokens = dict.fromkeys(  # each once, the latest first
            ngram[depth] for ngram in ngrams if ngram[:depth] == place and len(ngram) > depth
        )
        offers = []
        for rank, token in enumerate(tokens):
            chance = _NEXT / (rank + 1) if depth else _FIRST[rank]
            offers.append((token, chance, depth * len(_FIRST) + rank, (*place, token)))
        return offers

    return Proposal(evidence, (), behind)


class NgramSource(Source):
    """What the pool, which others fill, holds of each row's last token."""

    name = "n-grams"

    def __init__(self, pool: NgramPool) -> None:
        self._pool = pool
        self.evidence = by_drawing(lambda: Evidence([1.0] * (len(_FIRST) * NGRAM)))

    def draft(self, state: DecodingState) -> list[Proposal]:
        evidence = self.evidence[state.drawing]
        return [ngram_proposal(evidence, self._pool, row.tokens[-1]) for row in state.rows]

    def expected(self, nodes: int) -> float:
        return nodes / (nodes + 6.0)


class LookaheadDrafter(Drafter):
    """Drafts, one of whose sources reads the pool, and behind them the window that fills it, where
    it pays, or always. The pool is carried from text to text; a window belongs to one row."""

    def __init__(
        self, drafts: BlendedDrafter, pool: NgramPool, clock: Clock, *, always: bool = False
    ) -> None:
        self.pool = pool
        self._drafts, self._clock, self._always = drafts, clock, always
        self._ways: dict[int, _Ways] = {}  # by rows
        # The first level is a chain; what hangs below it is named by rank 1.
        self._shape = TreeShape([(0,) * (column + 1) + (1,) * level for level, column in _CELLS])
        self._asked: tuple[TokenTree, list[_Window]] | None = None
        self._beside = False  # whether the last tree has a window
        self.num_nodes, self.reads_prompt = drafts.num_nodes + WINDOW, drafts.reads_prompt

    def propose(self, state: DecodingState) -> TokenTree:
        last: _Step | None = state.memories.get(self)
        if last is not None:
            gained = [len(committed) for committed in last.committed()]
            last.ways.learn(sum(gained) / len(gained), last.seconds)
        rows = len(state.rows)
        if rows not in self._ways:
            self._ways[rows] = _Ways(self._clock, rows)
        drafts = self._drafts.propose(state)
        self._beside = self._always or self._ways[rows].next() == _WITH
        seconds = self._clock.step(rows * (drafts.num_nodes + WINDOW * self._beside))
        step = state.memories[self] = _Step(state.rows, self._ways[rows], seconds)
        if not self._beside:
            return drafts
        if last is not None:
            step.windows = last.windows  # none where their positions were passed by
        return self._beside_windows(drafts, state, step.windows)

    def learn_seconds(self, nodes: int, seconds: float) -> None:
        if not self._beside:  # else it would be taken for the time of the drafts alone
            self._drafts.learn_seconds(nodes, seconds)

    def _beside_windows(
        self, drafts: TokenTree, state: DecodingState, known: dict[Row, _Window]
    ) -> TokenTree:
        for gone in known.keys() - set(state.rows):
            del known[gone]
        windows = []
        for row, padding in zip(state.rows, state.padding, strict=True):
            if row not in known:
                known[row] = _Window(row, padding)
            windows.append(known[row])
            windows[-1].follow(row.length)
        told = [window.tokens() for window in windows]
        tree = self._with_window(drafts, torch.tensor(told, device=drafts.tokens_BN.device))
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


class _Ways:
    """With a window or without one, stretch by stretch; of so many rows decoded together."""

    def __init__(self, clock: Clock, rows: int) -> None:
        plain, beside = clock.step(rows), clock.step(rows * (1 + WINDOW))
        self._allowance = Allowance(_STRETCH * plain)
        priors = [(_STRETCH * 1.0, _STRETCH * plain), (_STRETCH * _WORTH, _STRETCH * beside)]
        self._bandit = Bandit(priors, self._allowance, weight=1.0)
        self._way, self._left = _WITH, 2 * _STRETCH  # there is a pool to fill first
        self._tokens = self._seconds = 0.0
        self._steps = 0

    def next(self) -> int:
        """The way of the next step."""
        if self._left <= 0 and self._steps:
            share = _STRETCH / self._steps
            self._allowance.grow(self._seconds)
            self._bandit.learn(self._way, share * self._tokens, share * self._seconds)
            self._way = self._bandit.pick(self._tokens / self._seconds)
            self._left, self._steps, self._tokens, self._seconds = _STRETCH, 0, 0.0, 0.0
        self._left -= 1
        return self._way

    def learn(self, tokens: float, seconds: float) -> None:
        """A step gave a row so many tokens, and took so long."""
        self._tokens += tokens
        self._seconds += seconds
        self._steps += 1


class _Step(Memory):
    """A step, its seconds, and the windows that ran in it, by row."""

    def __init__(self, rows: Sequence[Row], ways: _Ways, seconds: float) -> None:
        super().__init__([row for row in rows if not row.done])  # a compiled batch keeps the others
        self.ways, self.seconds = ways, seconds
        self.windows: dict[Row, _Window] = {}


class _Window:
    """One row's guesses: for each level of iteration, a token a column. At first they are the end
    of the prompt, as if it came again."""

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
        return [self._levels[level][column] for level, column in _CELLS]

    def learn(self, said: list[int]) -> list[tuple[int, ...]]:
        """Take the target's tokens behind the columns; returns the n-grams they complete."""
        self._levels.append(said)
        ngrams = list(zip(*self._levels, strict=True))
        del self._levels[0]
        return ngrams
