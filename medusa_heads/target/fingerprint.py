"""Hashes by which weights are recognised. Shapes: D hidden, V vocabulary."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from medusa_heads.heads.vocabulary import is_plain

# Tensors and files are read in parts, so that a large one is never held twice, nor copied whole
# from a GPU.
_NUMBERS_AT_ONCE = 1 << 25
_BYTES_AT_ONCE = 1 << 26


def lm_head_sha256(weight_VD: Tensor) -> str | None:
    """sha256 of a vocabulary matrix, rounded to bf16, so that it does not depend on whether the
    target is loaded in float32 or bf16. None in float16, which keeps too little of small numbers,
    and of a quantised one: there a target is known by its sizes alone."""
    if weight_VD.dtype == torch.float16 or not is_plain(weight_VD):
        return None
    digest = hashlib.sha256()
    rows_at_once = max(1, _NUMBERS_AT_ONCE // max(1, weight_VD.shape[1]))
    for part_RD in weight_VD.detach().split(rows_at_once):
        _hash_tensor(digest, part_RD.to(torch.bfloat16))
    return digest.hexdigest()


def weights_sha256(
    model: nn.Module, *, with_adapter: bool = True, gather_only: bool = False
) -> str:
    """sha256 over every weight and buffer, bit for bit; without the adapter, that of the model
    before a LoRA adapter was put into it. Tensors that processes share all of them must gather; one
    that leaves the hash to another does no more, and gets that of nothing."""
    digest = hashlib.sha256()
    for name, tensor in _weights(model, with_adapter):
        if isinstance(tensor, Tensor) and (gather := getattr(tensor, "full_tensor", None)):
            tensor = gather()
        if gather_only:
            continue
        digest.update(name.encode())
        if isinstance(tensor, Tensor):
            _hash_tensor(digest, tensor.detach())
    return digest.hexdigest()


def weights_sums(model: nn.Module, *, with_adapter: bool = True) -> dict[str, list[int]]:
    """Sums over all weights and buffers of this process, a shared one by its part of it, to see
    that none has changed: on their device, and so in a small part of a hash's time."""
    sums = {}
    for name, tensor in _weights(model, with_adapter):
        if isinstance(tensor, Tensor):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            content = local.detach().contiguous().view(-1).view(torch.uint8)
            if content.storage_offset() % 8:  # the same sums, wherever a tensor lies
                content = content.clone()
            body = content[: len(content) - len(content) % 8].view(torch.int64)
            parts = [part.sum(dtype=torch.int64) for part in body.split(_NUMBERS_AT_ONCE)]
            parts.append(content[len(content) - len(content) % 8 :].sum(dtype=torch.int64))
            sums[name] = torch.stack(parts).tolist()
    return sums


def file_sha256(path: str | os.PathLike[str]) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(_BYTES_AT_ONCE):
            digest.update(part)
    return digest.hexdigest()


def _hash_tensor(digest: hashlib._Hash, tensor: Tensor) -> None:
    for part in tensor.contiguous().view(-1).view(torch.uint8).split(_BYTES_AT_ONCE):
        digest.update(part.cpu().numpy().tobytes())


def _weights(model: nn.Module, with_adapter: bool) -> list[tuple[str, Any]]:
    """By name, in its order."""
    state = model.state_dict()
    if any(isinstance(value, Tensor) and value.is_meta for value in state.values()):
        from accelerate.utils.modeling import get_state_dict_offloaded_model

        state = get_state_dict_offloaded_model(model)
    if not with_adapter:
        state = {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in state.items()
            if ".lora_" not in name
        }
    return sorted(part for item in state.items() for part in _parts(*item))


def _parts(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    """The tensors that a quantised one of torchao's or quanto's consists of; others are whole."""
    if not hasattr(tensor, "__tensor_flatten__") or hasattr(tensor, "full_tensor"):
        yield name, tensor
        return
    for part in tensor.__tensor_flatten__()[0]:
        yield from _parts(f"{name}.{part}", getattr(tensor, part))
