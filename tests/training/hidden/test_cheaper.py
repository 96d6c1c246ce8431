"""Whether a cache pays: a sentence that goes by passes, and a disk that is measured."""

import os
import signal
from pathlib import Path

import pytest

from medusa_heads.training.hidden import cheaper
from medusa_heads.training.hidden.cheaper import Costs, disk_rates
from tests.killed import dies


@pytest.mark.parametrize(
    ("passes", "said"),
    [
        (1, "for 1 pass no cache is cheaper, 10,000 s against 10,150 s with one"),
        (2, "for 2 passes a cache is cheaper, 10,200 s against 20,000 s without"),
        (0.25, "for 0.2 passes no cache is cheaper, 2,500 s against 10,112 s with one"),
    ],
)
def test_more_passes_are_for_a_cache(passes: float, said: str) -> None:
    costs = Costs(tokens=10_000_000, size=10**10, forward=1000.0, write=1e8, read=2e8)
    sentence = costs.sentence(passes)
    assert sentence.endswith(said)
    assert "computes a pass in 10,000 s (1,000 tokens/s); 10.0 GB take 100 s to write" in sentence


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    write, read = disk_rates(tmp_path)
    assert write > 0 and read > 0 and not list(tmp_path.iterdir())


def test_what_a_killed_measurement_leaves_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(cheaper, "read_rates", lambda _: os.kill(os.getpid(), signal.SIGKILL))
        assert dies(lambda: disk_rates(tmp_path))
    assert [path.suffix for path in tmp_path.iterdir()] == [".part"]
    disk_rates(tmp_path)
    assert not list(tmp_path.iterdir())
