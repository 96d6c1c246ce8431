"""Measured steps on disk: how noisy they were is kept beside them, and noisy ones are not believed
for ever."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from medusa_heads import TargetModel
from medusa_heads.inference import step_seconds as module
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.step_seconds import Measurement, StepSeconds, step_seconds
from medusa_heads.inference.target_costs import RootChain
from tests.conftest import TinyLlama

DRAFTERS: dict[str, Drafter] = {"short": RootChain(1), "long": RootChain(5)}


class Machine:
    """What it takes at each attempt, by the names of drafters; it is never measured in truth."""

    def __init__(self, *attempts: dict[str, StepSeconds]) -> None:
        self.attempts = list(attempts)
        self.measured = 0

    def __call__(self, *_: Any) -> dict[str, StepSeconds]:
        self.measured += 1
        return self.attempts.pop(0)


def times(short: float, long: float, spread: float) -> dict[str, StepSeconds]:
    return {"short": StepSeconds(short, 0.1, spread), "long": StepSeconds(long, 0.2, 0.01)}


@pytest.fixture
def ask(tiny_llama: TinyLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Asks as another process would, unless it is said to be the same."""
    monkeypatch.setenv(module.CACHE_VARIABLE, str(tmp_path))
    target = TargetModel(tiny_llama())

    def asked(machine: Any = None, *, same: bool = False, **options: Any) -> dict[str, float]:
        if not same:
            monkeypatch.setattr(module, "_measured_here", set())
        if machine is not None:
            monkeypatch.setattr(module, "measure_step_seconds", machine)
        found = step_seconds(target, DRAFTERS, {}, 16, 1, **options)
        return {name: seconds.step for name, seconds in found.items()}

    return asked


def kept(folder: Path) -> Any:
    (file,) = folder.rglob("*.json")
    return json.loads(file.read_text())


def test_a_noisy_measurement_is_repeated_until_a_quiet_one(ask: Any, tmp_path: Path) -> None:
    machine = Machine(times(3.0, 2.0, 0.9), times(1.0, 2.1, 0.05))
    assert ask(machine) == {"short": 3.0, "long": 2.0}
    assert kept(tmp_path) == {
        "steps": {"short": [3.0, 0.1, 0.9], "long": [2.0, 0.2, 0.01]},
        "attempts": 1,
    }
    assert ask(same=True)["short"] == 3.0 and machine.measured == 1  # as busy as a moment ago
    for _ in range(3):
        assert ask() == {"short": 1.0, "long": 2.0}  # the lower of both
    assert machine.measured == 2 and kept(tmp_path)["attempts"] == 2


def test_a_machine_that_is_always_busy_is_not_measured_for_ever(ask: Any, tmp_path: Path) -> None:
    machine = Machine(*[times(4.0 - n, 2.0 + n, 0.9) for n in range(4)])
    for _ in range(6):
        found = ask(machine)
    assert machine.measured == kept(tmp_path)["attempts"] == 3
    assert found == {"short": 2.0, "long": 2.0}
    # Asked for, it is measured all the same, and what was known before is given up.
    assert ask(refresh=True) == {"short": 1.0, "long": 5.0}
    assert machine.measured == 4 and kept(tmp_path)["attempts"] == 1


def test_a_quiet_measurement_stands(ask: Any) -> None:
    machine = Machine(times(1.0, 2.0, 0.2))
    assert ask(machine) == ask() == ask() == {"short": 1.0, "long": 2.0}


@pytest.mark.parametrize(
    "content",
    [
        "{broken",
        "[]",
        '{"short": [1.0, 0.1], "long": [2.0, 0.1]}',  # as files once were
        '{"steps": {"short": [1.0, 0.1, 0.0]}, "attempts": 1}',  # of fewer drafters
        '{"steps": {"short": [0.0, 0.1, 0.0], "long": [2.0, 0.1, 0.0]}, "attempts": 1}',
        '{"steps": {"short": [1.0, 0.1, 0.0], "long": "x"}, "attempts": 1}',
        '{"steps": {}, "attempts": 1}',
    ],
)
def test_files_that_say_nothing_are_measured_anew(ask: Any, tmp_path: Path, content: str) -> None:
    ask(Machine(times(1.0, 2.0, 0.0)))
    (file,) = tmp_path.rglob("*.json")
    file.write_text(content)
    assert ask(Machine(times(4.0, 5.0, 0.0))) == {"short": 4.0, "long": 5.0}
    assert kept(tmp_path)["steps"]["long"] == [5.0, 0.2, 0.01]


def test_noise_is_that_of_the_step_whose_rounds_disagree_most() -> None:
    rounds = [StepSeconds(step, 0.5) for step in (9.0, 1.0, 1.1, 1.0, 1.2, 1.6, 1.0)]
    usual = module._usual(rounds)
    assert usual[:2] == (1.0, 0.5) and usual.spread == pytest.approx(0.6)
    quiet = StepSeconds(1.0, 0.5, 0.1)
    assert Measurement({"a": usual, "b": quiet}).noise == pytest.approx(0.6)
    merged = Measurement({"a": usual, "b": quiet}).lowest(Measurement({"a": StepSeconds(2.0, 0.5)}))
    assert merged == ({"a": usual, "b": quiet}, 2)
