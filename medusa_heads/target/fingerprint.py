"""Hashes by which weights are recognised. Shapes: D hidden, V vocabulary."""

from __future__ import annotations

import hashlib
import os

import torch
from torch import Tensor, nn

# Tensors and files are read in parts, so that a large one is never held twice, nor copied whole
# from a GPU.
_NUMBERS_AT_ONCE = 1 << 25
_BYTES_AT_ONCE = 1 << 26


def lm_head_sha256(weight_VD: Tensor) -> str:
    """sha256 of a vocabulary matrix, rounded to bf16, so that it does not depend on the dtype the
    target happens to be loaded in."""
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
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        if isinstance(tensor, Tensor) and (gather := getattr(tensor, "full_tensor", None)):
            tensor = gather()
        if gather_only:
            continue
        digest.update(name.encode())
        if isinstance(tensor, Tensor):
            _hash_tensor(digest, tensor.detach())
    return digest.hexdigest()


def file_sha256(path: str | os.PathLike[str]) -> str:
    """sha256 of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(_BYTES_AT_ONCE):
            digest.update(part)
    return digest.hexdigest()


def _hash_tensor(digest: hashlib._Hash, tensor: Tensor) -> None:
    for part in tensor.contiguous().view(-1).view(torch.uint8).split(_BYTES_AT_ONCE):
        digest.update(part.cpu().numpy().tobytes())
