"""What stands for the recordings of a GPU shares memory as they do."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from medusa_heads.machine.programs import traced
from medusa_heads.machine.recording import MemoryPool
from tests.replayed import Replayed


@pytest.mark.parametrize("compiled", [False, True])
def test_a_replay_spoils_what_others_of_the_pool_have_made(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    kept, pools = torch.ones(3), (MemoryPool(), MemoryPool())

    def doubled() -> list[torch.Tensor]:
        return [2 * kept, kept.add_(1)]

    def recorded(pool: MemoryPool) -> Replayed:
        return Replayed(traced(doubled) if compiled else doubled, kept.device, pool)

    first, second, other = recorded(pools[0]), recorded(pools[0]), recorded(pools[1])
    kept.fill_(1)  # tracing is calling
    first.replay()
    other.replay()
    assert first.result[0].tolist() == [2.0] * 3
    second.replay()
    assert first.result[0].isnan().all() and kept.tolist() == [4.0] * 3
    assert second.result[0].tolist() == [6.0] * 3 and other.result[0].tolist() == [4.0] * 3


def test_what_torch_keeps_is_given_back_for_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which torch does not do by itself while it records; and what was made until then, too."""
    kept, made, freed = torch.zeros(3), list[Any](), list[int]()

    def emptied() -> None:
        assert made.pop()() is None
        freed.append(1)

    def added() -> list[torch.Tensor]:
        twice = kept.add_(1) * 2
        made.append(weakref.ref(twice))
        if not freed:
            raise torch.OutOfMemoryError("none left")
        return [twice]

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "empty_cache", emptied)
    recording = Replayed(added, kept.device, MemoryPool())
    assert len(freed) == 1 and kept.tolist() == [0.0] * 3
    recording.replay()
    assert recording.result[0].tolist() == [2.0] * 3 and kept.tolist() == [1.0] * 3
    freed.clear()
    monkeypatch.setattr(torch.cuda, "empty_cache", made.clear)
    with pytest.raises(torch.OutOfMemoryError, match="none left"):
        Replayed(added, kept.device, MemoryPool())
