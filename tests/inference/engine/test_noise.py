"""Noise comes from a counter: the same wherever it is asked for, and independent elsewhere."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from medusa_heads.inference.engine.noise import Noise
from medusa_heads.inference.engine.rows import Row, StopCheck

SEED = 20_240_816


def rows_of(*prompts: list[int]) -> list[Row]:
    stop = StopCheck(StoppingCriteriaList(), len(prompts))
    return [Row(i, len(prompts), torch.tensor(ids), stop) for i, ids in enumerate(prompts)]


def noise_of(prompts: list[list[int]], padding: list[int], count: int, seed: int = SEED) -> Tensor:
    """Of the first tokens at each row's first place, [B, C]."""
    rows = rows_of(*prompts)
    tokens_B1C = torch.arange(count).expand(len(rows), 1, -1)
    return Noise(seed, rows, padding).of(rows, [0], tokens_B1C)[:, 0]


def test_noise_has_gumbels_law() -> None:
    gumbel_BC = noise_of([[1], [2], [3], [4]], [0] * 4, 50_000)
    uniform_S = (-(-gumbel_BC.double()).exp()).exp().flatten().sort().values
    steps_S = torch.arange(1, len(uniform_S) + 1) / len(uniform_S)
    largest_gap = (uniform_S - steps_S).abs().max()
    assert largest_gap < 1.95 / math.sqrt(len(uniform_S))  # Kolmogorov-Smirnov, p = 0.001
    assert torch.isfinite(gumbel_BC).all()


def test_places_tokens_rows_and_seeds_are_independent() -> None:
    rows = rows_of([5, 6], [5, 7])
    noise = Noise(SEED, rows, [0, 0])
    tokens_B3C = torch.arange(20_000).expand(2, 3, -1)
    first = noise.of(rows, [0, 1, 2], tokens_B3C)
    other_seed = Noise(SEED + 1, rows, [0, 0]).of(rows, [0], tokens_B3C[:, :1])
    series = torch.cat([first.flatten(0, 1), other_seed.flatten(0, 1), first[0, :1].roll(1)])
    correlations = torch.corrcoef(series) - torch.eye(len(series))
    assert correlations.abs().max() < 5 / math.sqrt(20_000)


def test_noise_knows_nothing_of_other_rows_padding_and_how_it_is_asked() -> None:
    alone = noise_of([[5, 6]], [0], 100)
    among = noise_of([[0, 0, 8], [0, 5, 6]], [2, 1], 100)
    assert torch.equal(alone[0], among[1])
    rows = rows_of([5, 6])
    noise = Noise(SEED, rows, [0])
    later = noise.of(rows, [0, 3], torch.tensor([[[7, 2], [7, 2]]]))
    for token in (9, 9, 9):
        rows[0].commit(token)
    assert torch.equal(noise.of(rows, [0], torch.tensor([[[7, 2]]]))[:, 0], later[:, 1])
    assert torch.equal(alone[0, [7, 2]], later[0, 0])


def test_the_same_prompt_twice_is_drawn_for_twice() -> None:
    twice = noise_of([[5, 6], [5, 6]], [0, 0], 20_000)
    assert torch.corrcoef(twice)[0, 1].abs() < 5 / math.sqrt(20_000)
