"""Multi-token-prediction modules are read whole, or refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa_heads import TargetModel
from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.target import mtp
from medusa_heads.target.mtp import load_mtp
from scripts.prove.tiny_models import builder
from tests.conftest import TinyLlama
from tests.inference.native_modules import KINDS, needs_modules, read_target, write_checkpoint


@needs_modules
@pytest.mark.parametrize("kind", KINDS)
def test_modules_are_read_and_the_target_stays_as_it_is(kind: str, tmp_path: Path) -> None:
    target = read_target(write_checkpoint(kind, tmp_path))
    before = target.weights_digest(), target.model.config.to_dict()
    known = set(target.model._keys_to_ignore_on_load_unexpected or ())
    modules = load_mtp(target)
    assert len(modules.layers) == KINDS[kind][0]
    assert modules.shared_head is target.get_output_embeddings()
    last = target.model.get_decoder().layers[-1].state_dict()
    for module in modules.layers:
        for name, tensor in module.mtp_block.state_dict().items():
            assert torch.equal(tensor, last[name]), name
        joined = module.eh_proj.weight
        assert torch.equal(joined, torch.eye(*joined.shape, device=joined.device))
    assert not any(parameter.requires_grad for parameter in modules.parameters())
    assert (target.weights_digest(), target.model.config.to_dict()) == before
    assert set(target.model._keys_to_ignore_on_load_unexpected or ()) == known


def _without(part: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda weights: {name: each for name, each in weights.items() if part not in name}


def _reshaped(weights: dict[str, Any]) -> dict[str, Any]:
    return weights | {"mtp.fc.weight": torch.zeros(3, 5)}


@needs_modules
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_without("mtp."), "weights are missing"),
        (_without("mtp.fc"), "weights are missing"),
        (_without("mtp.layers.0.self_attn.q_proj"), "weights are missing"),
        (_reshaped, "(size|shape|mismatch)"),
    ],
)
def test_missing_and_damaged_modules(
    damage: Callable[[dict[str, Any]], dict[str, Any]], reason: str, tmp_path: Path
) -> None:
    target = read_target(write_checkpoint("qwen3_next", tmp_path))
    path = tmp_path / "model.safetensors"
    save_file(damage(load_file(path)), path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"no multi-token-prediction modules .*{reason}") as error:
        load_mtp(target)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


@needs_modules
def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    target = read_target(write_checkpoint("qwen3_next", tmp_path))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4000])
    with pytest.raises(ValueError, match="no multi-token-prediction modules can be read"):
        load_mtp(target)


@needs_modules
def test_targets_without_modules(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    made = tiny_llama()
    with pytest.raises(ValueError, match=r"\(it was made in memory\): draft with"):
        load_mtp(TargetModel(made))
    made.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no multi-token-prediction modules .*missing"):
        load_mtp(read_target(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ValueError, match="its configuration says 0"):
        load_mtp(read_target(tmp_path))


@needs_modules
@pytest.mark.parametrize("kind", ["nemotron_h", "gpt2"])
def test_architectures_whose_modules_nobody_reads(kind: str, tmp_path: Path) -> None:
    model = builder(kind)((0.15, 0.15))
    model.config.num_nextn_predict_layers = 1
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no multi-token-prediction modules can be read") as error:
        load_mtp(read_target(tmp_path))
    assert len(str(error.value)) < 500


@needs_modules
def test_modules_with_a_recurrent_state(tmp_path: Path) -> None:
    folder = write_checkpoint("qwen3_next", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["mtp_layer_types"] = ["linear_attention"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedArchitecture, match="keep a recurrent state"):
        load_mtp(read_target(folder))


def test_versions_that_run_no_modules(tiny_llama: TinyLlama, monkeypatch: Any) -> None:
    # By their names: what was imported first may not be what is imported now.
    monkeypatch.setattr("transformers.modeling_layers.MtpModel", object, raising=False)
    monkeypatch.setattr("transformers.__version__", "5.19.0")
    with pytest.raises(ValueError, match=r"need transformers 5.20 or later, and this is 5.19.0"):
        load_mtp(TargetModel(tiny_llama()))
    assert mtp.load_mtp is load_mtp
