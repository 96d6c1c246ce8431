"""Whether a cache pays: a sentence that goes by passes, and a disk that is measured."""

from pathlib import Path

import pytest

from medusa_heads.training.hidden.cheaper import Costs, disk_rates


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
