"""Streamers of texts whose steps are taken whole."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from medusa_heads.inference.engine import reading
from tests.conftest import DEVICE, TinyLlama
from tests.inference.on_device import SAMPLING, text, with_heads
from tests.inference.padded import padded
from tests.pairs import alternately


@pytest.fixture
def model(tiny_llama: TinyLlama) -> Any:
    made = tiny_llama().to(DEVICE)
    made.generation_config.pad_token_id = 0
    return made


@pytest.mark.parametrize(("options", "late"), alternately([{}, SAMPLING], [False, True]))
def test_a_text_is_streamed(
    model: Any, monkeypatch: pytest.MonkeyPatch, late: bool, options: dict[str, Any]
) -> None:
    """Step by step, on a GPU those of the step before; to the token that ends it."""
    if late:
        monkeypatch.setattr(reading, "_READ_LATE", {"cpu", "cuda"})
    medusa, inputs = with_heads(model), padded([0], 12)
    expected = text(medusa, inputs, **options)[0, 12:].tolist()
    for end in (None, expected[-5]):
        last = len(expected) if end is None else expected.index(end) + 1
        streamer = Streamer()
        made = text(medusa, inputs, streamer=streamer, eos_token_id=end, **options)
        assert medusa.last_stats.seconds["step"]
        assert made[0, 12:].tolist() == streamer.tokens == expected[:last]
        assert streamer.steps == medusa.last_stats.steps
        assert streamer.ended


class Streamer:
    """What is put to it."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.steps, self.ended = -1, False

    def put(self, tokens: Tensor) -> None:
        if self.steps >= 0:  # behind the prompt
            self.tokens += tokens.tolist()
        self.steps = max(self.steps, 0)

    def end_step(self) -> None:
        self.steps += 1

    def end(self) -> None:
        self.ended = True
