"""The capability gate: trees where they are exact, chains where only those are, or a refusal.

Shapes: N tree nodes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    BloomConfig,
    FineGrainedFP8Config,
    GPTNeoConfig,
    MixtralConfig,
    MoshiConfig,
    ProphetNetConfig,
    RobertaConfig,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from medusa_heads import HeadsConfig, MedusaHeads, MedusaModel, TargetModel
from medusa_heads.cache_names import cache_of
from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.inference.drafters.head_trees import MedusaDrafter
from medusa_heads.inference.engine.capability import capability
from tests.conftest import TinyLlama
from tests.inference.narrowed import DTYPES, WIDTHS, narrow

SLOT_BOUND: dict[str, Any] = {
    "bloom": BloomConfig(vocab_size=40, hidden_size=64, n_layer=2, n_head=4),
    "gpt_neo": GPTNeoConfig(
        vocab_size=40,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        intermediate_size=96,
        window_size=16,
        attention_types=[[["global", "local"], 1]],
    ),
}


def build(config: Any) -> Any:
    model: Any = AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def test_a_tree_where_it_is_exact(tiny_llama: TinyLlama) -> None:
    assert capability(TargetModel(tiny_llama())) == "tree"


@pytest.mark.parametrize("kind", SLOT_BOUND)
def test_a_chain_where_only_that_is_exact(kind: str) -> None:
    model = build(SLOT_BOUND[kind])
    heads = MedusaHeads.from_target(model, HeadsConfig(num_heads=3))
    with pytest.warns(UserWarning, match=f"{kind} verifies a chain"):
        medusa = MedusaModel(model, heads, tree=[(0,), (1,), (0, 0), (1, 0)])
    assert isinstance(medusa.drafter, MedusaDrafter)
    assert medusa.drafter.shape.choices == [(0,), (0, 0)]
    ids = torch.arange(1, 31)[None]
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(**inputs, max_new_tokens=60, do_sample=False)
    got: Any = medusa.generate(**inputs, max_new_tokens=60, do_sample=False)
    assert torch.equal(got, expected)
    assert medusa.last_stats.tokens_per_step > 1
    batch: dict[str, Any] = {name: tensor.repeat(2, 1) for name, tensor in inputs.items()}
    with pytest.raises(UnsupportedArchitecture, match="one unpadded sequence at a time"):
        medusa.generate(**batch, max_new_tokens=4)


@pytest.mark.filterwarnings("ignore:gpt_neo verifies a chain")
@pytest.mark.parametrize("compile", [True, "capture"])
def test_what_only_compiled_steps_cannot_do_is_told_to_do_without(compile: Any) -> None:
    """In a cache of fixed size, whose slots gpt_neo's window goes by."""
    model = build(SLOT_BOUND["gpt_neo"])
    heads = MedusaHeads.from_target(model, HeadsConfig(num_heads=3))
    with pytest.raises(UnsupportedArchitecture, match=r"its logits differ .*: leave compile out$"):
        MedusaModel(model, heads, tree="chain", compile=compile)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_model_in_training_is_told_to_leave_it(tiny_llama: TinyLlama, checkpoints: bool) -> None:
    """Where that matters: it drops some of what it says, or keeps no cache."""
    model = tiny_llama().train()
    assert capability(TargetModel(model)) == "tree"
    model = tiny_llama(attention_dropout=0.0 if checkpoints else 0.3).train()
    if checkpoints:
        model.gradient_checkpointing_enable()
    with torch.no_grad():  # where transformers 5.24 and later keep one with checkpoints too
        keeps = cache_of(model(torch.arange(5, 9)[None], use_cache=True)) is not None
    if checkpoints and keeps:
        assert capability(TargetModel(model)) == "tree"
        return
    with pytest.raises(UnsupportedArchitecture, match=r"is in training mode, and .*: call its ev"):
        capability(TargetModel(model))
    assert capability(TargetModel(model.eval())) == "tree"


def test_positions_are_those_of_generate() -> None:
    """Left to itself, RoBERTa counts positions from its padding id on; generate() does not."""
    config = RobertaConfig(
        vocab_size=40,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        is_decoder=True,
        tie_word_embeddings=False,
    )
    model = build(config)
    assert capability(TargetModel(model)) == "tree"
    medusa = MedusaModel(
        model,
        MedusaHeads.from_target(model, HeadsConfig(num_heads=2)),
        tree=[(0,), (1,), (0, 0), (1, 0)],
    )
    ids = torch.arange(1, 31)[None]
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    got: Any = medusa.generate(**inputs, max_new_tokens=40, do_sample=False)
    assert torch.equal(got, expected)


def test_a_model_that_takes_one_token_at_a_time_is_refused_by_name() -> None:
    config = ProphetNetConfig(
        vocab_size=40,
        hidden_size=64,
        encoder_ffn_dim=96,
        num_encoder_layers=1,
        num_encoder_attention_heads=4,
        decoder_ffn_dim=96,
        num_decoder_layers=2,
        num_decoder_attention_heads=4,
        max_position_embeddings=128,
    )
    with pytest.raises(UnsupportedArchitecture, match="prophetnet fails on several new tokens"):
        capability(TargetModel(build(config)))


def test_a_cache_that_forgets_what_attention_sees_is_refused_by_name() -> None:
    config = MoshiConfig(
        vocab_size=40,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=96,
        sliding_window=16,
        audio_vocab_size=40,
    )
    with pytest.raises(UnsupportedArchitecture, match="moshi cannot be followed: its cache drops"):
        capability(TargetModel(build(config)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_outliers_sought_in_all_tokens_are_refused_by_name(
    tiny_llama: TinyLlama, dtype: torch.dtype
) -> None:
    """LLM.int8() picks its outlier columns over every token of a forward."""
    model = tiny_llama().to(dtype)
    model.config.quantization_config = BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(UnsupportedArchitecture, match="llm_int8_threshold=0"):
        capability(TargetModel(model))
    model.config.quantization_config.llm_int8_threshold = 0.0
    assert capability(TargetModel(model)) == "tree"


def test_weights_that_processes_share_are_refused_by_name(tiny_llama: TinyLlama) -> None:
    model = tiny_llama()
    model._tp_size = 1
    assert capability(TargetModel(model)) == "tree"
    model = tiny_llama()
    model._tp_size = 2
    with pytest.raises(UnsupportedArchitecture, match=r"spread over several processes.*tp_plan"):
        capability(TargetModel(model))


class OneScale(torch.nn.Linear):
    """Rounds its input to 8 bits, with one scale for all tokens of the forward."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().max().float() / 127
        return super().forward(((x / scale).round() * scale).to(x.dtype))


class CoarseScale(torch.nn.Linear):
    """As far off as one that rounds coarsely, by how many tokens it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + 0.01 * (x.shape[-2] % 5)))


def with_linear(model: Any, kind: type[torch.nn.Linear]) -> Any:
    for module in model.model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = kind
    return model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_one_scale_for_all_tokens_is_refused(
    tiny_llama: TinyLlama, dtype: torch.dtype, width: float
) -> None:
    model = with_linear(narrow(tiny_llama(), width).to(dtype), OneScale)
    with pytest.raises(UnsupportedArchitecture, match=r"must not see|plain decoding"):
        capability(TargetModel(model))


def test_a_model_that_is_changed_in_place_is_tried_anew(tiny_llama: TinyLlama) -> None:
    """As by who quantises it once heads are attached."""
    model, options = tiny_llama(), dict[str, Any](max_new_tokens=9, do_sample=False)
    heads = MedusaHeads.from_target(model, HeadsConfig(num_heads=2))
    medusa: Any = MedusaModel(model, heads, tree="4")
    ids_1T = torch.arange(3, 12)[None]
    expected = model.generate(ids_1T, **options)
    assert torch.equal(medusa.generate(ids_1T, **options), expected)
    before = [(module, type(module)) for module in model.modules()]
    with_linear(model, OneScale)
    with pytest.raises(UnsupportedArchitecture, match="must not see"):
        medusa.generate(ids_1T, **options)
    with pytest.raises(UnsupportedArchitecture, match="must not see"):
        MedusaModel(model, heads)
    for module, kind in before:
        module.__class__ = kind
    assert torch.equal(medusa.generate(ids_1T, **options), expected)
    model.lm_head.weight, weight = None, model.lm_head.weight
    with pytest.raises(ValueError, match="lm_head of the target is no longer a matrix"):
        medusa.generate(ids_1T, **options)
    model.lm_head.weight = weight


def test_rounding_within_a_forward_is_said(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As exact as half precision, and no chain."""
    with pytest.warns(UserWarning, match="rounds activations within.*as in half precision"):
        assert capability(TargetModel(with_linear(tiny_llama(), CoarseScale))) == "tree"
    # Where the tree's mask is not followed as well, that is seen all the same.
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._local_mapping, "sdpa", sdpa_mask)
    with pytest.warns(UserWarning, match="not a tree: "):
        assert capability(TargetModel(with_linear(tiny_llama(seed=1), CoarseScale))) == "chain"


@pytest.mark.parametrize(
    "how", [FineGrainedFP8Config(), BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)]
)
@pytest.mark.filterwarnings("error")
def test_rounding_that_a_configuration_says_is_said(tiny_llama: TinyLlama, how: Any) -> None:
    model = tiny_llama()
    model.config.quantization_config = how
    with pytest.warns(UserWarning, match="rounds activations within.*as in half precision"):
        assert capability(TargetModel(model)) == "tree"
    assert capability(TargetModel(model.to(torch.bfloat16))) == "tree"  # in silence
    four = tiny_llama()
    four.config.quantization_config = BitsAndBytesConfig(load_in_4bit=True)
    assert capability(TargetModel(four)) == "tree"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_numbers_catch_what_names_do_not(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: float
) -> None:
    """Negative control: the same Llama with its tree mask ignored is not trusted with a tree, also
    where rounding is coarse and attention changes little."""
    model = narrow(tiny_llama(), width).to(dtype)
    assert capability(TargetModel(model)) == "tree"
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._local_mapping, "sdpa", sdpa_mask)
    with pytest.warns(UserWarning, match="not a tree: "):
        assert capability(TargetModel(narrow(tiny_llama(), width).to(dtype))) == "chain"


def test_experts_do_not_make_tokens_see_each_other() -> None:
    sizes: dict[str, Any] = {"vocab_size": 40, "hidden_size": 64, "intermediate_size": 96}
    config = MixtralConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4
    )
    for dtype in DTYPES:
        assert capability(TargetModel(build(config).to(dtype))) == "tree"


def test_tokens_that_were_never_trained_are_no_fault(tiny_llama: TinyLlama) -> None:
    """A vocabulary may be larger than what was trained: nobody can see such tokens."""
    model: Any = tiny_llama()
    with torch.no_grad():
        model.get_input_embeddings().weight[4:] = 0.0
    assert capability(TargetModel(model)) == "tree"
