"""A draw among the likeliest tokens is that among all, wherever one is made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as known

from medusa_heads.inference.acceptance import likeliest
from medusa_heads.inference.acceptance.base import warp
from medusa_heads.inference.acceptance.likeliest import Likeliest
from medusa_heads.inference.engine.noise import Noise
from medusa_heads.inference.engine.rows import Row, ScoreRecorder, StopCheck

PROMPTS = [[3, 9, 200], [7, 7, 120], [250, 3, 1]]
VOCAB = 600
T = known.TemperatureLogitsWarper(0.7)
K = known.TopKLogitsWarper(20)
P = known.TopPLogitsWarper(0.9)
M = known.MinPLogitsWarper(0.05)
PENALTY = known.RepetitionPenaltyLogitsProcessor(1.3)
CHAINS = [[T, K], [K], [T, P], [P], [T, M], [T, K, P], [K, P, M], [T, K, P, M], [PENALTY, T, K, P]]


def rows_of(count: int, recorder: ScoreRecorder | None = None) -> list[Row]:
    stop = StopCheck(StoppingCriteriaList(), count)
    prompts = PROMPTS[:count]
    return [Row(i, count, torch.tensor(p), stop, None, recorder) for i, p in enumerate(prompts)]


def both(
    processors: Sequence[Any], logits_WV: Tensor, seed: int, recorder: ScoreRecorder | None = None
) -> tuple[list[int] | None, list[int]]:
    """What is drawn among the likeliest, and what among all."""
    rows = rows_of(len(logits_WV), recorder)
    noise = Noise(seed, rows, [0] * len(rows))
    every = LogitsProcessorList(processors)
    among = Likeliest.of(every)
    assert among is not None
    scores = [
        warp(every, row.ids_1T(), logits_1V.float())
        for row, logits_1V in zip(rows, logits_WV.clone()[:, None], strict=True)
    ]
    return among.draw(noise, rows, logits_WV), noise.draw(rows, torch.cat(scores)).tolist()


def some_logits(seed: int) -> Tensor:
    """Of one or three rows: flat or steep, with ties or without."""
    torch.manual_seed(seed)
    scale = (0.1, 1.0, 3.0, 6.0)[seed % 4]
    dtype = (torch.float32, torch.bfloat16)[seed // 4 % 2]
    return (torch.randn((1, 3)[seed // 8 % 2], VOCAB) * scale).to(dtype)


@pytest.mark.parametrize("processors", CHAINS)
def test_among_the_likeliest_the_same_is_drawn_as_among_all(processors: list[Any]) -> None:
    drawn = [both(processors, some_logits(seed), seed) for seed in range(64)]
    certain = [(among, every) for among, every in drawn if among is not None]
    assert [among for among, _ in certain] == [every for _, every in certain]
    assert len(certain) > 25  # at least: a nucleus of flat logits holds most tokens


def test_limits_that_are_not_kept_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(P, "top_p", 0.5)  # of what is drawn among the likeliest, and of that alone
    among = Likeliest.of(LogitsProcessorList([T, K, P]))
    monkeypatch.undo()
    monkeypatch.setattr(Likeliest, "of", lambda _: among)
    drawn = [both([T, K, P], some_logits(seed), seed) for seed in range(64)]
    assert any(one != other for one, other in drawn if one is not None)


@pytest.mark.parametrize("processors", CHAINS)
def test_rounding_decides_nothing(processors: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(likeliest, "_CLOSE", 1e3)
    assert both(processors, some_logits(2), 0)[0] is None


@pytest.mark.parametrize("wrong", [math.inf, math.nan, -math.inf])
def test_what_is_no_distribution_is_left_to_all_tokens(wrong: float) -> None:
    logits_1V = some_logits(2)
    if wrong == -math.inf:
        logits_1V[:] = wrong
    logits_1V[0, 5] = wrong
    assert both([T, K, P], logits_1V, 0)[0] is None


def test_few_tokens_that_may_be_drawn_are_enough() -> None:
    logits_1V = some_logits(2)
    logits_1V[0, 10:] = -math.inf
    among, every = both([T, P], logits_1V, 0)
    assert among == every
    assert both([T, K], logits_1V, 0)[0] in (None, both([T, K], logits_1V, 0)[1])


def test_who_is_to_be_given_all_scores_gets_them() -> None:
    recorder = ScoreRecorder()
    assert both([T, K], some_logits(2), 0, recorder)[0] is None


@pytest.mark.parametrize(
    "processors",
    [
        [],
        [T],
        [K, T],
        [T, known.TypicalLogitsWarper(0.5)],
        [T, known.TopKLogitsWarper(300)],
        [T, known.TopPLogitsWarper(0.9, min_tokens_to_keep=2)],
        [T, known.TopKLogitsWarper(9, filter_value=-100.0)],
        [lambda _, scores: scores, T, K],
    ],
)
def test_other_processors_are_left_alone(processors: list[Any]) -> None:
    assert Likeliest.of(LogitsProcessorList(processors)) is None
