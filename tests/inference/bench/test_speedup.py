"""The speed-up analysis against hand-made numbers, simulation, and a target's own memory."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_heads import HeadsConfig, TargetModel
from medusa_heads.heads import drafting, new_heads
from medusa_heads.inference.bench.speedup import (
    analyze,
    best_chain_length,
    break_even,
    cache_bytes_per_token,
    chain_speedup,
    chain_tokens,
    mean_acceptance,
    memory_overhead,
)
from medusa_heads.inference.bench.speedup_report import (
    break_even_sentence,
    memory_sentence,
    tables,
    write_analysis,
)
from medusa_heads.inference.plan.tree_size import chain_chances
from medusa_heads.trees.statistics import HeadStatistics, simulate_tokens_per_step
from tests.conftest import TinyLlama

STEPS = 4000


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.floats(0, 1), st.integers(0, 8), st.floats(0, 1), st.integers(0, 1 << 30))
def test_a_chain_of_coin_flips_commits_and_costs_as_the_theory_says(
    acceptance: float, length: int, draft_cost: float, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    right_SJ = torch.rand(STEPS, length, generator=random) < acceptance
    tokens_S = 1 + right_SJ.long().cumprod(dim=1).sum(dim=1)  # up to the first wrong draft
    mean = float(tokens_S.float().mean())
    # A step commits between 1 and length + 1 tokens: six standard errors at most.
    close = 6 * math.sqrt(max(float(tokens_S.float().var()), 0.5 / STEPS) / STEPS) + 6 / STEPS
    assert mean == pytest.approx(chain_tokens(acceptance, length), abs=close)
    forwards = STEPS * (1 + length * draft_cost)  # in forwards of the target, as is all time here
    assert int(tokens_S.sum()) / forwards == pytest.approx(
        chain_speedup(acceptance, length, draft_cost), abs=close
    )


@settings(deadline=None, max_examples=40)
@given(st.floats(0, 0.95), st.floats(0.01, 1))
def test_the_best_length_is_the_best_of_all_and_pays_where_drafts_beat_their_cost(
    acceptance: float, draft_cost: float
) -> None:
    best = best_chain_length(acceptance, draft_cost)
    gains = [chain_speedup(acceptance, length, draft_cost) for length in range(400)]
    assert gains[best] == pytest.approx(max(gains))
    assert (best > 0) == (acceptance > draft_cost) or acceptance == pytest.approx(draft_cost)
    if acceptance > draft_cost:  # corollary 3.9
        assert gains[best] >= (1 + acceptance) / (1 + draft_cost) - 1e-9


@st.composite
def rank_chances(draw: st.DrawFn) -> list[list[float]]:
    """For each head, the chance of ranks 0, 1, 2 and of none of them."""
    weights = st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any)
    return [
        [weight / sum(row) for weight in row]
        for row in draw(st.lists(weights, min_size=1, max_size=3))
    ]


@settings(deadline=None, max_examples=30, derandomize=True)
@given(rank_chances(), st.integers(1, 12), st.integers(0, 1 << 30))
def test_a_tree_walked_along_drawn_ranks_commits_what_its_statistics_say(
    chances_KR: list[list[float]], nodes: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)

    def draw(positions: int) -> torch.Tensor:
        drawn = [
            torch.multinomial(torch.tensor(row), positions, replacement=True, generator=random)
            for row in chances_KR
        ]
        ranks_SK = torch.stack(drawn, dim=1)
        return torch.where(ranks_SK == 3, 99, ranks_SK)

    statistics = HeadStatistics.from_ranks(draw(STEPS))
    choices = [path for path, _ in statistics.paths[:nodes]]
    walked = simulate_tokens_per_step(draw(STEPS)[:, None], choices)  # a step at each
    close = 6 * (len(chances_KR) / 2) * math.sqrt(2 / STEPS) + 6 / STEPS
    assert walked == pytest.approx(statistics.expected_tokens_per_step(nodes), abs=close)


def test_by_hand() -> None:
    assert chain_tokens(0.5, 2) == 1.75 and chain_tokens(1, 3) == 4 and chain_tokens(0, 3) == 1
    assert chain_tokens(0.9, 0) == 1.0
    assert chain_speedup(0.5, 2, 0.25) == pytest.approx(1.75 / 1.5)
    assert best_chain_length(0.8, 0.05) == 8 and best_chain_length(0.3, 0.4) == 0
    # Half of the first guesses are right, of these half of the second: one chance stands for both.
    assert mean_acceptance([0.5, 0.25]) == 0.5
    assert mean_acceptance([0.6, 0.1]) == pytest.approx(0.7 / 1.6)
    ranks = torch.tensor([[0, 0], [0, 1], [1, 0], [99, 0]])
    assert chain_chances(HeadStatistics.from_ranks(ranks)) == [0.5, 0.25]


def test_break_even_by_hand() -> None:
    assert break_even([1, 2, 4], [2.0, 1.5, 1.1]) is None
    assert break_even([1, 2, 4], [0.9, 1.5, 1.1]) == 0.0
    assert break_even([1, 4], [1.5, 0.5]) == pytest.approx(2.0)  # half way, on powers of 2
    assert break_even([1, 2, 8], [2.0, 1.0, 0.5]) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: chain_tokens(1.2, 2), "between 0 and 1, got 1.2"),
        (lambda: chain_tokens(math.nan, 2), "between 0 and 1, got nan"),
        (lambda: chain_tokens(0.5, -1), "at least 0 drafts, got -1"),
        (lambda: chain_speedup(0.5, 1, -0.1), "at least 0 forwards of the target, got -0.1"),
    ],
)
def test_what_is_no_number_of_a_chain_is_refused(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()


def test_memory_by_hand(tiny_llama: TinyLlama) -> None:
    target = TargetModel(tiny_llama(num_layers=3))
    # Three layers of keys and values, 2 heads of 16, 4 bytes each.
    assert cache_bytes_per_token(target) == 3 * 2 * 2 * 16 * 4
    plain = new_heads(target, HeadsConfig(num_heads=2))
    found = memory_overhead(target, plain, nodes=5, batch_size=3)
    assert found["target"] == 4 * sum(p.numel() for p in target.model.parameters())
    assert found["heads"] == 2 * (2 * (64 * 64 + 64) * 4)  # twice: see the docstring
    assert found["tree_cache"] == 15 * 3 * 2 * 2 * 16 * 4
    assert found["tree_logits"] == 15 * 199 * 4 and found["prefix_per_token"] == 0
    config = HeadsConfig(kind="hydra", num_heads=1, draft_vocab_size=50, prefix_attention=True)
    hydra = new_heads(target, config, torch.arange(50))
    found = memory_overhead(target, hydra, nodes=1)
    assert found["prefix_per_token"] == 2 * 64 * 4
    induction = new_heads(target, HeadsConfig(induction=True))
    assert memory_overhead(target, induction, nodes=1)["prefix_per_token"] == 2 * 64 * 4
    block = new_heads(target, HeadsConfig(kind="block", num_layers=2))
    assert memory_overhead(target, block, nodes=1)["prefix_per_token"] == 2 * 2 * 64 * 4
    trained = sum(p.numel() for p in hydra.parameters())
    assert found["heads"] == 4 * (trained + 50 * 64)


@pytest.mark.parametrize("smallest", [0, 1 << 30])
def test_memory_of_heads_is_what_they_hold(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch, smallest: int
) -> None:
    monkeypatch.setattr(drafting, "SMALLEST", smallest)
    target = TargetModel(tiny_llama())
    heads = new_heads(target, HeadsConfig(num_heads=2, vocab_matrix="own", features=[0]))
    view: Any = drafting.for_drafting(heads)
    with torch.no_grad():
        view(view.fuse(torch.randn(1, 2 * 64)))
    held: list[torch.Tensor] = list(view.parameters())
    held += [part for layer in view._stack[1] for part in layer] if view._stack else []
    made = [
        part
        for layer in drafting.near_layers(view)
        for part in getattr(layer, "_rounded", None) or ()
    ]
    held += [part for part in made if isinstance(part, torch.Tensor)]
    found = memory_overhead(target, view, nodes=1)
    assert found["heads"] == sum(part.nbytes for part in held)


def test_chains_in_eight_bits_are_measured_anew(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch, cache: Path, quiet: None
) -> None:
    monkeypatch.setattr(drafting, "SMALLEST", 0)
    target = TargetModel(tiny_llama())
    heads = new_heads(target, HeadsConfig(num_heads=1)).eval()
    statistics = HeadStatistics.from_ranks(torch.zeros(9, 1, dtype=torch.long))
    for count, each in enumerate([heads, heads, drafting.for_drafting(heads)]):
        analyze(target, each, statistics, context=16, batch_sizes=[1], chain_only=True)
        assert len(list((cache / "steps").glob("*.json"))) == (2 if count == 2 else 1)


@pytest.mark.parametrize("chain_only", [False, True])
def test_an_analysis_in_full(tiny_llama: TinyLlama, tmp_path: Path, chain_only: bool) -> None:
    target = TargetModel(tiny_llama())
    heads = new_heads(target, HeadsConfig(num_heads=2)).eval()
    ranks_SK = torch.randint(9, (300, 2), generator=torch.Generator().manual_seed(0))
    statistics = HeadStatistics.from_ranks(ranks_SK)
    report = analyze(
        target, heads, statistics, context=16, batch_sizes=[4, 1], chain_only=chain_only
    )
    assert [batch["batch_size"] for batch in report["batches"]] == [1, 4]
    for batch in report["batches"]:
        trees = [draft["tree"] for draft in batch["trees"]]
        assert trees == [] if chain_only else "static:15" in trees
        assert [draft["tree"] for draft in batch["chains"]] == ["chain:1", "chain:2"]
        drafts = [*batch["chains"], *batch["trees"]]
        assert batch["best"]["speedup"] == max(draft["speedup"] for draft in drafts)
    assert report["machine"]["device"] == "cpu"  # beside which a GPU may wait
    one = report["batches"][0]
    chain = one["chains"][1]
    assert chain["tokens_per_step"] == 1 + sum(chain_chances(statistics))
    theory = report["chains"][1]
    assert theory["equation_1"] == pytest.approx(chain_tokens(report["acceptance"], 2))

    report["memory"] = memory_overhead(target, heads, one["best"]["nodes"])
    entry = {"rows": 4, "weights": 70, "cache": 20, "working": 10, "most": 100}
    report |= {"memory_at_most": [entry], "memory_free": 30}
    assert memory_sentence(report) is memory_sentence(report | {"memory_free": None}) is None
    full = memory_sentence(report | {"memory_free": 29})
    assert full is not None and full.startswith("4 rows of such texts do not fit")
    assert len(tables(report)) == 5 and break_even_sentence(report).startswith("Drafting pays ")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path))
        numbers, picture = write_analysis("~/new/folder", report)
    assert picture.parent == tmp_path / "new" / "folder"
    assert json.loads(numbers.read_text()) == report
    assert picture.read_bytes().startswith(b"\x89PNG") and len(list(picture.parent.iterdir())) == 2
    assert "grown" not in break_even_sentence(report)
    grown = report | {"grown_from": {"name_or_path": "small"}}
    assert "grown from 'small'" in break_even_sentence(grown)
    assert len(tables({k: v for k, v in report.items() if k != "chains"})) == 4


def test_batch_sizes_are_checked(tiny_llama: TinyLlama) -> None:
    target = TargetModel(tiny_llama())
    heads = new_heads(target, HeadsConfig(num_heads=2))
    statistics = HeadStatistics.from_ranks(torch.zeros(3, 2, dtype=torch.long))
    for sizes in ([], [0, 1]):
        with pytest.raises(ValueError, match="batch sizes of at least 1"):
            analyze(target, heads, statistics, batch_sizes=sizes)
