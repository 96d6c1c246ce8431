"""Heads that draft only some of the target's tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from medusa_heads.config import IGNORED, HeadsConfig
from medusa_heads.heads import frequent_tokens, new_heads
from tests.conftest import TinyLlama

TOKENS = torch.tensor([150, 3, 42, 7])


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize("vocab_matrix", ["shared", "own"])
def test_logits_are_those_of_the_chosen_tokens(
    tiny_llama: TinyLlama, kind: str, vocab_matrix: str
) -> None:
    config = HeadsConfig(kind=kind, num_heads=2, vocab_matrix=vocab_matrix)  # type: ignore[arg-type]
    whole = new_heads(tiny_llama(), config)
    reduced = new_heads(
        tiny_llama(),
        HeadsConfig(kind=kind, num_heads=2, vocab_matrix=vocab_matrix, draft_vocab_size=4),  # type: ignore[arg-type]
        TOKENS,
    )
    hidden_RD = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    tokens_RK = torch.tensor([[1, 2], [3, 4], [5, 6]])
    assert reduced.draft_tokens is not None
    assert reduced.draft_tokens.tolist() == [3, 7, 42, 150]
    expected_RKV = whole(hidden_RD, tokens_RK)[..., reduced.draft_tokens]
    torch.testing.assert_close(reduced(hidden_RD, tokens_RK), expected_RKV)


def test_ids_go_there_and_back(tiny_llama: TinyLlama) -> None:
    heads = new_heads(tiny_llama(), HeadsConfig(draft_vocab_size=4), TOKENS)
    tokens_RK = torch.tensor([[3, 150], [0, 7], [198, 42], [IGNORED, 41]])
    ids_RK = heads.draft_ids(tokens_RK)
    assert ids_RK.tolist() == [[0, 3], [IGNORED, 1], [IGNORED, 2], [IGNORED, IGNORED]]
    assert heads.token_ids(torch.tensor([3, 0])).tolist() == [150, 3]


def test_frequent_tokens() -> None:
    counts_V = torch.tensor([5, 0, 9, 5, 7])
    assert frequent_tokens(counts_V, 3).tolist() == [0, 2, 4]
    with pytest.raises(ValueError, match="between 1 and 5, got 6"):
        frequent_tokens(counts_V, 6)


@pytest.mark.parametrize(
    ("size", "tokens", "message"),
    [
        (4, None, "as many draft_tokens"),
        (3, TOKENS, "as many draft_tokens"),
        (None, TOKENS, "needs draft_vocab_size"),
        (4, torch.tensor([1, 1, 2, 3]), "4 different ids from 0 to 198"),
        (2, torch.tensor([1, 199]), "2 different ids from 0 to 198"),
        (200, torch.arange(200), "more than the target's 199 tokens"),
    ],
)
def test_misfits_are_refused(
    tiny_llama: TinyLlama, size: int | None, tokens: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        new_heads(tiny_llama(), HeadsConfig(draft_vocab_size=size), tokens)


@pytest.mark.parametrize("kind", ["hydra", "block"])
def test_embeddings_in_double_precision_are_read(tiny_llama: TinyLlama, kind: Any) -> None:
    single, double = (
        new_heads(tiny_llama().to(dtype), HeadsConfig(kind=kind))
        for dtype in (torch.float32, torch.float64)
    )
    assert double.config == single.config
    scales = double._embedding_scale, single._embedding_scale
    assert scales[0] == pytest.approx(scales[1])


@pytest.mark.parametrize(
    ("module", "name"), [("lm_head", "lm_head"), ("embed_tokens", "token embeddings")]
)
def test_an_adapter_of_a_shared_matrix_is_merged_first(
    tiny_llama: TinyLlama, module: str, name: str
) -> None:
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=[module], init_lora_weights=False)
    adapted, config = get_peft_model(tiny_llama(), lora), HeadsConfig(kind="hydra")
    with pytest.raises(ValueError, match=f"an adapter changes the target's {name}, .* merge it"):
        new_heads(adapted, config)
    with adapted.disable_adapter():
        new_heads(adapted, config)
    adapted.merge_adapter()
    new_heads(adapted, config)
    others = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)
    new_heads(get_peft_model(tiny_llama(), others), config)
