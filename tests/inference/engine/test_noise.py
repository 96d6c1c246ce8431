"""Noise comes from a counter: the same wherever it is asked for, and independent elsewhere."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from medusa_heads.inference.engine.noise import NO_TOKEN, Noise, NoiseOnDevice, chance_drawn
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
    stop = StopCheck(StoppingCriteriaList())
    short = [Row(0, 1, torch.tensor([5, 6], dtype=torch.int32), stop)]
    asked = Noise(SEED, short, [0]).of(short, [0], torch.tensor([[[7, 2]]]))
    assert torch.equal(asked, later[:, :1])


def test_the_same_prompt_twice_is_drawn_for_twice() -> None:
    twice = noise_of([[5, 6], [5, 6]], [0, 0], 20_000)
    assert torch.corrcoef(twice)[0, 1].abs() < 5 / math.sqrt(20_000)


@pytest.mark.parametrize("possible", [(1, 1), (50, 50), (50, 3), (64, 0), (50, 900), (3000, 3000)])
def test_a_draw_is_the_largest_sum_however_few_tokens_can_be_drawn(
    possible: tuple[int, int],
) -> None:
    rows = rows_of([5, 6], [7])
    noise = Noise(SEED, rows, [0, 0])
    random = torch.Generator().manual_seed(0)
    for _ in range(20):
        scores_BV = torch.randn(2, 3000, generator=random) * 3
        for scores_V, count in zip(scores_BV, possible, strict=True):
            scores_V[torch.randperm(3000, generator=random)[count:]] = -torch.inf
        sums_BV = scores_BV + noise.of(rows, [0], torch.arange(3000).expand(2, 1, -1))[:, 0]
        expected = [
            int(sums_V.argmax()) if count else NO_TOKEN
            for sums_V, count in zip(sums_BV, possible, strict=True)
        ]
        assert noise.draw(rows, scores_BV).tolist() == expected
        assert [int(noise.draw(rows[b:][:1], scores_BV[b:][:1])) for b in (0, 1)] == expected
        for row, token in zip(rows, expected, strict=True):
            row.commit(token)


def test_the_host_knows_each_tokens_noise() -> None:
    rows = rows_of([5, 6], [7])
    noise = Noise(SEED, rows, [0, 0])
    rows[1].commit(3)
    tokens_BFC = torch.randint(150_000, (2, 2, 50), generator=torch.Generator().manual_seed(0))
    on_device = noise.of(rows, [0, 2], tokens_BFC)
    on_host = torch.tensor(
        [
            [[-math.log(noise.luck(row)(far, token)) for token in own] for far, own in by_far]
            for row, by_far in (
                (row, zip((0, 2), tokens, strict=True))
                for row, tokens in zip(rows, tokens_BFC.tolist(), strict=True)
            )
        ]
    )
    torch.testing.assert_close(on_device, on_host, rtol=1e-4, atol=1e-5)


def test_what_ones_own_luck_says() -> None:
    """Of many draws at one place, by the luck of one token: how often it was drawn."""
    chances_V = torch.tensor([0.4, 0.3, 0.2, 0.1])
    rows = rows_of(*[[prompt] for prompt in range(10)])
    tokens_BFV = torch.arange(4).expand(10, 20_000, 4)
    luck_SV = (-Noise(SEED, rows, [0] * 10).of(rows, range(20_000), tokens_BFV)).exp().view(-1, 4)
    drawn_S = (luck_SV / chances_V).argmin(dim=1)
    counts_V = torch.bincount(drawn_S, minlength=4) / len(drawn_S)
    torch.testing.assert_close(counts_V, chances_V, rtol=0, atol=0.005)
    for low in (0.0, 0.2, 0.4, 0.6, 0.8):
        least, most = (math.log(1 / max(c, 1e-9)) * 0.4 / 0.6 for c in (low + 0.2, low))
        among_S = (luck_SV[:, 0] > least) & (luck_SV[:, 0] <= most)
        said = [chance_drawn(0.4, luck) for luck in luck_SV[among_S, 0][:1000].tolist()]
        share = (drawn_S[among_S] == 0).float().mean()
        assert abs(share - sum(said) / len(said)) < 0.015


@pytest.mark.slow
def test_inductors_code_draws_the_same() -> None:
    """It once wrote beyond its memory: enough tokens for a loop, and some that fill no vector."""
    random = torch.Generator().manual_seed(0)
    keys_B, written_B = torch.randint(1 << 62, (2,), generator=random), torch.tensor([0, 9])
    scores_BNV, depth_BN = torch.randn(2, 3, 199, generator=random), torch.tensor([[0, 1, 2]] * 2)
    noise = NoiseOnDevice(keys_B, written_B, torch.arange(199))
    drawn_BN = noise.draw_all(scores_BNV, depth_BN)
    compiled: Tensor = torch.compile(noise.draw_all, fullgraph=True)(scores_BNV, depth_BN)
    assert torch.equal(compiled, drawn_BN)
    assert len(drawn_BN.unique()) == 6
