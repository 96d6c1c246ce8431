"""Hydra's heads: those of one architecture are held exactly, others are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from medusa_heads import HeadsConfig, HydraHeads, TargetModel
from medusa_heads.checkpoint.checkpoint import load_heads
from medusa_heads.checkpoint.stored_heads import read_stored
from medusa_heads.interop.convert import convert_heads
from tests.interop import layouts
from tests.interop.conftest import Decodes
from tests.interop.layouts import hydra_tensors


def their_logits(
    tensors: dict[str, Tensor], head: int, hidden_RD: Tensor, embedded_RX: Tensor
) -> Tensor:
    """What such a head computes, written out: two blocks, the first of them wide."""
    x_RW = torch.cat([hidden_RD, embedded_RX], dim=-1)

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])

    first, second = f"hydra_mlp.{head}.0", f"hydra_mlp.{head}.1"
    x_RD = linear(f"{first}.res_connection", x_RW) + F.silu(linear(f"{first}.linear", x_RW))
    x_RD = x_RD + F.silu(linear(f"{second}.linear", x_RD))
    return linear(f"hydra_lm_head.{head}", x_RD)


def test_grounded_heads_say_what_theirs_say(tmp_path: Path, target: Path, decodes: Decodes) -> None:
    theirs = hydra_tensors(3, 2, grounded=True)
    source = layouts.hydra(tmp_path / "hydra", theirs, hydra_num_layers=2, grounded_heads=True)
    converted = convert_heads(source, tmp_path / "out", target=str(target))
    assert converted.format == "hydra" and converted.notices == ()
    ours = read_stored(tmp_path / "out").tensors
    assert len(ours) == len(theirs)
    for i in range(3):
        assert torch.equal(
            ours[f"{i}.0.res_connection.bias"], theirs[f"hydra_mlp.{i}.0.res_connection.bias"]
        )
        assert torch.equal(ours[f"{i}.1.linear.weight"], theirs[f"hydra_mlp.{i}.1.linear.weight"])
        assert torch.equal(ours[f"{i}.2.bias"], theirs[f"hydra_lm_head.{i}.bias"])

    model = TargetModel.from_pretrained(str(target))
    heads = load_heads(tmp_path / "out", model).heads
    hidden_RD = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    tokens_RK = torch.arange(15).view(5, 3)
    logits_RKV = heads(hidden_RD, tokens_RK)
    embedded_RKD = model.get_input_embeddings()(tokens_RK)
    for i in range(3):
        expected_RV = their_logits(theirs, i, hidden_RD, embedded_RKD[:, : i + 1].flatten(-2))
        torch.testing.assert_close(logits_RKV[:, i], expected_RV)
    decodes(converted.folder)


def test_places_behind_dropout_are_counted_without_it(tmp_path: Path) -> None:
    theirs = hydra_tensors(3, 2, grounded=True)
    convert_heads(layouts.hydra(tmp_path / "a", theirs, hydra_num_layers=2), tmp_path / "whole")
    moved = {}
    for name, tensor in theirs.items():
        module, head, *rest = name.split(".")
        place = ["1"] if module == "hydra_lm_head" else [str(2 * int(rest.pop(0)) + 1)]
        moved[".".join([module, head, *place, *rest])] = tensor
    assert "hydra_mlp.0.3.linear.weight" in moved and "hydra_lm_head.2.1.bias" in moved
    convert_heads(layouts.hydra(tmp_path / "b", moved, hydra_num_layers=2), tmp_path / "out")
    layouts.assert_same_bits(
        read_stored(tmp_path / "out").tensors, read_stored(tmp_path / "whole").tensors
    )


def test_ungrounded_heads_are_medusas_with_a_bias(
    tmp_path: Path, target: Path, decodes: Decodes
) -> None:
    theirs = hydra_tensors(2, 1, grounded=False)
    source = layouts.hydra(tmp_path / "hydra", theirs, grounded_heads=False)
    converted = convert_heads(source, tmp_path / "out", target=str(target))
    assert converted.stored.config.kind == "medusa"
    # Engines would load such heads without the bias, and say nothing.
    assert "medusa" not in (tmp_path / "out" / "config.json").read_text()
    model = TargetModel.from_pretrained(str(target))
    heads = load_heads(tmp_path / "out", model).heads
    hidden_RD = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    for i in range(2):
        x_RD = hidden_RD + F.silu(
            F.linear(
                hidden_RD,
                theirs[f"hydra_mlp.{i}.0.linear.weight"],
                theirs[f"hydra_mlp.{i}.0.linear.bias"],
            )
        )
        expected_RV = F.linear(
            x_RD, theirs[f"hydra_lm_head.{i}.weight"], theirs[f"hydra_lm_head.{i}.bias"]
        )
        torch.testing.assert_close(heads(hidden_RD)[:, i], expected_RV)
    decodes(converted.folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hydra_head_arch": "prefix-mlp"}, "'prefix-mlp' .a decoder layer"),
        ({"hydra_head_arch": "eagle-attn"}, "'eagle-attn' .an EAGLE layer"),
        ({"hidden_state_offset": 4}, "layer -4 of the target"),
        ({"hydra_num_heads": 9}, "hydra_num_heads: 9, but the weights hold 2"),
    ],
    ids=str,
)
def test_what_differs_is_named(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    source = layouts.hydra(tmp_path / "hydra", hydra_tensors(2, 1, grounded=True), **config)
    with pytest.raises(ValueError, match=message):
        convert_heads(source, tmp_path / "out")


def test_a_prefix_layer_of_which_the_config_says_nothing(tmp_path: Path) -> None:
    tensors = hydra_tensors(2, 1, grounded=True)
    tensors["prefix_embeding_layer.layers.0.mlp.up_proj.weight"] = torch.zeros(64, 64)
    source = layouts.hydra(tmp_path / "hydra", tensors)
    with pytest.raises(ValueError, match=r"up_proj.weight is no tensor of Hydra's 'mlp'"):
        convert_heads(source, tmp_path / "out")


def test_raw_embeddings_are_the_targets(target: Path) -> None:
    model = TargetModel.from_pretrained(str(target))
    tokens = torch.arange(10)
    heads = HydraHeads.from_target(model, HeadsConfig(kind="hydra", raw_embeddings=True))
    assert torch.equal(heads.embed(tokens), model.get_input_embeddings()(tokens))
    scaled = HydraHeads.from_target(model, HeadsConfig(kind="hydra"))
    assert not torch.equal(scaled.embed(tokens), heads.embed(tokens))
