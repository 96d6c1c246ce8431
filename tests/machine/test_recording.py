"""What recordings do again; most of it shows on a GPU alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_heads.inference.engine.device_state import DeviceState
from medusa_heads.inference.engine.reading import Reading
from medusa_heads.machine import devices
from medusa_heads.machine import recording as of_recordings
from medusa_heads.machine.attention import replayed
from medusa_heads.machine.programs import traced
from medusa_heads.machine.recording import MemoryPool, Recording, records
from tests.conftest import DEVICE, TinyLlama
from tests.inference.on_device import SAMPLING
from tests.inference.padded import padded
from tests.replayed import Replayed, text, with_heads

on_a_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="there is no GPU")


def test_no_recordings_on_a_cpu() -> None:
    assert not records(torch.device("cpu"))


@on_a_gpu
def test_it_is_done_again() -> None:
    total_2, add_2 = (torch.zeros(2, device=DEVICE) for _ in range(2))

    def step() -> Tensor:
        total_2.add_(add_2 * 2)
        return total_2 + 1

    step()
    recording = Recording(step, total_2.device, MemoryPool())
    assert total_2.tolist() == [0.0, 0.0]  # without an effect
    for number in (1.0, 2.0):
        add_2.fill_(number)
        recording.replay()
    assert total_2.tolist() == [6.0, 6.0] and recording.result.tolist() == [7.0, 7.0]


def test_recordings_of_a_pool_are_captured_by_one_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or each would take memory of its own. Another GPU has another stream. And none of the others
    is collected once it is known where they lie."""
    streams: list[Any] = []

    def handle() -> object:
        assert not gc.isenabled()
        return object()

    @contextmanager
    def captured(_graph: Any, _device: Any, _pool: Any, aside: Any) -> Iterator[None]:
        streams.append(aside)
        yield

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", handle)
    monkeypatch.setattr(of_recordings, "captured", captured)
    pool = MemoryPool()
    made = [Recording(list, torch.device("cuda", n), pool) for n in (0, 0, 1)]
    assert streams[0] is streams[1] is not streams[2] and len(pool.living) == len(made)
    assert [stream.device.index for stream in streams] == [0, 0, 1]


@on_a_gpu
def test_recordings_of_a_pool_share_memory() -> None:
    x, out, pool = torch.ones(1 << 24, device=DEVICE), torch.zeros(1, device=DEVICE), MemoryPool()

    def step() -> None:  # with 64 MB between
        out.copy_((x * 2).sum())

    step()
    made, held = [Recording(step, x.device, pool)], torch.cuda.memory_reserved()
    made += [Recording(step, x.device, pool) for _ in range(3)]
    assert torch.cuda.memory_reserved() == held


@on_a_gpu
def test_a_pool_serves_again_when_all_its_recordings_are_gone() -> None:
    total, pool = torch.zeros(2, device=DEVICE), MemoryPool()
    for _ in range(2):
        recording = Recording(lambda: total.add_(total + 1), total.device, pool)
        recording.replay()
        del recording
    assert total.tolist() == [3.0, 3.0]


class Noting:
    """Stands for a graph and for streams, and tells what is done."""

    broken = ""  # what is said at its end

    def __init__(self, told: list[str]) -> None:
        self._told = told

    def capture_begin(self, **_: Any) -> None:
        self._told.append("begun")

    def capture_end(self) -> None:
        if self.broken:
            raise RuntimeError(self.broken)
        self._told.append("ended")

    def wait_stream(self, _: Any) -> None: ...


@pytest.fixture
def noting(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str]]:
    """What takes a GPU's place, and what it tells."""
    told: list[str] = []

    @contextmanager
    def entered(what: Any) -> Iterator[None]:
        yield

    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Noting(told))
    monkeypatch.setattr(devices, "_repair", lambda *_: told.append("repaired"))
    cleared, name = (lambda: told.append("cleared")), "_cuda_clearCublasWorkspaces"
    monkeypatch.setattr(torch._C, name, cleared, raising=False)
    return Noting(told), told


def test_products_are_captured_in_memory_of_their_own(noting: tuple[Any, list[str]]) -> None:
    """Neither of the stream that captures, nor for those that it captures later."""
    graph, told = noting
    for _ in range(2):
        with devices.captured(graph, torch.device("cuda"), None, graph):
            told.append("multiplied")
    assert told == 2 * ["cleared", "begun", "multiplied", "ended", "cleared"]


@pytest.mark.parametrize("end", ["broken before", "CUDA error: out of memory"])
@pytest.mark.parametrize("heard", [True, False], ids=["an error", "a word too late"])
def test_what_breaks_a_graph_is_repaired(
    heard: bool, end: str, noting: tuple[Any, list[str]]
) -> None:
    """Also where only its end tells: a kernel's owner hears of no error while it unloads it."""
    broken, told = noting
    broken.broken, kind = end, torch.OutOfMemoryError if "memory" in end else RuntimeError
    error = torch.OutOfMemoryError("none left") if heard else kind(end)
    with (
        pytest.raises(type(error), match=str(error)),
        devices.captured(broken, torch.device("cuda"), None, broken),
    ):
        if heard:
            raise error
    assert told == ["cleared", "begun", "repaired", "cleared"]


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
    recording = Recording(lambda: out.copy_(things["scale"] * 2), out.device, MemoryPool())
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
        Recording(asks, number.device, MemoryPool())
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
    recording = Recording(lambda: number.mul_(2), number.device, MemoryPool())
    recording.replay()
    assert number.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "wrong", ["nothing", "a row", "rows", "no number", "infinite", "at first", "still"]
)
def test_it_is_compared_with_the_function(
    compiled: bool, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must do the same; where parts are compiled, most times nearly so, in all memory."""
    many, rows = torch.zeros(1000, device=DEVICE), torch.zeros(10, dtype=torch.long, device=DEVICE)
    one, by = (torch.arange(10, device=DEVICE) == 3).long(), torch.ones_like(rows)
    more = dict.fromkeys(("a row", "rows", "no number", "infinite"), 0.0)

    def step() -> None:
        many.add_(by[0] + more["no number"] + more["infinite"])
        rows.add_(by).add_(one * int(more["a row"])).add_(by * int(more["rows"]))

    step()
    kind = Recording
    if DEVICE == "cpu":
        kind = Replayed
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    recording = kind(traced(step) if compiled else step, many.device, MemoryPool())
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
