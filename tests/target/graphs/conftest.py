"""A tiny model, and what becomes a script of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import DEVICE, TinyLlama
from tests.replayed import noted_sizes


@pytest.fixture
def model(tiny_llama: TinyLlama) -> Any:
    made = tiny_llama()
    made.generation_config.pad_token_id = 0
    return made


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return noted_sizes(monkeypatch)


@pytest.fixture
def deep(tiny_llama: TinyLlama) -> Any:
    """Of enough layers for parts of them to be worth compiling."""
    made = tiny_llama(num_hidden_layers=5).to(DEVICE)
    made.generation_config.pad_token_id = 0
    return made
