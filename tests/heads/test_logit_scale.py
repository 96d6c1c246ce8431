"""Targets that multiply what their lm_head says (Granite, Cohere, Falcon-H1): heads are as sure as
these, and say while drafting what they say while learning."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, GraniteConfig, GraniteForCausalLM

from medusa_heads.checkpoint.checkpoint import save_heads
from medusa_heads.checkpoint.stored_heads import read_stored
from medusa_heads.config import HeadsConfig
from medusa_heads.heads import DecoderHeads, Eagle3Heads, new_heads
from medusa_heads.heads.vocabulary import logit_scale
from medusa_heads.interop.block import written
from medusa_heads.target.target import TargetModel
from medusa_heads.training.loss.teacher import Teacher
from medusa_heads.training.measure.fresh_heads import FreshHeads
from scripts.prove.tiny_configs import tiny_config
from tests.conftest import TinyLlama

KINDS: dict[str, Any] = {
    "medusa": {"kind": "medusa"},
    "medusa with a shortcut": {"kind": "medusa", "linear_shortcut": True, "correction_rank": 4},
    "hydra": {"kind": "hydra", "prefix_attention": True},
    "induction": {"linear_shortcut": True, "induction": True},
    "hydra, induction": {"kind": "hydra", "induction": True},
    "eagle3": {"kind": "eagle3"},
    "block": {"kind": "block", "correction_rank": 4},
}
IDS_BT = torch.arange(24).view(2, 12)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_multiplier=0.2,
        logits_scaling=8.0,
        initializer_range=0.5,
        tie_word_embeddings=False,
    )
    return TargetModel(GraniteForCausalLM(config).eval())


def test_a_configuration_says_what_logits_are_multiplied_by(
    target: TargetModel, tiny_llama: TinyLlama
) -> None:
    assert logit_scale(target.config) == 1 / 8
    assert logit_scale(CohereConfig(logit_scale=0.0625)) == 0.0625
    assert logit_scale(tiny_llama().config) == 1


@pytest.mark.parametrize(
    ("kind", "name", "said", "scale"),
    [
        ("granite", "logits_scaling", 8.0, 1 / 8),
        ("hyperclovax", "logits_scaling", 0.125, 0.125),  # which multiplies
        ("minicpm3", "dim_model_base", 8, 1),  # before its lm_head
        ("mpt", "logit_scale", 0.5, 1),  # of which transformers makes nothing
        ("mpt", "logit_scale", "inv_sqrt_d_model", 1),
    ],
)
def test_a_factor_is_what_the_model_makes_of_it(
    kind: str, name: str, said: Any, scale: float
) -> None:
    config = tiny_config(kind)
    setattr(config, name, said)
    made = TargetModel(AutoModelForCausalLM.from_config(config).eval())
    torch.nn.init.normal_(made.get_output_embeddings().weight)
    assert logit_scale(made.config) == scale
    Teacher.from_target(made)  # which compares with the logits themselves


@pytest.mark.parametrize("vocab_matrix", ["shared", "own"])
@pytest.mark.parametrize("kind", ["medusa", "medusa with a shortcut", "hydra", "eagle3"])
def test_fresh_heads_are_as_sure_as_the_target(
    target: TargetModel, kind: str, vocab_matrix: Any
) -> None:
    scale = logit_scale(target.config)
    config = HeadsConfig(num_heads=2, vocab_matrix=vocab_matrix, logit_scale=scale, **KINDS[kind])
    heads = new_heads(target, config)
    hidden_BTD = target.hidden(IDS_BT)
    if isinstance(heads, DecoderHeads):
        heads.scale_to(hidden_BTD)
    tokens_BTK = torch.zeros(2, 12, 2, dtype=torch.long)
    said_BTKV = heads(heads.encode(hidden_BTD, IDS_BT), tokens_BTK)
    expected_BTV = target.model(IDS_BT).logits
    torch.testing.assert_close(said_BTKV[:, :, 0], expected_BTV, atol=2e-3, rtol=1e-3)
    fresh_BTKV = FreshHeads.like(heads, target)(hidden_BTD)
    torch.testing.assert_close(fresh_BTKV[:, :, 1], expected_BTV, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_as_sure_as_what_was_learnt(target: TargetModel, kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    heads = new_heads(target, HeadsConfig(num_heads=2, logit_scale=0.125, **KINDS[kind]))
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    hidden_BTD = target.hidden(IDS_BT)
    encoded_BTE = heads.encode(hidden_BTD, IDS_BT)
    tokens_BK = IDS_BT[:, 6:8]
    learnt_BKV = heads(encoded_BTE[:, 5], tokens_BK)
    if isinstance(heads, Eagle3Heads):
        after = heads.after_text(hidden_BTD, IDS_BT, None, torch.tensor([5, 17]))
    else:
        after = heads.after_paths(encoded_BTE[:, 5])
    above_B1 = torch.zeros(2, 1, dtype=torch.long)
    for head in range(2):
        drafted_BFV, _ = after(head, tokens_BK[:, None, : head + 1], above_B1)
        torch.testing.assert_close(drafted_BFV[:, 0], learnt_BKV[:, head], atol=1e-4, rtol=1e-4)


def test_a_correction_is_written_for_engines_that_do_not_scale(
    target: TargetModel, tmp_path: Path
) -> None:
    view = target.with_features([0, 1])
    config = HeadsConfig(num_heads=2, logit_scale=0.125, features=[0, 1], **KINDS["block"])
    heads = new_heads(view, config)
    assert heads.correction is not None
    torch.nn.init.normal_(heads.correction.after.weight)
    save_heads(tmp_path, heads, view)
    tensors, _ = written(read_stored(tmp_path), None)
    theirs_VW = tensors["markov_head.markov_w2.weight"].float()
    torch.testing.assert_close(0.125 * theirs_VW, heads.correction.after.weight.data)


def test_it_is_stored_where_there_is_one() -> None:
    assert "logit_scale" not in HeadsConfig().to_dict()
    scaled = replace(HeadsConfig(), logit_scale=0.125)
    assert HeadsConfig.from_dict(scaled.to_dict()) == scaled
    for wrong in (0, -1.0, float("nan"), "8", True, None):
        given: Any = {**HeadsConfig().to_dict(), "logit_scale": wrong}
        with pytest.raises(ValueError, match="logit_scale"):
            HeadsConfig.from_dict(given)
