"""Texts of a program in which torch makes tensors elsewhere than the target lies, by default."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from medusa_heads import DraftedModel, HeadsConfig, MedusaModel, TrainingFreeModel, new_heads
from tests.conftest import TinyLlama
from tests.inference.padded import padded
from tests.inference.reference import reference
from tests.inference.standing import ELSEWHERE
from tests.pairs import alternately

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(
    ("words", "compile"),
    alternately(
        ["lookahead", "suffix", "heads", "draft"],
        [False, "capture", True, "steps"],
        slow=("lookahead", "draft"),
    ),
)
def test_tensors_are_made_where_the_target_lies(
    tiny_llama: TinyLlama, words: str, compile: Any
) -> None:
    model = tiny_llama()
    model.generation_config.pad_token_id = 0
    options: dict[str, Any] = {"compile": compile}
    if compile in (True, "steps"):
        options["compile_backend"] = "eager"
    decoder: Any
    if words == "heads":
        heads = new_heads(model, HeadsConfig(num_heads=3, prefix_attention=True))
        decoder = MedusaModel(model, heads, tree="7", **options)
    elif words == "draft":
        decoder = DraftedModel(model, tiny_llama(1), tree="chain:3", **options)
    else:
        decoder = TrainingFreeModel(model, words, **options)
    for inputs in (padded([0], 12), padded([0, 3], 12)):
        with ELSEWHERE:
            made = decoder.generate(**inputs, **GREEDY)
        assert torch.equal(made, reference(model, **inputs, **GREEDY))
