"""The view over a target: hidden states without logits, fingerprints, refusals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM

from medusa_heads import DraftedModel, TrainingFreeModel
from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.target import TargetArguments
from tests.conftest import TinyLlama


def test_hidden_is_what_the_lm_head_reads(tiny_llama: TinyLlama) -> None:
    model = tiny_llama()
    target = TargetModel(model)
    ids_BT = torch.arange(20).view(2, 10)
    hidden_BTD = target.hidden(ids_BT, torch.ones_like(ids_BT))
    torch.testing.assert_close(model.lm_head(hidden_BTD), model(ids_BT).logits)


def test_hidden_leaves_logit_scaling_architectures_alone() -> None:
    config = Gemma2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        final_logit_softcapping=5.0,
    )
    target = TargetModel(Gemma2ForCausalLM(config).eval())
    hidden_BTD = target.hidden(torch.arange(10)[None])
    assert hidden_BTD.shape == (1, 10, 32)


@pytest.mark.parametrize("wrong", ["org/model", None, nn.Linear(2, 2)])
def test_what_is_no_model_is_refused(tiny_llama: TinyLlama, wrong: Any) -> None:
    """Also as a draft model, and by whatever decodes."""
    for given in (partial(TargetModel, wrong), partial(DraftedModel, tiny_llama(), wrong)):
        with pytest.raises(ValueError, match="has no lm_head that is a matrix"):
            given()


def test_fingerprint_does_not_depend_on_the_dtype(tiny_llama: TinyLlama) -> None:
    in_fp32 = TargetModel(tiny_llama().to(torch.bfloat16).float()).fingerprint()
    in_bf16 = TargetModel(tiny_llama().to(torch.bfloat16)).fingerprint()
    assert in_fp32 == in_bf16
    assert in_fp32 != TargetModel(tiny_llama(seed=1)).fingerprint()


def test_weights_digest_sees_every_weight(tiny_llama: TinyLlama) -> None:
    target = TargetModel(tiny_llama())
    before = target.weights_digest()
    assert before == TargetModel(tiny_llama()).weights_digest()
    with torch.no_grad():
        target.model.model.norm.weight[3] += 1e-3
    assert target.weights_digest() != before


@pytest.mark.parametrize("wrap", [partial(torch.compile, backend="eager"), nn.DataParallel])
def test_the_model_inside_a_wrapper_is_decoded(
    tiny_llama: TinyLlama, wrap: Callable[[Any], Any]
) -> None:
    model: Any = tiny_llama()
    target = TargetModel(wrap(model))
    assert target.model is model
    ids_1T = torch.arange(1, 13)[None]
    options: Any = {"attention_mask": torch.ones_like(ids_1T), "max_new_tokens": 8}
    options |= {"do_sample": False, "pad_token_id": 0}
    got: Any = TrainingFreeModel(wrap(model)).generate(ids_1T, **options)
    assert torch.equal(got, model.generate(ids_1T, **options))  # type: ignore[operator]


def test_missing_model_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a causal language model") as error:
        TargetModel.from_pretrained(str(tmp_path / "nowhere"))
    assert "\n" not in str(error.value)


def test_a_cache_of_unknown_state_is_refused_by_name(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_heads.target.cache._PLAIN_LAYERS", ())
    with pytest.raises(UnsupportedArchitecture, match="llama keeps DynamicLayer state"):
        TargetModel(tiny_llama()).new_cache()


def test_flash_attention_is_refused_by_name(tiny_llama: TinyLlama) -> None:
    model = tiny_llama()
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(UnsupportedArchitecture, match="attn_implementation='sdpa'"):
        TargetModel(model).new_cache()


def test_a_target_whose_weights_accelerate_keeps_elsewhere(tiny_llama: TinyLlama) -> None:
    whole, model = TargetModel(tiny_llama()), tiny_llama()
    cpu_offload(model, execution_device=torch.device("cpu"))
    offloaded = TargetModel(model)
    assert model.device.type == "meta" and offloaded.device.type == "cpu"
    assert offloaded.weights_digest() == whole.weights_digest()
    assert model.device.type == "meta"


def test_a_target_in_4_bits_stays_bit_for_bit_what_was_loaded(
    tiny_llama: TinyLlama, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    tiny_llama().save_pretrained(tmp_path)
    placed = TargetArguments(str(tmp_path), load_in_4bit=True).placement("cpu")
    target = TargetModel.from_pretrained(str(tmp_path), dtype="bfloat16", **placed)
    loaded, tokens = target.weights_digest(), torch.arange(8)[None]
    first = target.hidden(tokens)
    assert target.weights_digest() == loaded
    assert torch.equal(target.hidden(tokens), first)
