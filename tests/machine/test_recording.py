"""What recordings depend on; and on a GPU, what they do again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import TemperatureLogitsWarper

from medusa_heads.inference.engine.device_state import DeviceState
from medusa_heads.inference.engine.reading import Reading
from medusa_heads.machine import devices
from medusa_heads.machine.attention import replayed
from medusa_heads.machine.programs import traced
from medusa_heads.machine.recording import Recording, memory_pool, records, standing
from medusa_heads.trees.tree import TreeShape
from tests.conftest import DEVICE, TinyLlama
from tests.inference.on_device import SAMPLING
from tests.inference.padded import padded
from tests.replayed import Replayed, text, with_heads

on_a_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="there is no GPU")


def test_what_stands() -> None:
    module = nn.Linear(3, 2)
    shape = TreeShape.from_choices([(0,), (0, 1)])
    things: dict[str, Any] = {"a": [1, 2.5, None], "b": torch.zeros(2), "c": (shape, module)}
    warper = TemperatureLogitsWarper(0.7)
    known = standing(things, warper)
    assert standing(things, warper) == known
    things["b"].fill_(1.0)  # the content may change
    with torch.no_grad():
        module.weight *= 2.0
    assert standing(things, warper) == known
    things["d"] = things["b"]
    del things["d"]
    things["itself"] = things  # as graphs of objects may be
    assert standing(things, warper) != known
    del things["itself"]
    assert standing(things, warper) == known


@pytest.mark.parametrize("change", ["number", "tensor", "view", "weight", "data", "length", "deep"])
def test_what_makes_a_difference(change: str) -> None:
    module = nn.Linear(3, 2)
    warper = TemperatureLogitsWarper(0.7)
    things: dict[str, Any] = {"a": [1, 2.5], "b": torch.zeros(2, 2), "c": (module,)}
    known = standing(things, warper)
    if change == "number":
        things["a"][1] = 2.0
    elif change == "tensor":
        things["b"] = torch.zeros(2, 2)
    elif change == "view":
        things["b"] = things["b"].T
    elif change == "weight":
        module.weight = nn.Parameter(module.weight.detach().clone())
    elif change == "data":
        module.weight.data = module.weight.data.clone()
    elif change == "length":
        things["a"].append(None)
    else:
        warper.temperature = 0.8
    assert standing(things, warper) != known


def test_a_word_that_stands_elsewhere_too() -> None:
    """Members of an Enum are one object wherever they stand."""

    class Mode(str, Enum):
        ONE, OTHER = "one", "other"

    modules = [nn.Identity() for _ in range(3)]
    modes: list[Any] = [Mode.ONE, Mode.OTHER, Mode.ONE]
    for module, mode in zip(modules, modes, strict=True):
        module.mode = mode
    known = standing(modules, {Mode.ONE: 1})
    assert standing(modules, {Mode.OTHER: 1}) != known
    modules[2].mode = modes[1]
    assert standing(modules, {Mode.ONE: 1}) != known


def test_of_attributes_the_order_is_none() -> None:
    one, other = Things(), Things()
    one.first, one.second = 1, 2
    other.second, other.first = 2, 1
    assert standing(one) == standing(other)


@dataclass
class Things:
    first: int = 0
    second: int = 0
    rest: list[int] = field(default_factory=list)


Things.__module__ = "medusa_heads.some"


def test_no_recordings_on_a_cpu() -> None:
    assert not records(torch.device("cpu"))


@on_a_gpu
def test_it_is_done_again() -> None:
    total_2, add_2 = (torch.zeros(2, device=DEVICE) for _ in range(2))

    def step() -> Tensor:
        total_2.add_(add_2 * 2)
        return total_2 + 1

    step()
    recording = Recording(step, total_2.device, memory_pool())
    assert total_2.tolist() == [0.0, 0.0]  # without an effect
    for number in (1.0, 2.0):
        add_2.fill_(number)
        recording.replay()
    assert total_2.tolist() == [6.0, 6.0] and recording.result.tolist() == [7.0, 7.0]


@pytest.mark.parametrize("heard", [True, False], ids=["an error", "a word too late"])
def test_what_breaks_a_graph_is_repaired(heard: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only its end tells: a kernel's owner hears of no error while it unloads it."""
    told: list[str] = []

    @contextmanager
    def entered(what: Any) -> Iterator[None]:
        yield

    class Broken:
        def capture_begin(self, **_: Any) -> None: ...

        def capture_end(self) -> None:
            raise RuntimeError("broken before")

        def wait_stream(self, _: Any) -> None: ...

    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, entered)
    monkeypatch.setattr(torch.cuda, "current_stream", Broken)
    monkeypatch.setattr(devices, "_repair", lambda *_: told.append("repaired"))
    broken: Any = Broken()
    error = torch.OutOfMemoryError("no memory") if heard else RuntimeError("broken before")
    with (
        pytest.raises(type(error), match=str(error)),
        devices.captured(broken, torch.device("cuda"), None, broken),
    ):
        if heard:
            raise error
    assert told == ["repaired"]


@on_a_gpu
def test_a_measurement_that_breaks_off_leaves_the_gpu_as_it_was() -> None:
    x, calls = torch.ones(3, device=DEVICE), list[int]()

    def asks(_: Tensor) -> None:
        calls.append(1)
        if len(calls) > 1:  # which is captured
            torch.cuda.synchronize()

    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        replayed([asks], [[x]])
    assert torch.cuda.current_stream() == before
    torch.rand(8, device=DEVICE)
    assert all(0 < seconds < 1 for seconds in replayed([lambda x: x + 1], [[x]]))


@on_a_gpu
def test_its_memory_stays() -> None:
    things = {"scale": torch.full((1 << 20,), 3.0, device=DEVICE)}
    out = torch.zeros(1 << 20, device=DEVICE)
    recording = Recording(lambda: out.copy_(things["scale"] * 2), out.device, memory_pool())
    things.clear()
    other = torch.full((1 << 20,), 5.0, device=DEVICE)  # which would come to lie there
    recording.replay()
    assert out[0].item() == 6.0 and other[0].item() == 5.0


@on_a_gpu
@pytest.mark.parametrize("seen", [True, False], ids=["before it is done", "too late"])
def test_what_asks_the_host_is_refused(seen: bool) -> None:
    """And the GPU goes on, with random numbers and memory."""
    number = torch.ones(3, device=DEVICE)

    def asks() -> None:
        number.mul_(2)
        if seen:
            float(number.sum())
        else:
            torch.cuda.synchronize()  # which no dispatcher sees

    with pytest.raises(RuntimeError):
        Recording(asks, number.device, memory_pool())
    assert float((number * 2).sum()) == 6.0
    torch.manual_seed(3)
    first = torch.rand(8, device=DEVICE)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(8, device=DEVICE), first)
    del first
    held = torch.cuda.memory_allocated()
    for _ in range(3):
        torch.zeros(1 << 20, device=DEVICE)
    assert torch.cuda.memory_allocated() == held
    recording = Recording(lambda: number.mul_(2), number.device, memory_pool())
    recording.replay()
    assert number.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "wrong", ["nothing", "a row", "rows", "no number", "infinite", "at first", "still"]
)
def test_it_is_compared_with_the_function(compiled: bool, wrong: str) -> None:
    """It must do the same; where parts are compiled, most times nearly so, in all memory."""
    many, rows = torch.zeros(1000, device=DEVICE), torch.zeros(10, dtype=torch.long, device=DEVICE)
    one, by = (torch.arange(10, device=DEVICE) == 3).long(), torch.ones_like(rows)
    more = dict.fromkeys(("a row", "rows", "no number", "infinite"), 0.0)

    def step() -> None:
        many.add_(by[0] + more["no number"] + more["infinite"])
        rows.add_(by).add_(one * int(more["a row"])).add_(by * int(more["rows"]))

    step()
    kind, pool = (Replayed, None) if DEVICE == "cpu" else (Recording, memory_pool())
    recording = kind(traced(step) if compiled else step, many.device, pool)
    answers: list[bool | None] = []
    for turn in range(3):
        if wrong in more:
            more[wrong] = {"no number": torch.nan, "infinite": -torch.inf}.get(wrong, 1.0)
        elif wrong == "at first":
            more["rows"] = float(turn == 0)
        elif wrong == "still":
            by.zero_()
        before = rows.clone()
        many.zero_()
        answers.append(recording.agrees(step))
        by_function = int(by[0]) * (1 + int(more["rows"]))
        assert int((rows - before)[0]) == by_function
        if answers[-1] is not None:
            break
    refused: list[bool | None] = [None, None, False] if compiled else [False]
    expected: dict[str, list[bool | None]] = {
        "nothing": [True],
        "a row": [None, None, True] if compiled else [False],
        "rows": refused,
        "no number": refused,
        "infinite": refused,
        "at first": [None, True] if compiled else [False],
        "still": [None, None, None],  # which says nothing
    }
    assert answers == expected[wrong]


@on_a_gpu
@pytest.mark.parametrize("options", [{}, SAMPLING], ids=["greedy", "drawn"])
def test_no_step_waits(
    tiny_llama: TinyLlama, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's own count, from the first step of a text to the last, once all is recorded."""
    medusa, inputs = with_heads(tiny_llama().to(DEVICE), "dynamic:9"), padded([0, 3], 12)
    expected = [text(medusa, inputs, **options) for _ in range(3)][-1]
    begin, end = Reading.__init__, DeviceState.end

    def strict(reading: Reading, *given: Any) -> None:
        begin(reading, *given)
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match="synchroni"):
            torch.ones(1, device=DEVICE).item()

    def as_usual(state: DeviceState) -> list[int]:
        torch.cuda.set_sync_debug_mode("default")
        return end(state)

    monkeypatch.setattr(Reading, "__init__", strict)
    monkeypatch.setattr(DeviceState, "end", as_usual)
    try:
        assert torch.equal(text(medusa, inputs, **options), expected)
    finally:
        torch.cuda.set_sync_debug_mode("default")
