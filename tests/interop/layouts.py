"""Checkpoints of other projects, built key by key from what their layouts say, never by our
exporter. Sizes: D 64 hidden, V 199 vocabulary, as the tiny targets have them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

D, V = 64, 199
BASE = "lmsys/vicuna-7b-v1.3"


def values(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05).to(dtype)


def native_tensors(
    num_heads: int,
    num_layers: int = 1,
    *,
    own: bool = True,
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Planted heads: every tensor different, under FasterDecoding's names."""
    tensors = {}
    for i in range(num_heads):
        for layer in range(num_layers):
            seed = 100 * i + 10 * layer
            tensors[f"{i}.{layer}.linear.weight"] = values(D, D, seed=seed, dtype=dtype)
            if bias:
                tensors[f"{i}.{layer}.linear.bias"] = values(D, seed=seed + 1, dtype=dtype)
        if own:
            tensors[f"{i}.{num_layers}.weight"] = values(V, D, seed=100 * i + 99, dtype=dtype)
    return tensors


def assert_same_bits(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert sorted(got) == sorted(expected)
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
        bits, wanted = (t.contiguous().view(torch.uint8) for t in (got[name], tensor))
        assert torch.equal(bits, wanted), name


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def fasterdecoding_pt(folder: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    """v0.1: a pickled state dict."""
    said = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": BASE}
    write_config(folder, said | config)
    torch.save(dict(tensors), folder / "medusa_lm_head.pt")
    return folder


def fasterdecoding_v2(folder: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    """v2, TGI's and LoRAX's file."""
    said: dict[str, Any] = {"medusa_num_layers": 1, "base_model_name_or_path": BASE}
    write_config(folder, said | config)
    save_file(dict(tensors), folder / "medusa_lm_head.safetensors")
    return folder


def vllm(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    matrix_VD: Tensor | None = None,
    token_map: Tensor | None = None,
    prefix: str = "",
    **config: Any,
) -> Path:
    theirs = {}
    for name, tensor in tensors.items():
        head, place, part = name.split(".", 2)
        if part.startswith("linear."):
            theirs[f"{prefix}blocks.{head}.layers.{place}.{part[7:]}"] = tensor
        else:
            theirs[f"{prefix}lm_heads.{head}.weight"] = tensor
    if matrix_VD is not None:
        theirs[f"{prefix}lm_head.weight"] = matrix_VD
    if token_map is not None:
        theirs["token_map"] = token_map
    heads = {name.split(".")[0] for name in tensors}
    said = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": D,
        "vocab_size": V,
        "num_heads": len(heads),
        "num_hidden_layers": len({name.split(".")[1] for name in tensors if "linear" in name}),
        "medusa_fc_bias": any(name.endswith("bias") for name in tensors),
        "original_lm_head": matrix_VD is not None,
        "truncated_vocab_size": V if token_map is None else len(token_map),
    }
    write_config(folder, said | config)
    save_file(theirs, folder / "model.safetensors")
    return folder


def whole_model(
    folder: Path,
    target: Path,
    tensors: Mapping[str, Tensor],
    prefix: str,
    config: Mapping[str, Any],
    *,
    shards: int = 1,
) -> Path:
    """The target's own files with heads among its tensors: merged 1.0 (`medusa_head.`) and
    ModelOpt (`medusa_heads.`)."""
    every = load_file(target / "model.safetensors")
    every |= {prefix + name: tensor for name, tensor in tensors.items()}
    write_config(folder, json.loads((target / "config.json").read_text()) | dict(config))
    if shards == 1:
        save_file(every, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: every[name] for name in sorted(every)[number::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def hydra_tensors(num_heads: int, num_layers: int, *, grounded: bool) -> dict[str, Tensor]:
    """`mlp` heads under Hydra's names; their vocabulary matrices have a bias."""
    tensors = {}
    for i in range(num_heads):
        for layer in range(num_layers):
            width = D * (i + 2) if grounded and layer == 0 else D
            parts = ["linear", "res_connection"] if width > D else ["linear"]
            for number, part in enumerate(parts):
                seed = 1000 + 100 * i + 10 * layer + 2 * number
                name = f"hydra_mlp.{i}.{layer}.{part}"
                tensors[f"{name}.weight"] = values(D, width, seed=seed)
                tensors[f"{name}.bias"] = values(D, seed=seed + 1)
        tensors[f"hydra_lm_head.{i}.weight"] = values(V, D, seed=1098 + 100 * i)
        tensors[f"hydra_lm_head.{i}.bias"] = values(V, seed=1099 + 100 * i)
    return tensors


def hydra(folder: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    said = {
        "hydra_num_heads": len({n.split(".")[1] for n in tensors}),
        "hydra_num_layers": 1,
        "hydra_head_arch": "mlp",
        "base_model_name_or_path": BASE,
    }
    write_config(folder, said | config)
    torch.save(dict(tensors), folder / "hydra_lm_head.pt")
    return folder
