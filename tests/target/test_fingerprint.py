"""Hashes read all of what they are of, in however many parts; part sizes change none of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from medusa_heads.heads.vocabulary import vocabulary
from medusa_heads.target.fingerprint import (
    file_sha256,
    lm_head_sha256,
    weights_sha256,
    weights_sums,
)

ROWS, WIDTH = 23, 8


@pytest.fixture(params=[1, WIDTH, 5 * WIDTH, 10**6], ids="{} at once".format)
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a number at a time to all at once; the last part is seldom full."""
    monkeypatch.setattr("medusa_heads.target.fingerprint._NUMBERS_AT_ONCE", request.param)
    monkeypatch.setattr("medusa_heads.target.fingerprint._BYTES_AT_ONCE", request.param)


def matrix() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


def one_of_each_part_changed(tensor: Tensor) -> list[Tensor]:
    """The tensor with its first number changed, one in the middle, and its last."""
    changed = []
    for place in (0, tensor.numel() // 2, tensor.numel() - 1):
        copy = tensor.clone()
        copy.view(-1)[place] += 1
        changed.append(copy)
    return changed


def of_module(weight: Tensor) -> str:
    module = nn.Linear(WIDTH, ROWS, bias=False)
    module.weight = nn.Parameter(weight)
    return weights_sha256(module)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("sha256", [lm_head_sha256, of_module])
def test_every_part_of_a_tensor_counts(sha256: Callable[[Tensor], str]) -> None:
    whole = matrix()
    hashes = {sha256(tensor) for tensor in [whole, *one_of_each_part_changed(whole)]}
    assert len(hashes) == 4
    assert sha256(whole.clone()) in hashes


@pytest.mark.usefixtures("parts")
def test_a_tensors_hash_is_that_of_its_bytes() -> None:
    whole = matrix()
    rounded = whole.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert lm_head_sha256(whole) == hashlib.sha256(rounded).hexdigest()
    assert of_module(whole) == hashlib.sha256(b"weight" + whole.numpy().tobytes()).hexdigest()
    left_to_another = weights_sha256(nn.Linear(2, 2), gather_only=True)
    assert left_to_another == hashlib.sha256().hexdigest()


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("size", [0, 1, WIDTH, 5 * WIDTH, 5 * WIDTH + 1, 1000])
def test_a_files_hash_is_that_of_its_bytes(tmp_path: Path, size: int) -> None:
    data = bytes(i % 251 for i in range(size))
    (tmp_path / "file").write_bytes(data)
    assert file_sha256(tmp_path / "file") == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_sums_notice_any_bit_of_any_tensor(dtype: torch.dtype) -> None:
    """Odd lengths and places in memory too."""
    model = nn.Module()
    whole = (torch.arange(23) * 5).to(dtype)
    model.register_buffer("some", whole[3:20])
    model.register_buffer("scalar", whole[21])
    before = weights_sums(model)
    for place in (3, 10, 19, 21):
        bits = whole.view(torch.uint8)[place * dtype.itemsize :]
        bits[0] ^= 1
        assert weights_sums(model) != before
        bits[0] ^= 1
    whole[0] += 1
    assert weights_sums(model) == before


def test_a_quantised_matrix_is_known_by_its_parts() -> None:
    """As torchao keeps them; TwoTensor is torch's own example of such a tensor."""
    layer = nn.Linear(WIDTH, ROWS, bias=False)
    layer.weight = nn.Parameter(TwoTensor(matrix(), matrix()), requires_grad=False)
    before = weights_sha256(layer), weights_sums(layer)
    for part in ("a", "b"):
        getattr(layer.weight, part)[3, 4] += 1
        assert weights_sha256(layer) != before[0] and weights_sums(layer) != before[1]
        getattr(layer.weight, part)[3, 4] = matrix()[3, 4]
    assert (weights_sha256(layer), weights_sums(layer)) == before
    assert lm_head_sha256(layer.weight) is None
    with pytest.raises(ValueError, match="must have an unquantised lm_head"):
        vocabulary(SimpleNamespace(get_output_embeddings=lambda: layer))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_matrix_in_8_bits_is_quantised(dtype: torch.dtype) -> None:
    weight_VD = matrix().to(dtype)
    assert lm_head_sha256(weight_VD) is None
    lm_head = SimpleNamespace(weight=weight_VD)
    with pytest.raises(ValueError, match="must have an unquantised lm_head"):
        vocabulary(SimpleNamespace(get_output_embeddings=lambda: lm_head))


def test_sums_do_not_depend_on_where_a_tensor_lies() -> None:
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(torch.randn(17)[1:].view(4, 4))
    before = weights_sums(layer)
    layer.weight = nn.Parameter(layer.weight.detach().clone())
    assert weights_sums(layer) == before
