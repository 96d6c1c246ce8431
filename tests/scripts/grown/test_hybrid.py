"""Grown hybrids: other shapes, the same logits, with states and in one go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from medusa_heads import HeadsConfig, TargetModel
from medusa_heads.cache_names import cache_argument, cache_of
from medusa_heads.checkpoint.checkpoint import load_heads, save_heads
from medusa_heads.heads import new_heads
from scripts.grown.hybrid import grow_hybrid
from scripts.grown.model import grow, load_small
from scripts.grown.shape import Shape
from tests.pairs import with_slow
from tests.scripts.grown.test_target import spread_out

ROUNDING = (
    3e-4  # of fp32 sums in another order, which run on in the states, over the logits' spread
)
IDS_BT = torch.randint(199, (2, 70), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def small() -> Any:
    """Two gated delta layers and one of attention, every weight of them in use."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=199,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = Qwen3_5ForCausalLM(config).eval()
    spread_out(model)
    return model


def shaped(model: Any, **sizes: int) -> Shape:
    return Shape.of(model.config).with_sizes(sizes)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"hidden_size": 96}, id="width"),
        pytest.param({"num_hidden_layers": 7}, id="layers"),
        pytest.param({"num_attention_heads": 8, "num_key_value_heads": 8}, id="heads"),
        pytest.param(
            {
                "hidden_size": 144,
                "intermediate_size": 200,
                "num_hidden_layers": 6,
                "num_attention_heads": 12,
                "num_key_value_heads": 6,
                "vocab_size": 400,
            },
            id="all, but for the vocabulary",
        ),
    ],
)
def test_logits_stay(small: Any, sizes: dict[str, int]) -> None:
    shape = shaped(small, **sizes)
    grown, _ = grow_hybrid(small, shape, dtype=torch.float32)
    assert Shape.of(grown.config) == shape.with_sizes({"vocab_size": 199})
    with torch.no_grad():
        before, after = small(IDS_BT).logits, grown(IDS_BT).logits
        given = {cache_argument(grown.forward): cache_of(grown(IDS_BT[:, :50]))}
        late = grown(IDS_BT[:, 50:], **given).logits
    spread = float(before.std())
    assert float((after - before).abs().max()) < ROUNDING * spread
    assert float((late - before[:, 50:]).abs().max()) < ROUNDING * spread
    with torch.no_grad():  # the control: every real weight counts, where it lies
        for name, parameter in grown.named_parameters():
            if parameter.ndim == 2 and "lm_head" not in name:
                parameter.copy_(parameter.roll(1, dims=0))
        moved = grown(IDS_BT).logits
    assert float((moved - before).abs().max()) > 0.1 * spread


@pytest.mark.parametrize("kind", with_slow(["prefix"], ["medusa", "hydra"]))
def test_heads_grow_with_it(small: Any, kind: str, tmp_path: Path) -> None:
    small.save_pretrained(tmp_path / "small")
    config = HeadsConfig(
        kind="medusa" if kind == "medusa" else "hydra",
        num_heads=2,
        prefix_attention=kind == "prefix",
    )
    target = load_small(str(tmp_path / "small"))
    heads = new_heads(target, config)
    spread_out(heads)
    save_heads(tmp_path / "heads", heads, target)
    grown = grow(
        load_small(str(tmp_path / "small")),
        str(tmp_path / "heads"),
        shaped(small, hidden_size=128, num_attention_heads=8, num_key_value_heads=4),
        dtype=torch.float32,
    )
    assert load_heads(tmp_path / "heads", target).stored.config.num_heads == 2
    for difference, spread in grown.differences().values():
        assert difference < ROUNDING * spread


def test_what_cannot_grow_is_one_sentence(small: Any) -> None:
    target = TargetModel(small)
    with pytest.raises(ValueError, match="as wide as they were: 16"):
        grow(target, None, shaped(small, head_dim=32), dtype=torch.float32)
    with pytest.raises(ValueError, match="only a Llama is given a random basis"):
        grow(target, None, shaped(small, hidden_size=128), dtype=torch.float32, rotation=1)
