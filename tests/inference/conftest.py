"""A model with heads, and what transformers makes of the same input without them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from medusa_heads import HeadsConfig, MedusaHeads, MedusaModel
from medusa_heads.inference.adapt import lessons
from tests.conftest import TinyLlama
from tests.inference.reference import reference

INPUTS: dict[str, Any] = {
    "input_ids": torch.arange(3, 15)[None],
    "attention_mask": torch.ones(1, 12).long(),
}


@pytest.fixture(autouse=True)
def no_lessons(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No drafter begins with what another test's drafters learnt."""
    anew = partial(tmp_path_factory.mktemp, "lessons")
    monkeypatch.setattr(lessons, "measurement_folder", anew)


@pytest.fixture(scope="module")
def medusa(tiny_llama: TinyLlama) -> MedusaModel:
    """Untrained heads on a small vocabulary: now and then a draft is right."""
    model = tiny_llama(vocab_size=24)
    return MedusaModel(model, MedusaHeads.from_target(model, HeadsConfig(num_heads=3)), tree=8)


@pytest.fixture(scope="module")
def streaming(medusa: MedusaModel) -> MedusaModel:
    """The same, drawing from transformers' own random stream."""
    return MedusaModel(medusa.target, medusa.heads, tree=8, rng="transformers")


def plain(medusa: MedusaModel, **options: Any) -> Any:
    return reference(medusa.target.model, **INPUTS, **options)
