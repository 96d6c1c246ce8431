"""Steps that were recorded as they are, and once that pays with compiled parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from medusa_heads.inference.engine import device_loop
from medusa_heads.machine.programs import Program
from medusa_heads.target.graphs import captured
from medusa_heads.target.graphs.captured import CapturedTarget
from tests.inference.padded import padded
from tests.pairs import with_slow
from tests.replayed import text, uncaptured, with_heads
from tests.target.graphs.test_captured import steps_of

pytestmark = pytest.mark.filterwarnings("error:.*goes on without CUDA graphs")


def test_late_parts(deep: Any, recorded: list[Any], monkeypatch: Any) -> None:
    """By default parts are compiled once that would have paid."""
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _: lambda module, _: module)
    medusa, inputs = with_heads(deep), padded([0, 3], 12)
    assert isinstance(medusa.target, CapturedTarget) and not medusa.target.compiles_parts
    expected = text(uncaptured(medusa), inputs)
    for _ in range(3):
        assert torch.equal(text(medusa, inputs), expected)
    assert len(recorded) == 1
    (one,) = [one for each in steps_of(medusa) for one in each.values()]
    seconds = device_loop._loops[medusa.target]._step_seconds
    assert 0 < seconds < 1 and one.recording.replays > 10
    one.recording.replays = 1 + int(captured._SECONDS / captured._SAVED / seconds)
    for _ in range(3):
        assert torch.equal(text(medusa, inputs), expected)
    assert len(recorded) == 2
    (one,) = [one for each in steps_of(medusa) for one in each.values()]
    assert one.serves and one.recording is recorded[1]()


@pytest.mark.parametrize("of", with_slow(["recording"], ["parts"]))
def test_where_memory_is_short_for_parts(
    of: str, deep: Any, recorded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text goes on as it was recorded, and the next one asks again."""
    asked: list[Any] = []

    def backend(module: Any, _: Any) -> Any:
        asked.append(module)
        if of == "parts" and len(asked) == 1:
            raise torch.OutOfMemoryError("none left")
        return module

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _: backend)
    make, inputs = captured.Recording, padded([0, 3], 12)
    medusa = with_heads(deep)
    target: Any = medusa.target
    expected = text(uncaptured(medusa), inputs)

    def short(function: Any, *others: Any) -> Any:
        if isinstance(function, Program):
            raise torch.OutOfMemoryError("none left")
        return make(function, *others)

    if of == "recording":
        monkeypatch.setattr(captured, "Recording", short)
    for number in range(3):
        target._seconds = 0.0
        assert torch.equal(text(medusa, inputs), expected)
        monkeypatch.setattr(captured, "Recording", make)
        (one,) = [one for each in steps_of(medusa) for one in each.values()]
        assert one.serves and one.is_last == (number > 0)
