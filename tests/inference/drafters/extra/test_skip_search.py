"""Which layers drafts can do without: measured on text, searched greedily, kept on disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.drafters.extra import skip_search
from medusa_heads.inference.drafters.extra.early_exit import ExitClock
from medusa_heads.inference.drafters.extra.layer_stack import LayerStack
from medusa_heads.inference.drafters.extra.skip_search import (
    Agreement,
    best_skip_set,
    own_text,
    search,
    skip_sets,
)
from medusa_heads.target.target import TargetModel
from tests.conftest import DEVICE, TinyLlama
from tests.inference.drafters.extra.thinned import STEPS, drafted, layered, read_state
from tests.pairs import alternately

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def model(tiny_llama: TinyLlama) -> Any:
    return layered(tiny_llama)


@pytest.fixture(scope="module")
def mine_BT(model: Any) -> torch.Tensor:
    return own_text(TargetModel(model))


def test_agreement_is_that_of_first_drafted_tokens(model: Any, mine_BT: torch.Tensor) -> None:
    """All positions in one forward say what drafting at each of them says."""
    target, text_BT = TargetModel(model), mine_BT[:2, :20]
    skipped = (1, 3)
    hits = []
    for length in range(3, 20):
        ids_BT = text_BT[:, :length]
        (level,) = drafted(target, read_state(target, ids_BT, torch.ones_like(ids_BT)), skipped, 1)
        with torch.no_grad():
            said_B = model(ids_BT).logits[:, -1].argmax(-1)
        hits.append((torch.tensor(level, device=DEVICE) == said_B).float().mean())
    with torch.no_grad():
        agreement = Agreement(target, LayerStack(target), text_BT)
    agreement._said_BT[:, :2] = agreement._said_BT[:, 19:] = -1  # positions not compared above
    assert 20 * agreement(skipped) == pytest.approx(sum(map(float, hits)), abs=1e-4)
    assert 0.1 < agreement(skipped) < 17 / 20


def test_the_search_finds_what_can_be_left_out(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = TargetModel(model)
    stack = LayerStack(target)
    clock = ExitClock(Clock(STEPS), layers=5, first=0.2)  # a fifth of a step for every layer
    best, agreement = best_skip_set(target, stack, clock, most=15)
    assert best and set(best) <= {2, 3, 4} and 0.3 < agreement <= 1
    monkeypatch.setattr(skip_search, "search", None)  # it is on disk
    assert best_skip_set(target, stack, clock, most=15) == (best, agreement)


DAMAGES = ["", "[]", "{}", "[[[], 0.5]]", "[[[5], 0.5]]", "[[[-1], 0.5]]", "[[[0,1,2,3,4], 1]]"]


@pytest.mark.parametrize(("damage", "within"), alternately(DAMAGES, [False, True]))
def test_damaged_files_are_measured_anew(
    model: Any, cache: Path, damage: str, within: bool
) -> None:
    target = TargetModel(model)
    text_BT = torch.randint(3, 24, (2, 16), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    measured = skip_sets(target, LayerStack(target), text_BT)
    (kept,) = (cache / "skip_sets").iterdir()
    whole = kept.read_text(encoding="utf-8")
    if within:  # the rest of the file is as it was
        stored = json.loads(whole)
        stored["values"]["sets"] = json.loads(damage or "0")
        damage = json.dumps(stored)
    kept.write_text(damage, encoding="utf-8")
    assert skip_sets(target, LayerStack(target), text_BT) == measured
    assert kept.read_text(encoding="utf-8") == whole


def test_the_search_is_greedy() -> None:
    worth = {0: 0.5, 1: 0.1, 2: 0.02, 3: 0.3, 4: 0.01, 5: 0.04, 6: 0.2, 7: 0.15, 8: 0.12}
    asked: list[tuple[int, ...]] = []

    def agreement(skipped: Sequence[int]) -> float:
        asked.append(tuple(skipped))
        return 1 - sum(worth[layer] for layer in skipped)

    found = search(agreement, 9)
    by_worth = sorted(worth, key=lambda layer: worth[layer])
    for count in range(1, 7):
        assert tuple(sorted(by_worth[:count])) in found
    assert {tuple(range(kept, 9)) for kept in range(1, 9)} <= set(found)
    assert len(asked) == len(set(asked)) < 9 * 8


def test_text_of_ones_own_is_calibration_of_its_own(model: Any) -> None:
    target = TargetModel(model)
    stack = LayerStack(target)
    mine_BT = torch.randint(3, 24, (2, 16), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert skip_sets(target, stack, mine_BT) != skip_sets(target, stack)


def test_text_of_ones_own_heeds_no_settings_of_calls(
    model: Any, mine_BT: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.generation_config, "return_dict_in_generate", True)
    monkeypatch.setattr(model.generation_config, "stop_strings", ["."])
    assert torch.equal(own_text(TargetModel(model)), mine_BT)
