"""vLLM's layout where it says too little, or two things at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa_heads.interop.convert import convert_heads
from tests.interop import layouts
from tests.interop.layouts import D, V, native_tensors
from tests.interop.test_refusals import refused


@pytest.mark.parametrize(
    ("token_map", "message"),
    [
        ([3, 3, 7], "different token ids"),
        ([3, 7, 199], "from 0 to 198"),
        ([-1, 3, 7], "from 0 to 198"),
    ],
    ids=str,
)
def test_token_maps_that_name_no_tokens(tmp_path: Path, token_map: list[int], message: str) -> None:
    matrix_VD = layouts.values(3, D, seed=1)
    source = layouts.vllm(
        tmp_path / "source",
        native_tensors(2, own=False),
        matrix_VD=matrix_VD,
        token_map=torch.tensor(token_map),
    )
    assert message in refused(source, tmp_path)


def test_vllms_config_without_its_matrices(tmp_path: Path) -> None:
    heads = native_tensors(2, own=False)
    source = layouts.vllm(tmp_path / "a", heads)
    assert "holds no lm_heads" in refused(source, tmp_path)
    source = layouts.vllm(tmp_path / "b", heads, original_lm_head=True)
    assert "got no matrix" in refused(source, tmp_path)


@pytest.mark.parametrize("twice", ["blocks.0.layers.0.bias", "lm_heads.0.weight"])
def test_a_place_taken_twice(tmp_path: Path, twice: str) -> None:
    source = layouts.vllm(
        tmp_path / "source",
        native_tensors(2, own=False),
        matrix_VD=layouts.values(V, D, seed=1),
        prefix="medusa_heads.",
    )
    tensors = load_file(source / "model.safetensors")
    tensors[twice] = tensors[f"medusa_heads.{twice}".replace("lm_heads.0", "lm_head")] + 1
    save_file(tensors, source / "model.safetensors")
    assert "stands where another tensor does" in refused(source, tmp_path)


def test_vllms_silent_loss_of_biases_is_told(tmp_path: Path) -> None:
    source = layouts.vllm(tmp_path / "source", native_tensors(2), medusa_fc_bias=False)
    converted = convert_heads(source, tmp_path / "out")
    assert any("medusa_fc_bias" in notice for notice in converted.notices)
    assert torch.equal(converted.stored.tensors["0.0.linear.bias"], layouts.values(D, seed=1))
