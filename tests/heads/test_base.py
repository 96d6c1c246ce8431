"""Heads are copied, and pickled, with all they know."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from medusa_heads.config import HeadsConfig
from medusa_heads.heads import DraftHeads, MedusaHeads, new_heads
from medusa_heads.inference.models.medusa import MedusaModel
from medusa_heads.target.target import TargetModel
from tests.conftest import TinyLlama
from tests.pairs import alternately

GIVEN: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24}
IDS = torch.tensor([[5, 17, 3, 42]])
CONFIGS = {
    "medusa": HeadsConfig(num_heads=2),
    "own": HeadsConfig(num_heads=2, vocab_matrix="own"),
    "prefix": HeadsConfig(num_heads=2, prefix_attention=True),
    "induction": HeadsConfig(num_heads=2, induction=True),
    "correction": HeadsConfig(num_heads=2, correction_rank=4),
    "hydra": HeadsConfig(kind="hydra", num_heads=2),
    "block": HeadsConfig(kind="block", num_heads=3),
    "eagle3": HeadsConfig(kind="eagle3", num_heads=2),
}
ALIKE = ("medusa", "prefix")  # parts that others have too


@pytest.fixture(scope="module")
def target(tiny_llama: TinyLlama) -> TargetModel:
    model = tiny_llama(num_hidden_layers=6)
    model.generation_config.eos_token_id = None
    return TargetModel(model)


def moved(target: TargetModel, config: HeadsConfig) -> DraftHeads:
    """Heads that fresh ones are not."""
    heads = new_heads(target, config)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape))
    return heads


@pytest.mark.parametrize(("kind", "how"), alternately(CONFIGS, ["deepcopy", "pickle"], slow=ALIKE))
def test_copied_heads_draft_the_same(target: TargetModel, kind: str, how: str) -> None:
    heads = moved(target, CONFIGS[kind])
    copied = copy.deepcopy(heads) if how == "deepcopy" else pickle.loads(pickle.dumps(heads))
    assert copied.config == heads.config and copy.deepcopy(heads.config) == heads.config
    theirs = {parameter.data_ptr() for parameter in heads.parameters()}
    assert not theirs & {parameter.data_ptr() for parameter in copied.parameters()}
    told = []
    for each in (heads, copied):
        model = MedusaModel(target, each, tree="chain", deterministic=True)
        text_BT: Any = model.generate(IDS, **GIVEN)
        told.append((text_BT.tolist(), model.last_stats.tokens_per_step))
    assert told[0] == told[1]


def test_a_copied_decoder_has_copied_heads(target: TargetModel) -> None:
    model = MedusaModel(target, moved(target, CONFIGS["medusa"]), tree="chain", compile=False)
    expected_BT: Any = model.generate(IDS, **GIVEN)
    copied = copy.deepcopy(model)
    assert copied.target.model is not target.model and copied.heads is not model.heads
    assert torch.equal(torch.as_tensor(copied.generate(IDS, **GIVEN)), expected_BT)


def test_a_config_of_another_kind_is_refused_by_name(target: TargetModel) -> None:
    with pytest.raises(ValueError, match=r"hydra heads are made by .*new_heads"):
        MedusaHeads.from_target(target, HeadsConfig(kind="hydra"))
