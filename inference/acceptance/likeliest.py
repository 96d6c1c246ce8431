"""Drawing among the likeliest tokens alone, on the host, wherever this surely draws what all tokens
would.

Shapes: W rows, C likeliest tokens, V vocabulary.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import neg
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as known

from medusa_heads.inference.acceptance.base import look_at_one_row, look_at_scores_alone, warp
from medusa_heads.inference.engine.noise import Luck, Noise
from medusa_heads.inference.engine.rows import Row

# In the order in which generate() runs them, each at most once.
_ORDER = (
    known.TemperatureLogitsWarper,
    known.TopKLogitsWarper,
    known.TopPLogitsWarper,
    known.MinPLogitsWarper,
)
FEW = 64
_MANY = 256  # where no top_k says how many are left
_MOST = 512  # beyond which all tokens are hardly more work
CLOSE = 1e-4  # of what is closer, rounding in fp32 may decide
SUMMED = 1e-8  # for each token more of a sum in fp32, which takes those of one lane in turn
_MILD = 1e30  # times or by which a temperature leaves fp32 its digits
_HIGHEST = 300.0  # of scores, in which fp32 rounds by less
LOWEST = -60.0  # below the highest, which no noise makes up for
_UNLUCKY = 6.8  # a draw of the exponential law, beyond which fp32 knows it by few digits
# Tokens of the vocabulary for each one that is looked at, from which on that is less work: than
# for a row alone, for several at once, and if these are sorted.
_ALONE, _AT_ONCE, _SORTED = 2, 64, 8
_LONGEST_REST = 64  # of draws without a try, behind tries in vain


class Likeliest:
    """Draws by keyed noise, on a CPU, from what temperature, top_k, top_p and min_p leave.

    They leave few tokens as a rule, all of them among the likeliest. Then no other score has to be
    divided, sorted or given noise.

    Args:
        before: processors that look at one row each, and run before these.
        processors: temperature, top_k, top_p and min_p, as far as there are any.
    """

    def __init__(self, before: LogitsProcessorList, processors: LogitsProcessorList) -> None:
        of_kind: dict[type, Any] = {type(each): each for each in processors}
        temperature, top_k, top_p, min_p = map(of_kind.get, _ORDER)
        self._before = before
        at_once = _AT_ONCE if top_p is None else _SORTED
        self._times = at_once if look_at_scores_alone(before) else _ALONE
        self._in_vain = self._rest = 0
        self._temperature = 1.0 if temperature is None else temperature.temperature
        self._top_k = None if top_k is None else top_k.top_k
        self._top_p = None if top_p is None else top_p.top_p
        # Of the scores that min_p leaves, the highest being 0.
        self._least = math.log(min_p.min_p) if min_p is not None and min_p.min_p else -math.inf
        self._count = _MANY if top_k is None else max(FEW, 2 * top_k.top_k)

    @classmethod
    def of(cls, processors: LogitsProcessorList) -> Likeliest | None:
        """None where these are others, or leave many tokens."""
        split = limits_among(processors)
        if split is None or not look_at_one_row(split[0]):
            return None
        mild = all(1 / _MILD < getattr(each, "temperature", 1) < _MILD for each in split[1])
        return cls(*split) if mild else None

    def pays(self, rows: int, vocab: int) -> bool:
        """Whether to draw for so many rows so is less work than among all tokens, as far as known;
        to be asked before each draw. Behind draws in vain fewer and fewer are tried."""
        if vocab < self._count * (_ALONE if rows == 1 else self._times):
            return False
        self._rest -= 1
        return self._rest < 0

    def draw(self, noise: Noise, rows: Sequence[Row], logits_WV: Tensor) -> list[int | None]:
        """The next token of each row, by its logits. None where others than the likeliest tokens
        might be drawn, or rounding decides; and where somebody is to be given all scores."""
        if logits_WV.shape[1] <= self._count or any(row.recorder for row in rows):
            return [None] * len(rows)
        if self._before:
            given = zip(rows, logits_WV.to(copy=True, dtype=torch.float32)[:, None], strict=True)
            logits_WV = torch.cat(
                [warp(self._before, row.ids_1T(), logits_1V) for row, logits_1V in given]
            )
        highest_WC, tokens_WC = logits_WV.topk(self._count, dim=-1)
        totals: Sequence[float | None] = [None] * len(rows)
        close = CLOSE
        if self._top_p is not None and self._top_k is None:
            totals = self._totals(logits_WV)
            close += SUMMED * logits_WV.shape[1]
        likeliest = zip(rows, highest_WC.tolist(), tokens_WC.tolist(), totals, strict=True)
        drawn = [
            self._draw(noise.luck(row), highest, tokens, total, close)
            for row, highest, tokens, total in likeliest
        ]
        self._in_vain = self._in_vain + 1 if 2 * drawn.count(None) > len(rows) else 0
        self._rest = min(2**self._in_vain, _LONGEST_REST) - 2 if self._in_vain else 0
        return drawn

    def _totals(self, logits_WV: Tensor) -> list[float]:
        """Of each row the sum of all tokens' weights, the likeliest one's being 1."""
        scores_WV = logits_WV.float() / self._temperature
        near_0_WV = scores_WV.sub_(scores_WV.amax(dim=-1, keepdim=True))
        return near_0_WV.exp_().sum(dim=-1).tolist()

    def _draw(
        self, luck: Luck, highest: list[float], tokens: list[int], total: float | None, close: float
    ) -> int | None:
        """The token that is drawn behind one text, by scores in falling order. It is that with the
        least draw over weight. What lies so close to the limit of top_p may be on its other side.
        """
        if not abs(highest[0]) < _HIGHEST * self._temperature:
            return None
        scores = [(score - highest[0]) / self._temperature for score in highest]
        left = len(scores)  # at least; certainty is asked of the drawn one alone
        if self._top_k is not None:
            left = bisect_right(highest, -highest[self._top_k - 1], key=neg)
            if left == len(scores) or scores[left - 1] - scores[left] < CLOSE:
                return None
        weights = [math.exp(score) for score in scores[:left]]
        if self._top_p is not None:
            total = sum(weights) if total is None else total
            so_far = list(accumulate(weights))
            left = min(left, bisect_right(so_far, (self._top_p + close) * total) + 1)
            left = _as_likely(scores, left - 1, len(weights))
        left = min(left, bisect_right(scores, -max(self._least - CLOSE, LOWEST), key=neg))
        if left == len(scores):
            return None
        place, first, second = 0, math.inf, math.inf
        for i in range(left):
            time = min(luck(0, tokens[i]), _UNLUCKY) / weights[i]
            if time < first:
                place, first, second = i, time, first
            elif time < second:
                second = time
        if left > 1 and not (second > first * (1 + CLOSE) and first * weights[place] < _UNLUCKY):
            return None
        if self._top_p is not None:
            likelier = so_far[_as_likely(scores, place, len(weights)) - 1] - weights[place]
            if likelier > (self._top_p - close) * total:
                return None
        if scores[place] < self._least + CLOSE:
            return None
        return tokens[place]


def _as_likely(scores: list[float], place: int, end: int) -> int:
    """The end of those that may be sorted before this one: rounding can make unequal scores equal,
    and equal ones have no order."""
    return bisect_right(scores, -(scores[place] - CLOSE), key=neg, hi=end)


def limits_among(
    processors: LogitsProcessorList,
) -> tuple[LogitsProcessorList, LogitsProcessorList] | None:
    """What runs first, and then temperature, top_k, top_p and min_p. None where these are others,
    or leave many tokens."""
    first = next((i for i, each in enumerate(processors) if type(each) in _ORDER), 0)
    before, last = map(LogitsProcessorList, (processors[:first], processors[first:]))
    kinds = [type(each) for each in last]
    limits: list[Any] = [each for each in last if type(each) in _ORDER[1:]]
    serves = (
        kinds == [kind for kind in _ORDER if kind in kinds]
        and limits != []  # torch 2.9 compiles no bool() of a list
        and all(each.filter_value == -math.inf for each in limits)
        and all(getattr(each, "min_tokens_to_keep", 1) == 1 for each in limits)
        and all(2 * getattr(each, "top_k", 0) <= _MOST for each in limits)
    )
    return (before, last) if serves else None
