"""What is written for EAGLE-3, SGLang's own model class loads, every tensor of it.

Skipped where the package sglang is not installed.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.vllm.written import exported

READER = Path(__file__).with_name("sglang_reader.py")
PARTS = {"self_attn.qkv": ("q", "k", "v"), "mlp.gate_up": ("gate", "up")}

pytestmark = pytest.mark.skipif(find_spec("sglang") is None, reason="sglang is not installed")


@pytest.mark.parametrize(
    "config",
    [{}, {"draft_vocab_size": 500}, {"vocab_matrix": "own", "draft_vocab_size": 500}],
    ids=str,
)
def test_every_tensor_finds_its_place(tmp_path: Path, config: dict[str, Any]) -> None:
    heads, _, folder = exported(tmp_path, "eagle3", kind="eagle3", **config)
    subprocess.run([sys.executable, READER, folder, tmp_path / "held"], check=True)
    held = load_file(tmp_path / "held")
    hot = held.pop("hot_token_id", None)
    embedded = held.pop("model.embed_tokens.weight")  # the target's own are put there
    assert embedded.isnan().all()
    held = {name.removeprefix("model."): value for name, value in held.items()}
    written = {
        name.replace("midlayer.", "layers.0."): value
        for name, value in load_file(folder / "model.safetensors").items()
        if name not in ("d2t", "t2d")
    }
    for whole, parts in PARTS.items():
        module = f"layers.0.{whole.partition('.')[0]}"
        of_parts = [written.pop(f"{module}.{part}_proj.weight") for part in parts]
        written[f"layers.0.{whole}_proj.weight"] = torch.cat(of_parts)
    assert sorted(held) == sorted(written)
    for name, value in written.items():
        assert torch.equal(held[name][: len(value)], value), name  # a vocabulary is padded
    drafted = torch.arange(heads.config.num_candidates)
    assert torch.equal(drafted if hot is None else hot, heads.token_ids(drafted))
