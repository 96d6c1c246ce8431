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

from medusa_heads.inference.acceptance import SampleThenMatch, likeliest
from medusa_heads.inference.acceptance.base import warp
from medusa_heads.inference.acceptance.likeliest import Likeliest
from medusa_heads.inference.engine.noise import Noise
from medusa_heads.inference.engine.rows import Row, ScoreRecorder, StopCheck
from medusa_heads.trees.tree import TokenTree

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
) -> list[tuple[int | None, int]]:
    """What is drawn for each row among the likeliest, and what among all."""
    rows = rows_of(len(logits_WV), recorder)
    noise = Noise(seed, rows, [0] * len(rows))
    every = LogitsProcessorList(processors)
    among = Likeliest.of(every)
    assert among is not None
    scores = [
        warp(every, row.ids_1T(), logits_1V.float())
        for row, logits_1V in zip(rows, logits_WV.clone()[:, None], strict=True)
    ]
    every_one = noise.draw(rows, torch.cat(scores)).tolist()
    return list(zip(among.draw(noise, rows, logits_WV), every_one, strict=True))


def some_logits(seed: int) -> Tensor:
    """Of one or three rows: flat or steep, with ties or without."""
    torch.manual_seed(seed)
    scale = (0.1, 1.0, 3.0, 6.0)[seed % 4]
    dtype = (torch.float32, torch.bfloat16)[seed // 4 % 2]
    return (torch.randn((1, 3)[seed // 8 % 2], VOCAB) * scale).to(dtype)


@pytest.mark.parametrize("processors", CHAINS)
def test_among_the_likeliest_the_same_is_drawn_as_among_all(processors: list[Any]) -> None:
    drawn = [pair for seed in range(64) for pair in both(processors, some_logits(seed), seed)]
    certain = [(among, every) for among, every in drawn if among is not None]
    assert [among for among, _ in certain] == [every for _, every in certain]
    assert len(certain) > 55  # of 128, at least: a nucleus of flat logits holds most tokens


def test_limits_that_are_not_kept_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(P, "top_p", 0.5)  # of what is drawn among the likeliest, and of that alone
    among = Likeliest.of(LogitsProcessorList([T, K, P]))
    monkeypatch.undo()
    monkeypatch.setattr(Likeliest, "of", lambda _: among)
    drawn = [pair for seed in range(64) for pair in both([T, K, P], some_logits(seed), seed)]
    assert any(one != other for one, other in drawn if one is not None)


@pytest.mark.parametrize("processors", CHAINS)
def test_rounding_decides_nothing(processors: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(likeliest, "CLOSE", 1e3)
    assert both(processors, some_logits(2), 0)[0][0] is None


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.4])
@pytest.mark.parametrize("apart", [2.0**-30, 2.0**-21])  # less than fp32 tells
def test_scores_that_rounding_makes_equal_are_left_to_all_tokens(
    temperature: float, apart: float
) -> None:
    chain = [known.TemperatureLogitsWarper(temperature), known.TopPLogitsWarper(0.4)]
    for seed in range(40):
        torch.manual_seed(seed)
        logits_1V = torch.zeros(1, VOCAB, dtype=torch.float64)
        logits_1V[0, :20] = 9.5 - torch.randint(3, (20,)).double() * apart
        ((among, every),) = both(chain, logits_1V, seed)
        assert among in (None, every)


def test_a_sum_of_many_weights_in_fp32_decides_nothing() -> None:
    vocab, tail = 262144, -5.8
    logits_1V = torch.full((1, vocab), tail)
    logits_1V[0, :8] = torch.arange(8) / -10
    # In exact numbers the second token is just within the nucleus. By rounding it is not.
    within = 1 / float(logits_1V.double().exp().sum()) + 2e-4
    top_p = known.TopPLogitsWarper(within)
    full_1V = top_p(torch.zeros(1, 1, dtype=torch.long), logits_1V)
    rows = rows_of(1)
    among = Likeliest.of(LogitsProcessorList([top_p]))
    assert among is not None
    for seed in range(8):
        noise = Noise(seed, rows, [0])
        (drawn,) = among.draw(noise, rows, logits_1V)
        assert drawn in (None, *noise.draw(rows, full_1V).tolist())


@pytest.mark.parametrize("wrong", [math.inf, math.nan, -math.inf])
def test_what_is_no_distribution_is_left_to_all_tokens(wrong: float) -> None:
    logits_1V = some_logits(2)
    if wrong == -math.inf:
        logits_1V[:] = wrong
    logits_1V[0, 5] = wrong
    assert both([T, K, P], logits_1V, 0)[0][0] is None


def test_few_tokens_that_may_be_drawn_are_enough() -> None:
    logits_1V = some_logits(2)
    logits_1V[0, 10:] = -math.inf
    ((among, every),) = both([T, P], logits_1V, 0)
    assert among == every
    ((among, every),) = both([T, K], logits_1V, 0)
    assert among in (None, every)


def test_who_is_to_be_given_all_scores_gets_them() -> None:
    recorder = ScoreRecorder()
    assert both([T, K], some_logits(2), 0, recorder)[0][0] is None


def test_a_row_that_is_left_to_all_tokens_leaves_the_others_alone() -> None:
    logits_WV = some_logits(14)
    logits_WV[1] = math.inf
    (first, every_first), (second, _), (third, every_third) = both([T, K], logits_WV, 0)
    assert (first, second, third) == (every_first, None, every_third)


def test_rows_that_are_left_to_all_tokens_take_their_places_again() -> None:
    chain = LogitsProcessorList([T, P])
    logits_BNV = torch.randn(3, 1, 4096) * torch.tensor([9.0, 0.1, 9.0])[:, None, None]
    trees = TokenTree.root_only(torch.tensor([1, 1, 1]))
    for seed in range(8):
        written = []
        for pays in (True, False):
            rows, rule = rows_of(3), SampleThenMatch(chain, do_sample=True)
            rule.noise = Noise(seed, rows, [0, 0, 0])
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Likeliest, "pays", lambda *_, pays=pays: pays)
                rule(trees, logits_BNV, rows)
            written.append([row.tokens for row in rows])
        assert written[0] == written[1]


@pytest.mark.parametrize("count", [1, 3])
def test_a_walk_looks_at_all_tokens_only_where_that_is_less_work(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, rule = rows_of(count), SampleThenMatch(LogitsProcessorList([T, K]), do_sample=True)
    rule.noise = Noise(0, rows, [0] * count)
    other = "draw" if count > 1 else "_draw_among_all"
    monkeypatch.setattr(Likeliest if count > 1 else rule, other, None)  # nobody calls it
    trees = TokenTree.root_only(torch.ones(count, dtype=torch.long))
    logits_BNV = torch.randn(count, 1, VOCAB, generator=torch.Generator().manual_seed(1)) * 9
    assert rule(trees, logits_BNV, rows) == [[0]] * count
    scores_BV = warp(rule.processors, None, logits_BNV[:, 0])
    written = [row.tokens for row in rows]
    assert written == rule.noise.draw(rows_of(count), scores_BV)[:, None].tolist()


def test_transformers_own_stream_is_drawn_from_all_tokens() -> None:
    (row,), rule = rows_of(1), SampleThenMatch(LogitsProcessorList([T, K]), do_sample=True)
    logits_1NV = torch.randn(1, 1, VOCAB)
    probs_1V = warp(rule.processors, None, logits_1NV[:, 0]).softmax(dim=-1)
    torch.manual_seed(4)
    rule(TokenTree.root_only(torch.tensor([1])), logits_1NV, [row])
    torch.manual_seed(4)
    assert row.tokens == torch.multinomial(probs_1V, 1)[0].tolist()


@pytest.mark.parametrize(
    ("processors", "rows", "least"),
    [
        ([T, K], 1, 128),
        ([T, K], 2, 4096),  # by vectors, the scores of several rows are little work
        ([T, K, P], 2, 512),  # unless they are sorted
        ([PENALTY, T, K], 2, 128),  # or each row has processors of its own
        ([T, M], 2, 16384),
    ],
)
def test_a_small_vocabulary_is_drawn_from_at_once(
    processors: list[Any], rows: int, least: int
) -> None:
    among = Likeliest.of(LogitsProcessorList(processors))
    assert among is not None
    assert not among.pays(rows, least - 1) and among.pays(rows, least)


def test_draws_in_vain_are_tried_less_and_less() -> None:
    rows = rows_of(1)
    noise = Noise(0, rows, [0])
    flat, steep = torch.zeros(1, VOCAB), torch.zeros(1, VOCAB)
    steep[0, 5] = 30.0
    among = Likeliest.of(LogitsProcessorList([T, P]))
    assert among is not None
    tries = 0
    for _ in range(1000):
        if among.pays(1, VOCAB):
            tries += 1
            assert among.draw(noise, rows, flat) == [None]
    assert 10 < tries < 30
    while not among.pays(1, VOCAB):
        pass
    assert among.draw(noise, rows, steep) == [5]
    assert among.pays(1, VOCAB)


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
        [known.TemperatureLogitsWarper(1e-40), K],  # fp32 knows it by few digits
        [known.TemperatureLogitsWarper(1e38), K],
    ],
)
def test_other_processors_are_left_alone(processors: list[Any]) -> None:
    assert Likeliest.of(LogitsProcessorList(processors)) is None
