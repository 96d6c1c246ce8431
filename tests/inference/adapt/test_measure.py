"""What is measured is measured once, in few forwards, and again where what was kept is damaged."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from medusa_heads import HeadsConfig, MedusaHeads, MedusaModel, TargetModel
from medusa_heads.inference.adapt import measure
from medusa_heads.inference.adapt.measure import RandomChain, room, step_seconds, target_clock
from medusa_heads.inference.engine.capability import capability
from tests.conftest import TinyLlama


@pytest.fixture
def no_more(monkeypatch: pytest.MonkeyPatch) -> Any:
    """From its call on, measuring fails."""

    def stop() -> None:
        for name in ("_measure_clock", "measure_step_seconds"):
            monkeypatch.setattr(measure, name, lambda *_: pytest.fail("measured twice"))

    return stop


def test_a_clock_is_measured_once(tiny_llama: TinyLlama, cache: Path, no_more: Any) -> None:
    target = TargetModel(tiny_llama())
    chain = RandomChain(3, target.vocab_size)
    clock = target_clock(target, {"chain": (chain, {"nodes": 3})})
    assert clock.sizes == [1, *(size + 1 for size in measure.SIZES)]
    assert all(clock.step(tokens) > 0 for tokens in clock.sizes) and clock.drafting("chain") > 0
    no_more()
    again = target_clock(target, {"chain": (chain, {"nodes": 3})})
    assert again.step(8) == clock.step(8) and again.drafting("chain") == clock.drafting("chain")


def test_steps_are_measured_once_unless_asked_anew(
    tiny_llama: TinyLlama, cache: Path, no_more: Any
) -> None:
    target = TargetModel(tiny_llama())
    drafters = {"short": RandomChain(1, 199), "long": RandomChain(5, 199)}
    steps = step_seconds(target, drafters, {}, 16, 1)
    assert all(0 <= each.drafting < each.step for each in steps.values())
    no_more()
    assert step_seconds(target, drafters, {}, 16, 1) == steps
    for other in ({"refresh": True}, {}):
        with pytest.raises(pytest.fail.Exception):
            step_seconds(target, drafters, {}, 16 if other else 17, 1, **other)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"values": {', '"values": ['),
        ('"step": {', '"steps": {'),
        ('"1": ', '"one": '),
        ('"1": ', '"1": -'),
        ('"1": ', '"1": "x", "2": '),
        ('"1": ', '"1": NaN, "2": '),
        ('"version"', '"vision"'),
    ],
)
def test_damaged_files_are_measured_anew(
    tiny_llama: TinyLlama, cache: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    target = TargetModel(tiny_llama(num_layers=1, hidden_size=32))
    times: list[dict[int, float]] = [{1: 1.0, 4: 2.0}, {1: 5.0, 4: 6.0}]
    monkeypatch.setattr(measure, "_measure_clock", lambda *_: (times.pop(0), {}))
    assert target_clock(target).step(4) == target_clock(target).step(4) == 2.0
    (kept,) = (cache / "clock").iterdir()
    content = kept.read_text(encoding="utf-8")
    assert old in content
    kept.write_text(content.replace(old, new), encoding="utf-8")
    assert target_clock(target).step(4) == target_clock(target).step(4) == 6.0


def test_a_slow_target_is_measured_in_few_forwards(tiny_llama: TinyLlama, cache: Path) -> None:
    model: Any = tiny_llama(vocab_size=24)
    forwards = 0

    def slowly(*_: Any) -> None:
        nonlocal forwards
        forwards += 1
        time.sleep(0.12)

    model.model.register_forward_pre_hook(slowly)
    target = TargetModel(model)
    capability(target)  # tries the target with ten forwards of a few tokens, once
    tried, forwards = forwards, 0
    medusa = MedusaModel(target, MedusaHeads.from_target(model, HeadsConfig(num_heads=3)))
    assert medusa.tree == "auto" and 0 < forwards <= 6 and tried <= 10


def test_a_short_context_leaves_room_for_trees(tiny_llama: TinyLlama, cache: Path) -> None:
    target = TargetModel(tiny_llama(max_position_embeddings=40))
    assert max(target_clock(target).sizes) <= room(target) == 20
    with pytest.raises(ValueError, match="leaves no room to measure"):
        step_seconds(target, {"long": RandomChain(60, 199)}, {}, 16, 1)
