"""A target that speaks, drafts for itself, and can be served."""

from __future__ import annotations

from typing import Any

import pytest

from medusa_heads.inference.endpoint.scheduler import Scheduler
from medusa_heads.inference.endpoint.text import Text
from medusa_heads.inference.models.training_free import TrainingFreeModel
from tests.conftest import TinyLlama
from tests.inference.speaking import make_speaker, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def model(tiny_llama: TinyLlama, tokenizer: Any) -> TrainingFreeModel:
    return TrainingFreeModel(make_speaker(tiny_llama, tokenizer), "recycling")


@pytest.fixture
def endless(model: TrainingFreeModel, monkeypatch: pytest.MonkeyPatch) -> TrainingFreeModel:
    """Its texts end where they are told to, and nowhere else."""
    monkeypatch.setattr(model.target.model.generation_config, "eos_token_id", None)
    return model


class Told:
    """What is told of one text."""

    def __init__(self, prompt: str, tokenizer: Any, max_tokens: int, **options: Any) -> None:
        self.pieces: list[str] = []
        ids = tokenizer(prompt)["input_ids"]
        self.text = Text(ids, max_tokens, {"do_sample": False}, tell=self._tell, **options)

    def _tell(self, piece: str, ending: Any) -> None:
        self.pieces.append(piece)


def scheduler_of(model: Any, tokenizer: Any, max_rows: int, **options: Any) -> Scheduler:
    """One without a thread: tests take its turns."""
    batch = model.running_batch(max_rows)
    return Scheduler(batch, model.target.model, tokenizer.decode, **options)
