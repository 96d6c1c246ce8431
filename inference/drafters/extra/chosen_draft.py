"""Drafts of a draft model where they pay, and of whichever of several pays most."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from medusa_heads.inference.adapt.clock import Clock, most_again
from medusa_heads.inference.drafters.base import Drafter, Memory
from medusa_heads.inference.drafters.model.choice import DraftChoice
from medusa_heads.inference.drafters.model.draft_model import AdaptiveTree
from medusa_heads.inference.drafters.model.drafted_text import DraftedText
from medusa_heads.inference.engine.state import DecodingState, Drawing
from medusa_heads.trees.tree import TokenTree

_ACCEPTED = 0.65  # of a token behind an accepted one, before anything was drafted
_LEVELS = 8  # of a draft that is thought of then


class ChosenDraftDrafter(Drafter):
    """Before every step it is decided which draft model drafts, or that none does.

    One that was left aside reads what it has missed when its turn comes; the choice counts that. It
    rests on committed text and on seconds, never on what a draft model says of the step for which
    it is chosen: that would bend the law of a drawn text.

    Args:
        clock: seconds of the target's steps; learns from every one.
        drafters: of one draft model each, with the clock of its forwards.
        most: nodes of adaptive trees besides the root. Where all trees are of one size, there is a
            draft in every step.

    Attributes:
        steps: that each of them has drafted for.
    """

    def __init__(
        self, clock: Clock, drafters: Sequence[tuple[Drafter | AdaptiveTree, Clock]], most: int = 0
    ) -> None:
        self._clock, self._drafters = clock, list(drafters)
        fixed = [each.num_nodes - 1 for each, _ in drafters if not isinstance(each, AdaptiveTree)]
        self._most, self._rests = max([most, *fixed]), not fixed
        self.num_nodes = self._most + 1
        self.steps = [0] * len(drafters)
        # Where the target's tokens are drawn, or of more rows, another draft model may be the best.
        self._choices: dict[tuple[Drawing, int], DraftChoice] = {}
        self._took: float | None = None

    def propose(self, state: DecodingState) -> TokenTree:
        last = self._learn(state)
        rows = len(state.rows)
        active = [row for row in state.rows if not row.done]  # a compiled batch keeps the others
        choice = self._choice(state)
        prices = [
            0.0 if which == last else self._missed(state, which)
            for which in range(len(self._drafters))
        ]
        if self._rests:
            prices.insert(0, 0.0)
        which = choice.pick(prices, fmean(len(row.tokens) for row in active)) - self._rests
        tree, seconds = TokenTree.root_only(state.roots_B), 0.0
        if which >= 0:
            drafter, clock = self._drafters[which]
            if isinstance(drafter, AdaptiveTree):
                tree = drafter.draft(state, choice)
            else:
                tree = drafter.propose(state)
            self.steps[which] += 1
            text: DraftedText = state.memories[_owner(drafter)]
            seconds = sum(clock.step(rows * nodes) for nodes in text.reads)
        nodes = rows * tree.num_nodes + state.again
        state.memories[self] = _Step(Memory(active), choice, which, rows, nodes, seconds)
        self._took = None
        return tree

    def most_again(self, rows: int) -> int:
        return most_again(self._clock, rows)

    def rest(self, state: DecodingState) -> None:
        self._learn(state)

    def learn_seconds(self, nodes: int, seconds: float) -> None:
        self._took = seconds

    def _learn(self, state: DecodingState) -> int | None:
        """Compare the last step with what was committed since; returns who drafted for it."""
        step: _Step | None = state.memories.pop(self, None)
        if step is None:
            return None
        if self._took is not None and len(state.rows) == step.batch:
            self._clock.learn(step.nodes, self._took, max(step.active.lengths))
        gained = fmean(map(len, step.active.committed()))
        step.choice.learn(gained, self._clock.step(step.nodes) + step.drafting)
        drafter = self._drafters[step.which][0]
        if step.which >= 0 and isinstance(drafter, AdaptiveTree):
            drafter.learn(state)
        return step.which

    def _missed(self, state: DecodingState, which: int) -> float:
        """Seconds in which a draft model reads what was committed without it."""
        drafter, clock = self._drafters[which]
        text: DraftedText | None = state.memories.get(_owner(drafter))
        rows, read = len(state.rows), text.caught_up if text else 0.0
        missed = fmean(row.length for row in state.rows) - read
        return clock.step(rows * max(round(missed), 1)) - clock.step(rows)

    def _choice(self, state: DecodingState) -> DraftChoice:
        rows = len(state.rows)
        key = state.drawing, rows.bit_length()
        if key not in self._choices:
            priors = [self._prior(drafter, clock, rows) for drafter, clock in self._drafters]
            self._choices[key] = DraftChoice(
                self._clock, self._most, rows, priors, rests=self._rests
            )
        budget = self._choices[key].budget
        budget.rows, budget.again = rows, state.again
        return self._choices[key]

    def _prior(
        self, drafter: Drafter | AdaptiveTree, clock: Clock, rows: int
    ) -> tuple[float, float]:
        """Tokens and seconds to expect of a step: what a chain is expected to give and to take, and
        of an adaptive draft model the best one."""
        sizes = range(1, self._most + 1)
        if not isinstance(drafter, AdaptiveTree):
            sizes = range(drafter.num_nodes - 1, drafter.num_nodes)
        steps = []
        for size in sizes:
            levels = min(size, _LEVELS)
            tokens = (1 - _ACCEPTED ** (levels + 1)) / (1 - _ACCEPTED)
            verifying = self._clock.step(rows * (size + 1))
            steps.append((tokens, verifying + levels * clock.step(rows)))
        return max(steps, key=lambda step: step[0] / step[1])


class _Step(NamedTuple):
    """A step that was decided on."""

    active: Memory  # the rows that had not ended
    choice: DraftChoice
    which: int  # the draft model that drafted; below 0 where none did
    batch: int  # rows that were verified, ended ones included
    nodes: int  # of all of them, roots included
    drafting: float  # seconds that drafting took


def _owner(drafter: Drafter | AdaptiveTree) -> int | AdaptiveTree:
    """By what it finds its text among a state's memories."""
    return drafter.number if isinstance(drafter, Drafter) else drafter
