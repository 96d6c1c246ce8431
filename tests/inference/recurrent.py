"""Tiny targets with a recurrent state or an index, and what transformers makes of the same input.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from medusa_heads import TargetModel
from medusa_heads.config import RankPath
from medusa_heads.inference.engine.stats import GenerationStats
from scripts.prove.tiny_configs import tiny_config
from scripts.prove.tiny_models import builder, random_weights
from tests.conftest import DEVICE
from tests.inference.planted import PlantedDrafter, decoding
from tests.inference.reference import reference

IN_GRAPHS = [
    pytest.mark.filterwarnings("ignore:.*verifies a chain of drafts, not a tree"),
    pytest.mark.usefixtures("small_caches"),
]
KINDS = (
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "lfm2",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_text",
    "qwen3_next",
)

CHAIN = [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]


@cache
def tiny_target(kind: str) -> TargetModel:
    view = TargetModel(builder(kind)((0.15, 0.15)).to(DEVICE))
    view.freeze()
    view.model.generation_config.eos_token_id = None
    view.model.generation_config.pad_token_id = 0
    return view


@cache
def short_target(kind: str) -> TargetModel:
    """The same with half of its layers, one with a state and one with attention, where the order of
    several layers of a kind is not the point."""
    config = tiny_config(kind)
    config.num_hidden_layers = 2
    if kind == "bamba":
        config.attn_layer_indices = [1]
    elif kind != "falcon_h1":  # each of whose layers has both
        config.layer_types = config.layer_types[:2]
    with torch.random.fork_rng():  # vectors are as the model makes them
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    view = TargetModel(random_weights(model, (0.15, 0.15)).to(DEVICE))
    view.freeze()
    view.model.generation_config.eos_token_id = None
    view.model.generation_config.pad_token_id = 0
    return view


def prompt(length: int = 21, seed: int = 1) -> dict[str, Any]:
    """A random text, as generate() takes it."""
    random = torch.Generator().manual_seed(seed)
    ids_1T = torch.randint(1, 190, (1, length), generator=random).to(DEVICE)
    return {"input_ids": ids_1T, "attention_mask": torch.ones_like(ids_1T)}


def repeating() -> dict[str, Any]:
    """A text that is easily continued from itself."""
    ids_1T = torch.tensor([[5, 9, 33, 71, 18, 2] * 6], device=DEVICE)
    return {"input_ids": ids_1T, "attention_mask": torch.ones_like(ids_1T)}


def written(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    """What its generate() writes; the same seed before every text."""
    torch.manual_seed(7)
    settings = {**inputs, "max_new_tokens": 32, "do_sample": False, **options}
    if isinstance(model, nn.Module):
        return reference(model, **settings)
    return model.generate(**settings)


def planted(
    target: TargetModel,
    inputs: dict[str, Any],
    expected_BT: Tensor,
    share: float = 0.75,
    choices: Sequence[RankPath] = CHAIN,
    *,
    in_step: bool = False,
    **options: Any,
) -> tuple[Any, GenerationStats]:
    """The same with the true continuation planted on trees, which are wrong here and there."""
    truth = expected_BT[:, inputs["input_ids"].shape[1] :].tolist()
    drafter = PlantedDrafter(truth, target.vocab_size, choices, share, in_step=in_step)
    stats = GenerationStats()
    custom = decoding(target, drafter, rng="transformers", stats=stats)
    return written(target.model, inputs, custom_generate=custom, **options), stats
