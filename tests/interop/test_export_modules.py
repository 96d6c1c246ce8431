"""Modules in a folder that somebody changed are written into no copy of a target."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa_heads.checkpoint.mtp_checkpoint import MTP_WEIGHTS, save_mtp
from medusa_heads.contents import MTP_FILE
from medusa_heads.interop.export import export_modules
from medusa_heads.target.fingerprint import file_sha256
from medusa_heads.target.mtp import load_mtp
from tests.inference.native_modules import needs_modules, read_target, write_checkpoint

pytestmark = needs_modules


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    target = read_target(write_checkpoint("glm4_moe", tmp_path / "target"))
    return save_mtp(tmp_path / "modules", load_mtp(target), target)


def tell(folder: Path, **changed: Any) -> None:
    told = json.loads((folder / MTP_FILE).read_text())
    (folder / MTP_FILE).write_text(json.dumps(told | changed))


def add_a_layer_of_the_target(folder: Path) -> None:
    weights = load_file(folder / MTP_WEIGHTS)
    weights["model.layers.0.self_attn.o_proj.weight"] = torch.zeros(3, 3)
    save_file(weights, folder / MTP_WEIGHTS, metadata={"format": "pt"})
    tell(folder, weights_sha256=file_sha256(folder / MTP_WEIGHTS))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (add_a_layer_of_the_target, "o_proj.weight is no weight of multi-token-prediction"),
        (lambda folder: tell(folder, target={}), "does not name its target"),
        (lambda folder: tell(folder, target={"name_or_path": ""}), "does not name its target"),
        (lambda folder: tell(folder, target={"name_or_path": 3}), "does not name its target"),
    ],
)
def test_what_was_changed_is_refused(
    change: Callable[[Path], Any], reason: str, modules: Path, tmp_path: Path
) -> None:
    change(modules)
    with pytest.raises(ValueError, match=reason):
        export_modules(modules, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_home_is_written_as_a_user_writes_it(
    modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert export_modules("~/modules", tmp_path / "out").folder.is_dir()
