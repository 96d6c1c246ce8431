"""Which of several draft models to use next, from what each has given and taken so far.

What is tried besides the best is bounded by time: every draft model has an allowance, which grows
by a small share of the seconds spent without it, and its trials are paid out of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from medusa_heads.inference.draft_costs import DraftCosts

_TRIAL = 12  # steps of the draft model on trial, and as many of the best one among them
_FIRST_ALLOWANCE = 12  # plain steps that getting to know a draft model may cost
_SHARE = 0.03  # of all seconds, that trials of all the others together may cost
_DEAREST = 4  # how many times its price a trial is taken for, after several that gained nothing
_HORIZON = 64  # tokens that a text is expected to go on for, at the least
_FORGET = 0.98  # of steps in trials: what was seen fifty of them ago counts little
_PRIOR_STEPS = 4.0  # in which an untried draft model is taken to have been as good as the best


class DraftChoice:
    """The draft model with the most tokens a second, and now and then another one.

    Some passages of a text are easier than others, so speeds are compared within trials alone,
    where two draft models take turns.

    The choice rests on committed text and on measured costs, never on what a draft model says of
    the step for which it is chosen: that would bend the law of a drawn text.

    Args:
        costs: of each draft model.
    """

    def __init__(self, costs: Sequence[DraftCosts]) -> None:
        self._costs, models = list(costs), len(costs)
        plain = costs[0].verification[0]  # the target's alone, whoever drafts
        self._best = 0
        self._speed = _Gain(_PRIOR_STEPS, _PRIOR_STEPS * plain)  # of the best, of late
        # Of each in its trials, and of the best in the same.
        self._own = [_Gain(_PRIOR_STEPS, _PRIOR_STEPS * plain) for _ in costs]
        self._others = [_Gain(_PRIOR_STEPS, _PRIOR_STEPS * plain) for _ in costs]
        self._allowances = [_FIRST_ALLOWANCE * plain] * models
        self._dearness = [1] * models
        self._trying: int | None = None
        self._trial_steps = 0  # since the trial began
        self._loss = 0.0  # seconds that it was taken to lose

    def pick(self, unread: Sequence[float], written: float) -> int:
        """The draft model for the next step.

        Args:
            unread: tokens that each of them would have to read.
            written: tokens of the text that are not its prompt's; so many more may come.
        """
        if self._trying is not None and self._trial_steps == 2 * _TRIAL:
            self._end_trial()
        if self._trying is None:
            self._change(unread, max(written, _HORIZON))
            self._begin_trial(unread)
        if self._trying is None:
            return self._best
        # Neither in strict turns, which a text that repeats itself could be in step with.
        turn = self._trial_steps.bit_count() % 2
        self._trial_steps += 1
        return self._best if turn else self._trying

    def begin_text(self) -> None:
        """A trial ends with the text: of the next one, other draft models have read as little."""
        if self._trying is not None:
            self._end_trial()

    def learn(self, which: int, tokens: float, seconds: float) -> None:
        """What a step gave each row, and what it took, apart from reading what was unread."""
        if which == self._best:
            self._speed.add(tokens, seconds)
        if self._trying is not None:
            gains = self._own if which == self._trying else self._others
            gains[self._trying].add(tokens, seconds)
        for i in range(len(self._costs)):
            if i != which:
                self._allowances[i] += _SHARE * seconds / (len(self._costs) - 1)

    def _change(self, unread: Sequence[float], ahead: float) -> None:
        """Find the best for so many tokens, with what must be read before."""
        seconds = [
            ahead / (self._speed.rate * self._relative(i)) + self._reading(i, unread[i])
            for i in range(len(self._costs))
        ]
        best = min(range(len(seconds)), key=seconds.__getitem__)
        if best == self._best:
            return
        gained, before = self._relative(best), self._best
        # What the two were against each other is turned round; all the rest are measured by the
        # new one.
        self._own[before], self._others[before] = self._others[best], self._own[best]
        for i, others in enumerate(self._others):
            if i not in (best, before):
                others.tokens *= gained
        self._speed.tokens *= gained
        self._best, self._dearness[best] = best, 1

    def _begin_trial(self, unread: Sequence[float]) -> None:
        """Of whichever other one has most left of its allowance, if there is as much."""
        others = [i for i in range(len(self._costs)) if i != self._best]
        left = {i: self._allowances[i] - self._price(i, unread[i]) for i in others}
        wanted = max(left, key=left.__getitem__)
        if left[wanted] >= 0:
            self._allowances[wanted] = left[wanted]
            self._trying, self._trial_steps = wanted, 0
            self._loss = self._lost(wanted)

    def _end_trial(self) -> None:
        assert self._trying is not None
        tried, self._trying = self._trying, None
        # What nobody could know before is paid afterwards.
        self._allowances[tried] -= max(self._lost(tried) - self._loss, 0.0)
        self._dearness[tried] = min(2 * self._dearness[tried], _DEAREST)

    def _price(self, which: int, unread: float) -> float:
        """Seconds that a trial is taken to cost, with what must be read for it."""
        return self._dearness[which] * (self._lost(which) + self._reading(which, unread))

    def _lost(self, which: int) -> float:
        """Seconds of a trial in which the best draft model would have gained more. None where that
        has become as slow as the other one was."""
        relative = max(self._relative(which), self._own[which].rate / self._speed.rate)
        return _TRIAL * self._speed.step * max(1 - relative, 0.0)

    def _relative(self, which: int) -> float:
        """Its speed over that of the best."""
        if which == self._best:
            return 1.0
        return self._own[which].rate / self._others[which].rate

    def _reading(self, which: int, unread: float) -> float:
        """Seconds before it can draft again."""
        return unread * self._costs[which].reading


@dataclass
class _Gain:
    """Of late steps.

    Attributes:
        tokens: of a row.
        seconds: in all.
        steps: how many.
    """

    tokens: float
    seconds: float
    steps: float = _PRIOR_STEPS

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def step(self) -> float:
        """Seconds a step."""
        return self.seconds / self.steps

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens = _FORGET * self.tokens + tokens
        self.seconds = _FORGET * self.seconds + seconds
        self.steps = _FORGET * self.steps + 1
