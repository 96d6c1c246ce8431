"""What is measured is measured once, in few forwards, and again where what was kept is damaged."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_heads import HeadsConfig, MedusaHeads, MedusaModel, TargetModel
from medusa_heads.inference.adapt import measure
from medusa_heads.inference.adapt.measure import room, step_seconds, target_clock, target_facts
from medusa_heads.inference.adapt.step_bench import SIZES, RandomChain
from medusa_heads.machine import measurements
from tests.conftest import TinyLlama
from tests.inference.clock import Clock


@pytest.fixture(autouse=True)
def usual_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as users have."""
    monkeypatch.setattr("medusa_heads.inference.adapt.step_bench._ROUNDS", 7)


@pytest.fixture
def no_more(monkeypatch: pytest.MonkeyPatch) -> Any:
    """From its call on, measuring fails."""

    def stop() -> None:
        for name in ("_measure_steps", "StepBench"):
            monkeypatch.setattr(measure, name, lambda *_: pytest.fail("measured twice"))

    return stop


def test_a_clock_is_measured_once(
    tiny_llama: TinyLlama, cache: Path, no_more: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch)  # however busy this machine is, the target is quick
    target = TargetModel(tiny_llama())
    chain = RandomChain(3, target.vocab_size)
    clock = target_clock(target, {"chain": (chain, {"nodes": 3})})
    assert clock.sizes == [1, *(size + 1 for size in SIZES)]
    assert all(clock.step(tokens) > 0 for tokens in clock.sizes) and clock.drafting("chain") > 0
    no_more()
    again = target_clock(target, {"chain": (chain, {"nodes": 3})})
    assert again.step(8) == clock.step(8) and again.drafting("chain") == clock.drafting("chain")


def test_steps_are_measured_once_unless_asked_anew(
    tiny_llama: TinyLlama, cache: Path, quiet: None, no_more: Any
) -> None:
    target = TargetModel(tiny_llama())
    drafters = {"short": RandomChain(1, 199), "long": RandomChain(5, 199)}
    steps, _ = kept = step_seconds(target, drafters, {}, 16, 1)
    assert all(0 <= each.drafting < each.step for each in steps.values())
    no_more()
    assert step_seconds(target, drafters, {}, 16, 1) == kept
    for other in ({"refresh": True}, {}):
        with pytest.raises(pytest.fail.Exception):
            step_seconds(target, drafters, {}, 16 if other else 17, 1, **other)


def test_what_a_busy_machine_says_is_for_this_process_alone(
    tiny_llama: TinyLlama, cache: Path, busy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every kind: it is not measured twice here, and another process measures again."""
    monkeypatch.setattr(measure, "_unkept", {})
    target = TargetModel(tiny_llama(num_layers=1, hidden_size=32))
    drafters = {"chain": RandomChain(3, target.vocab_size)}
    source = {"chain": (drafters["chain"], {"nodes": 3})}

    def all_of_it() -> list[Any]:
        clock = target_clock(target, source)
        steps = step_seconds(target, drafters, {}, 16, 1)
        return [clock.step(4), clock.drafting("chain"), steps]

    first = all_of_it()
    assert first[-1][1]  # beside other programs
    assert all_of_it() == first and not cache.exists()
    monkeypatch.setattr(measure, "_unkept", {})  # as in another process
    assert all_of_it() != first and not cache.exists()


def test_a_busy_machine_may_be_asked_again(
    tiny_llama: TinyLlama, cache: Path, busy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TargetModel(tiny_llama(num_layers=1, hidden_size=32))
    ask = partial(step_seconds, target, {"chain": RandomChain(3, 199)}, {}, 16, 1)
    first = ask()
    again = ask(refresh=True)
    assert first[1] and again[1] and again != first
    assert ask() == again  # this process goes by the last one
    monkeypatch.setattr(measurements, "_waited", lambda: 0.0)
    assert ask() == again and not cache.exists()
    kept, beside_others = ask(refresh=True)
    assert not beside_others and ask() == (kept, False)
    assert len(list((cache / "steps").iterdir())) == 1


def test_a_busy_machine_is_asked_for_further_drafters(
    tiny_llama: TinyLlama, cache: Path, busy: None
) -> None:
    """As other statistics of the same heads name them."""
    target = TargetModel(tiny_llama(num_layers=1, hidden_size=32))
    drafters = {"short": RandomChain(1, 199)}
    step_seconds(target, drafters, {}, 16, 1)
    drafters["long"] = RandomChain(3, 199)
    both = step_seconds(target, drafters, {}, 16, 1)
    assert both[1] and both[0].keys() == drafters.keys()
    assert step_seconds(target, drafters, {}, 16, 1) == both


def test_a_busy_machine_leaves_what_was_kept(
    tiny_llama: TinyLlama, cache: Path, quiet: None, request: pytest.FixtureRequest
) -> None:
    target = TargetModel(tiny_llama(num_layers=1, hidden_size=32))
    ask = partial(step_seconds, target, {"chain": RandomChain(3, 199)}, {}, 16, 1)
    ask()
    (kept,) = (cache / "steps").iterdir()
    written = kept.read_bytes()
    request.getfixturevalue("busy")
    again = ask(refresh=True)
    assert again[1] and ask() == again and kept.read_bytes() == written


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"values": {', '"values": ['),
        ('"step": {', '"steps": {'),
        ('"1": ', '"one": '),
        ('"1": ', '"0": 1.0, "2": '),
        ('"1": ', '"1": -'),
        ('"1": ', '"1": "x", "2": '),
        ('"1": ', '"1": NaN, "2": '),
        ('"1": ', '"1": true, "2": '),
        ('"1": ', f'"1": {10**400}, "2": '),
        ('"version"', '"vision"'),
    ],
)
def test_damaged_files_are_measured_anew(
    tiny_llama: TinyLlama,
    cache: Path,
    quiet: None,
    monkeypatch: pytest.MonkeyPatch,
    old: str,
    new: str,
) -> None:
    target = TargetModel(tiny_llama(num_layers=1, hidden_size=32))
    times: list[dict[int, float]] = [{1: 1.0, 4: 2.0}, {1: 5.0, 4: 6.0}]
    monkeypatch.setattr(measure, "_measure_steps", lambda *_: times.pop(0))
    assert target_clock(target).step(4) == target_clock(target).step(4) == 2.0
    (kept,) = (cache / "clock").iterdir()
    before, found, after = kept.read_text(encoding="utf-8").rpartition(old)  # of the values
    assert found
    kept.write_text(before + new + after, encoding="utf-8")
    assert target_clock(target).step(4) == target_clock(target).step(4) == 6.0


@pytest.mark.parametrize(
    "damage",
    ['"x"', "NaN", *(pytest.param(d, marks=pytest.mark.slow) for d in ("-1.0", "null", "[1.0]"))],
)
def test_damaged_drafting_is_measured_anew(
    tiny_llama: TinyLlama, cache: Path, quiet: None, damage: str
) -> None:
    target = TargetModel(tiny_llama(num_layers=1, hidden_size=32))
    source = {"chain": (RandomChain(3, target.vocab_size), {"nodes": 3})}
    first = target_clock(target, source).drafting("chain")
    (kept,) = (cache / "drafting").iterdir()
    content = kept.read_text(encoding="utf-8")
    assert f'"seconds": {first}' in content
    kept.write_text(content.replace(f'"seconds": {first}', f'"seconds": {damage}'), "utf-8")
    again = target_clock(target, source).drafting("chain")
    assert again > 0 and f'"seconds": {again}' in kept.read_text(encoding="utf-8")


class Forwards:
    """Counts a model's forwards, each of which takes as long as is said."""

    def __init__(self, model: Any, clock: Clock, seconds: float) -> None:
        self.count, self._clock, self._seconds = 0, clock, seconds
        model.model.register_forward_pre_hook(self._run)

    def _run(self, *_: Any) -> None:
        self.count += 1
        self._clock.work(self._seconds)


@pytest.mark.parametrize("seconds", [0.01, 0.05, 0.12, 3.0])
def test_a_slow_target_is_tried_and_measured_in_ten_forwards(
    tiny_llama: TinyLlama, cache: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    model = tiny_llama(vocab_size=24)
    forwards = Forwards(model, Clock(monkeypatch), seconds)
    medusa = MedusaModel(model, MedusaHeads.from_target(model, HeadsConfig(num_heads=3)))
    assert medusa.tree == "auto" and 5 < forwards.count <= 10
    clock = target_clock(medusa.target)
    assert clock.sizes[-1] == 64 and clock.step(1) == pytest.approx(seconds, rel=0.01)


def test_another_source_measures_no_step(
    tiny_llama: TinyLlama, cache: Path, quiet: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(vocab_size=24)
    forwards = Forwards(model, Clock(monkeypatch), 0.001)
    counts = []
    for heads in (2, 3):
        MedusaModel(model, MedusaHeads.from_target(model, HeadsConfig(num_heads=heads)))
        counts.append(forwards.count)
    assert 0 < counts[0] == counts[1]
    assert len(list((cache / "clock").iterdir())) == 1
    assert len(list((cache / "drafting").iterdir())) == 2


def test_a_short_context_leaves_room_for_trees(tiny_llama: TinyLlama, cache: Path) -> None:
    target = TargetModel(tiny_llama(max_position_embeddings=40))
    assert max(target_clock(target).sizes) <= room(target) == 20
    with pytest.raises(ValueError, match="leaves no room to measure"):
        step_seconds(target, {"long": RandomChain(60, 199)}, {}, 16, 1)


def test_each_kind_of_gpu_has_a_clock_of_its_own(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where several are in one machine."""
    target = TargetModel(tiny_llama())
    assert target_facts(target)["device"] == "cpu"
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: f"GPU {device.index}")
    found = []
    for number in (0, 1):
        monkeypatch.setattr(TargetModel, "device", torch.device("cuda", number))
        found.append(target_facts(target)["device"])
    assert found == ["GPU 0", "GPU 1"]
