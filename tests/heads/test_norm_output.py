"""norm_output: what later steps read stands behind the last norm, wherever they are asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_heads.config import HeadsConfig
from medusa_heads.decoder_shape import DecoderShape
from medusa_heads.heads import Eagle3Heads
from tests.conftest import TinyLlama
from tests.heads import written_out
from tests.heads.test_eagle3 import GROUPED, eagle3, text

USUAL = DecoderShape.of_width(64)
SHAPES = {"usual": USUAL, "grouped": GROUPED, "raw": replace(USUAL, norm_before_residual=False)}


def chains(heads: Eagle3Heads, shape: DecoderShape, *, norm_output: bool) -> Tensor:
    """Of the first seven positions of a text, [T, K, D]."""
    hidden_BTD, ids_BT = text()
    tensors = {name.removeprefix("decoder."): of for name, of in heads.state_dict().items()}
    embedded_TD = heads.embed(ids_BT[0, 1:])
    return torch.stack(
        [
            written_out.chain(
                tensors, shape, hidden_BTD[0, :end], embedded_TD, 3, norm_output=norm_output
            )
            for end in range(1, 8)
        ]
    )


@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_chains_are_those_written_out(tiny_llama: TinyLlama, name: str, norm_output: bool) -> None:
    shape = replace(SHAPES[name], norm_output=norm_output)
    heads = eagle3(tiny_llama(), decoder=shape)
    heads.decoder.norm.weight.mul_(3.0)  # else what came out is about as large behind the norm
    hidden_BTD, ids_BT = text()
    got_TKD = heads.features(heads.encode(hidden_BTD, ids_BT))[0, :7]
    expected_TKD = chains(heads, shape, norm_output=norm_output)
    torch.testing.assert_close(got_TKD, expected_TKD, atol=1e-4, rtol=1e-4)
    other_TKD = chains(heads, shape, norm_output=not norm_output)
    differs_K = ((got_TKD - other_TKD).abs() > 1e-2).any(-1).all(0)
    assert differs_K.tolist() == [False, True, True]  # the first step is one and the same


@torch.no_grad()
def test_what_is_fed_back_does_not_grow(tiny_llama: TinyLlama) -> None:
    """Its size is that of the last norm, whatever the layer adds."""
    heads = eagle3(tiny_llama(), decoder=replace(USUAL, norm_output=True))
    heads.decoder.midlayer.mlp.down_proj.weight.mul_(100.0)
    hidden_BTD, ids_BT = text()
    encoded_BTKD = heads.features(heads.encode(hidden_BTD, ids_BT))
    unit_BTKD = encoded_BTKD / heads.decoder.norm.weight
    size_BTK = unit_BTKD.square().mean(-1).sqrt()
    torch.testing.assert_close(size_BTK, torch.ones_like(size_BTK), atol=1e-3, rtol=0.0)


def test_parameters_are_the_same(tiny_llama: TinyLlama) -> None:
    with_it, without = (
        eagle3(tiny_llama(), decoder=replace(USUAL, norm_output=each)).state_dict()
        for each in (True, False)
    )
    assert list(with_it) == list(without)


def test_layers_that_say_nothing_of_it_have_none() -> None:
    """Checkpoints of earlier versions say nothing, and these read ours where it is not used."""
    config = HeadsConfig(kind="eagle3", decoder=GROUPED)
    written: dict[str, Any] = config.to_dict()
    assert "norm_output" not in written["decoder"]
    assert HeadsConfig.from_dict(written) == config
    config = replace(config, decoder=replace(GROUPED, norm_output=True))
    assert config.to_dict()["decoder"]["norm_output"] is True
    assert HeadsConfig.from_dict(config.to_dict()) == config
