"""144 damaged checkpoints: each is refused in one sentence, or what is loaded is what was saved."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from medusa_heads.checkpoint.checkpoint import load_heads, save_heads
from medusa_heads.checkpoint.stored_heads import SIDECAR_FILE, WEIGHTS_FILE, read_stored
from medusa_heads.checkpoint.tensor_file import mapped_tensors
from medusa_heads.config import HeadsConfig
from medusa_heads.contents import DRAFT_FILE
from medusa_heads.decoder_shape import DecoderShape
from medusa_heads.heads import DraftHeads, new_heads
from medusa_heads.inference.models.medusa import MedusaModel
from medusa_heads.interop.source import open_source
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.statistics import HeadStatistics
from scripts.prove.hostile.damage import DAMAGES, change_tensor
from tests.conftest import TinyLlama

KINDS: list[dict[str, Any]] = [
    {"vocab_matrix": "shared"},
    {"vocab_matrix": "own"},
    {"vocab_matrix": "own", "draft_vocab_size": 20},
    {"kind": "hydra", "prefix_attention": True},
    {"kind": "eagle3", "vocab_matrix": "own"},
    {"kind": "block", "num_layers": 2},
]


@pytest.mark.parametrize("size", ["hidden_size", "vocab_size", "num_heads", "num_layers"])
@pytest.mark.parametrize("value", [10**9, 10**12, 10**30])
def test_sizes_beyond_reason(tiny_llama: TinyLlama, tmp_path: Path, size: str, value: int) -> None:
    target = TargetModel(tiny_llama())
    heads = new_heads(target, HeadsConfig(num_heads=2, vocab_matrix="own"))
    save_heads(tmp_path, heads, target)
    sidecar = json.loads((tmp_path / SIDECAR_FILE).read_text())
    sidecar["heads"][size] = value
    (tmp_path / SIDECAR_FILE).write_text(json.dumps(sidecar))
    with pytest.raises(ValueError, match=f"{size} must be at most 100000000, got {value}$"):
        load_heads(tmp_path, target)


@pytest.mark.parametrize(
    ("norm", "features", "message"),
    [
        ("none", 10**4, "hidden_size 100000000 make tensors that no machine holds"),
        ("each", 10**6, "that read 1000000 features, found [0-9]+ tensors"),
    ],
)
def test_sizes_whose_product_no_number_holds(
    tiny_llama: TinyLlama, tmp_path: Path, norm: str, features: int, message: str
) -> None:
    target = TargetModel(tiny_llama())
    shape = DecoderShape.of_width(64)
    config = HeadsConfig(kind="eagle3", features=[0, 1], decoder=shape)
    save_heads(tmp_path, new_heads(target, config), target)
    sidecar = json.loads((tmp_path / SIDECAR_FILE).read_text())
    sidecar["heads"] |= {"hidden_size": 10**8, "features": list(range(features))}
    sidecar["heads"]["decoder"]["feature_norm"] = norm
    (tmp_path / SIDECAR_FILE).write_text(json.dumps(sidecar))
    with pytest.raises(ValueError, match=message):
        read_stored(tmp_path)


@pytest.mark.parametrize("beside", [None, DRAFT_FILE])
def test_heads_are_not_written_over_a_model(
    tiny_llama: TinyLlama, tmp_path: Path, beside: str | None
) -> None:
    target = TargetModel(tiny_llama())
    target.model.save_pretrained(tmp_path)
    if beside is not None:
        (tmp_path / beside).write_text("{}")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    named = beside or "config.json"
    with pytest.raises(ValueError, match=rf"holds a model \({named}\): name another folder"):
        save_heads(tmp_path, new_heads(target, HeadsConfig(num_heads=1)), target)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_heads_with_a_damaged_configuration_are_written_anew(
    tiny_llama: TinyLlama, tmp_path: Path
) -> None:
    target = TargetModel(tiny_llama())
    heads = new_heads(target, HeadsConfig(num_heads=1))
    save_heads(tmp_path, heads, target)
    (tmp_path / "config.json").write_text("{")
    save_heads(tmp_path, heads, target)
    assert json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize("size", [2**63, 2**64 - 1])
def test_a_shape_that_torch_cannot_hold(tmp_path: Path, size: int) -> None:
    said = {"a": {"dtype": "F32", "shape": [0, size], "data_offsets": [0, 0]}}
    header = json.dumps(said).encode()
    path = tmp_path / WEIGHTS_FILE
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="cannot be read") as raised:
        mapped_tensors(path)
    with pytest.raises(ValueError, match="cannot be read") as of_others:
        open_source(str(path))
    for refused in (raised, of_others):
        assert "\n" not in str(refused.value) and "frame #" not in str(refused.value)


TRIALS = 4 * len(KINDS)
# How many of them must be refused: all that a checksum sees. What changes no tensor may load:
# provenance and the target's name are free text, and a tensor with a checksum of its own is right.
REFUSED = {
    "flip_bit": TRIALS,
    "flip_bit_unnoticed": 21,
    "truncate": TRIALS,
    "change_tensor": 20,
    "change_sidecar": 17,
    "change_sidecar_bytes": 21,
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_some_of_each_are_refused_or_right(
    tiny_llama: TinyLlama, tmp_path: Path, damage: Callable[[Path, random.Random], None]
) -> None:
    target = TargetModel(tiny_llama())
    chance = random.Random(damage.__name__)
    refused = 0
    for trial in range(TRIALS):
        folder = tmp_path / str(trial)
        intact = whole(folder, target, KINDS[trial % len(KINDS)])
        damage(folder, chance)
        try:
            loaded = load_heads(folder, target)
            MedusaModel(target, loaded.heads, statistics=loaded.statistics, tree=8)
        except ValueError as error:
            assert "\n" not in str(error) and len(str(error)) > 20
            refused += 1
        else:
            assert loaded.heads.config == intact.config
            tensors = intact.state_dict()
            if damage is change_tensor:  # with a checksum of its own: what the file holds is right
                tensors |= load_file(folder / WEIGHTS_FILE)
            assert_same(loaded.heads.state_dict(), tensors)
        shutil.rmtree(folder)
    assert refused >= REFUSED[damage.__name__]


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Names and numbers; not a number is the same as not a number."""
    assert sorted(got) == sorted(expected)
    for name, tensor in got.items():
        torch.testing.assert_close(
            tensor, expected[name].to(tensor.dtype), rtol=0, atol=0, equal_nan=True
        )


def test_weights_without_a_checksum_are_refused(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    target = TargetModel(tiny_llama())
    for wrong in ({}, {"weights_sha256": None}, {"weights_sha256": ""}):
        whole(tmp_path, target, KINDS[0])
        sidecar = json.loads((tmp_path / SIDECAR_FILE).read_text())
        del sidecar["weights_sha256"]
        (tmp_path / SIDECAR_FILE).write_text(json.dumps(sidecar | wrong))
        with pytest.raises(ValueError, match=r"checksum|says no weights_sha256"):
            load_heads(tmp_path, target)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_heads_are_loaded_as_they_were_saved(
    tiny_llama: TinyLlama, tmp_path: Path, kind: dict[str, Any]
) -> None:
    target = TargetModel(tiny_llama())
    saved = whole(tmp_path, target, kind)
    assert_same(load_heads(tmp_path, target).heads.state_dict(), saved.state_dict())


def whole(folder: Path, target: TargetModel, kind: dict[str, Any]) -> DraftHeads:
    """Save heads that differ in every tensor, and return them."""
    tokens_V = torch.arange(0, 40, 2) if "draft_vocab_size" in kind else None
    heads = new_heads(target, HeadsConfig(num_heads=2, **kind), tokens_V)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    ranks_RK = torch.randint(0, 4, (40, 2), generator=generator)
    save_heads(folder, heads, target, statistics=HeadStatistics.from_ranks(ranks_RK))
    return heads
