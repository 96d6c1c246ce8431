"""Losslessness: token-equal to generate() in fp32, with the true continuation planted on random
branches, and a negative control that must fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from medusa_heads.inference.acceptance import SampleThenMatch
from medusa_heads.inference.engine.stats import GenerationStats
from medusa_heads.target.target import TargetModel
from tests.conftest import DEVICE
from tests.inference.planted import PlainCausalDrafter, PlantedDrafter, decoding
from tests.inference.reference import reference
from tests.pairs import alternately, with_slow

VOCAB = 199
PROMPT = 21
NEW = 18
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**COMMON),
    "qwen2": lambda: Qwen2Config(**COMMON),
    # The window is shorter than the prompt, and a step's tree straddles its edge all the time.
    "mistral_window": lambda: MistralConfig(**COMMON, sliding_window=16),
    "gemma2": lambda: Gemma2Config(
        **COMMON,
        head_dim=16,
        sliding_window=16,
        query_pre_attn_scalar=16,
        final_logit_softcapping=8.0,
    ),
    # Keys and values of unlike widths, and experts.
    "deepseek_v3": lambda: DeepseekV3Config(
        **COMMON | {"num_key_value_heads": 4},
        q_lora_rank=32,
        kv_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=12,
        v_head_dim=16,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        moe_intermediate_size=32,
    ),
    # Chunks of 16 tokens in some layers, whole attention without positions in others.
    "llama4": lambda: Llama4TextConfig(
        **COMMON,
        head_dim=16,
        intermediate_size_mlp=96,
        num_local_experts=2,
        attention_chunk_size=16,
        no_rope_layers=[1, 0, 1],
        use_qk_norm=True,
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB,
        n_embd=64,
        n_layer=3,
        n_head=4,
        n_positions=256,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    ),
}


@pytest.fixture(scope="module", params=sorted(ARCHITECTURES))
def model(request: pytest.FixtureRequest) -> Any:
    """A tiny random model whose greedy text is varied: matrices of standard deviation 0.15."""
    config = ARCHITECTURES[request.param]()
    made: Any = AutoModelForCausalLM.from_config(config).float().eval()
    # By the seed 0 one of its routers decides by 5e-7: a GPU's rounding took another expert.
    seed = 3 if request.param == "deepseek_v3" else 0
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    made.generation_config.pad_token_id = 0
    return made.to(DEVICE)


def prompts(batch: int) -> dict[str, Tensor]:
    """Random prompts, the second and later rows padded on the left."""
    ids_BT = torch.randint(1, VOCAB, (batch, PROMPT), generator=torch.Generator().manual_seed(1))
    mask_BT = torch.ones_like(ids_BT)
    for row in range(batch):
        mask_BT[row, : (row * 5) % PROMPT] = 0
    return {"input_ids": (ids_BT * mask_BT).to(DEVICE), "attention_mask": mask_BT.to(DEVICE)}


def decode_planted(
    model: Any,
    reference_BT: Tensor,
    inputs: dict[str, Tensor],
    drafter_class: type[PlantedDrafter],
    **options: Any,
) -> tuple[Tensor, GenerationStats]:
    drafter = drafter_class(reference_BT[:, PROMPT:].tolist(), VOCAB)
    stats = GenerationStats()
    custom = decoding(TargetModel(model), drafter, rng="transformers", stats=stats)
    torch.manual_seed(7)
    got_BT = model.generate(**inputs, max_new_tokens=NEW, custom_generate=custom, **options)
    return got_BT, stats


def plain(model: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    torch.manual_seed(7)
    expected_BT: Tensor = reference(model, **inputs, max_new_tokens=NEW, **options)
    return expected_BT


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "penalties": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 0},
    "warped": {"do_sample": True, "temperature": 1.3, "top_p": 0.9, "top_k": 50},
    "ends": {"do_sample": False, "eos_token_id": list(range(3, 9))},
}


ALIKE = ("qwen2",)  # layers of llama, with biases


def assert_accepted(stats: GenerationStats) -> None:
    """Drafts were really accepted, so masks and compaction were really used."""
    assert stats.tokens < 10 or stats.tokens_per_step > 1.3


@pytest.mark.parametrize(
    ("model", "options"),
    alternately(sorted(ARCHITECTURES), OPTIONS, slow=ALIKE),
    indirect=["model"],
)
def test_equal_to_generate(model: Any, options: str) -> None:
    given, inputs = OPTIONS[options], prompts(1)
    expected_BT = plain(model, inputs, **given)
    got_BT, stats = decode_planted(model, expected_BT, inputs, PlantedDrafter, **given)
    assert torch.equal(got_BT, expected_BT)
    assert stats.tokens == expected_BT.shape[1] - PROMPT
    assert_accepted(stats)


@pytest.mark.parametrize(
    ("model", "options"),
    alternately(sorted(ARCHITECTURES), ("greedy", "penalties", "ends"), slow=("llama", *ALIKE)),
    indirect=["model"],
)
def test_ragged_batch_equal_to_generate(model: Any, options: str) -> None:
    """Rows of unequal padding, acceptance and end; each equal to its row of generate()."""
    given, inputs = OPTIONS[options], prompts(4)
    expected_BT = plain(model, inputs, **given)
    got_BT, stats = decode_planted(model, expected_BT, inputs, PlantedDrafter, **given)
    assert torch.equal(got_BT, expected_BT)
    assert_accepted(stats)


@pytest.mark.parametrize(
    ("model", "batch"),
    alternately(sorted(ARCHITECTURES), (1, 4), slow=("deepseek_v3", "gpt2", *ALIKE)),
    indirect=["model"],
)
def test_equal_to_generate_where_the_device_runs_ahead(
    model: Any, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{SampleThenMatch.__module__}._runs_ahead", lambda device: True)
    monkeypatch.delattr(SampleThenMatch, "_draw")
    inputs = prompts(batch)
    expected_BT = plain(model, inputs, **OPTIONS["ends"])
    got_BT, stats = decode_planted(model, expected_BT, inputs, PlantedDrafter, **OPTIONS["ends"])
    assert torch.equal(got_BT, expected_BT)
    assert_accepted(stats)


@pytest.mark.parametrize(
    "model",
    with_slow(["deepseek_v3", "llama", "mistral_window"], ["gemma2", "gpt2", "llama4", "qwen2"]),
    indirect=True,
)
def test_plain_causal_mask_is_caught(model: Any) -> None:
    """Negative control: siblings that see each other must change the output."""
    inputs = prompts(1)
    expected_BT = plain(model, inputs, do_sample=False)
    got_BT, _ = decode_planted(model, expected_BT, inputs, PlainCausalDrafter, do_sample=False)
    assert not torch.equal(got_BT, expected_BT)
