"""Medusa heads: the offset convention, fresh heads, sharing, and what the state dict holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from medusa_heads.config import HeadsConfig, HeadsKind, head_offset
from medusa_heads.heads import MedusaHeads
from medusa_heads.target.target import TargetModel
from tests.conftest import TinyLlama

LAYERS = [(1, False), (3, False), (1, True), (3, True)]


@pytest.mark.parametrize("vocab_matrix", ["shared", "own"])
@pytest.mark.parametrize(("num_layers", "linear_shortcut"), LAYERS)
def test_fresh_heads_predict_what_the_target_does(
    tiny_llama: TinyLlama, vocab_matrix: Any, num_layers: int, linear_shortcut: bool
) -> None:
    target = TargetModel(tiny_llama())
    config = HeadsConfig(
        num_heads=3,
        num_layers=num_layers,
        vocab_matrix=vocab_matrix,
        linear_shortcut=linear_shortcut,
    )
    heads = MedusaHeads.from_target(target, config)
    ids_BT = torch.arange(24).view(2, 12)
    logits_BTV = target.model(ids_BT).logits
    logits_BTKV = heads(target.hidden(ids_BT))
    assert logits_BTKV.shape == (2, 12, 3, 199)
    torch.testing.assert_close(logits_BTKV, logits_BTV[:, :, None].expand_as(logits_BTKV))


def test_no_two_blocks_are_the_same_module(tiny_llama: TinyLlama) -> None:
    heads = MedusaHeads.from_target(tiny_llama(), HeadsConfig(num_heads=3, num_layers=2))
    weights = [p.data_ptr() for name, p in heads.named_parameters() if name.endswith("weight")]
    assert len(weights) == len(set(weights)) == 6


def test_offset_convention_with_hand_made_heads(tiny_llama: TinyLlama) -> None:
    """From one-hot hidden states, head i is made to name the token i + 2 further along a line."""
    assert [head_offset(i) for i in range(3)] == [2, 3, 4]
    model = tiny_llama(vocab_size=64, hidden_size=64)
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.eye(64))
    heads = MedusaHeads.from_target(model, HeadsConfig(num_heads=3, vocab_matrix="own"))
    for i in range(3):
        shift = torch.eye(64).roll(head_offset(i), dims=0)  # token v -> token v + offset
        with torch.no_grad():
            heads.get_parameter(f"{i}.1.weight").copy_(shift)
    line_TD = torch.eye(64)[10:20]  # h_t names the token 10 + t at position t
    predicted_TK = heads(line_TD).argmax(-1)
    assert predicted_TK.tolist() == [[t + 2, t + 3, t + 4] for t in range(10, 20)]


def test_state_dict_holds_nothing_of_the_target(tiny_llama: TinyLlama) -> None:
    shared = MedusaHeads.from_target(tiny_llama(), HeadsConfig(num_heads=2, num_layers=2))
    assert sorted(shared.state_dict()) == [
        f"{i}.{layer}.linear.{part}"
        for i in (0, 1)
        for layer in (0, 1)
        for part in ("bias", "weight")
    ]
    config = HeadsConfig(num_heads=1, num_layers=2, linear_shortcut=True)
    assert sorted(MedusaHeads.from_target(tiny_llama(), config).state_dict()) == [
        f"0.{layer}.{part}.{kind}"
        for layer, part in ((0, "linear"), (0, "res_connection"), (1, "linear"))
        for kind in ("bias", "weight")
    ]
    own = MedusaHeads.from_target(tiny_llama(), HeadsConfig(num_heads=2, vocab_matrix="own"))
    assert {"0.1.weight", "1.1.weight"} <= set(own.state_dict())
    assert own.get_parameter("0.1.weight").requires_grad


def test_unshared_heads_say_so(tiny_llama: TinyLlama) -> None:
    heads = MedusaHeads(HeadsConfig(hidden_size=64, vocab_size=199))
    with pytest.raises(ValueError, match=r"call heads\.share"):
        heads(torch.zeros(1, 64))
    with pytest.raises(ValueError, match="hidden_size 64, but this target's is 32"):
        heads.share(tiny_llama(hidden_size=32))


@pytest.mark.parametrize(
    "values",
    [{"num_heads": 0}, {"num_layers": 0}, {"num_heads": 1.5}, {"vocab_matrix": "both"}],
)
def test_bad_config_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        HeadsConfig(**values)  # type: ignore[arg-type]


def test_a_linear_shortcut_is_for_medusa_heads() -> None:
    """Hydra's have one by themselves: that kind may replace a recipe's."""
    sequential = HeadsConfig(kind="hydra", num_heads=2)
    assert HeadsConfig(kind="hydra", num_heads=2, linear_shortcut=True) == sequential
    kinds: tuple[HeadsKind, ...] = ("block", "eagle3")
    for kind in kinds:
        with pytest.raises(ValueError, match="leave linear_shortcut out"):
            HeadsConfig(kind=kind, linear_shortcut=True)


def test_config_round_trip_and_unknown_keys() -> None:
    config = HeadsConfig(num_heads=3, vocab_matrix="own", hidden_size=8, vocab_size=9)
    assert HeadsConfig.from_dict(config.to_dict()) == config
    shortcut = replace(config, linear_shortcut=True)
    assert HeadsConfig.from_dict(shortcut.to_dict()) == shortcut
    assert "linear_shortcut" not in config.to_dict()  # which earlier versions do not know
    with pytest.raises(ValueError, match="unknown heads configuration keys"):
        HeadsConfig.from_dict({"num_head": 3})


@pytest.mark.parametrize(("num_layers", "linear_shortcut"), LAYERS)
def test_all_heads_at_once_equal_head_by_head(
    tiny_llama: TinyLlama, num_layers: int, linear_shortcut: bool
) -> None:
    config = HeadsConfig(num_heads=3, num_layers=num_layers, linear_shortcut=linear_shortcut)
    heads = MedusaHeads.from_target(tiny_llama(), config)
    hidden_RD = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    for seed in (1, 2):  # the second time with weights written to in place
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            at_once = heads.features(hidden_RD)
        torch.testing.assert_close(at_once, heads.features(hidden_RD).detach())
