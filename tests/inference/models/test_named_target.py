"""Where the target lies that a checkpoint names by a relative path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from medusa_heads import HeadsConfig, MedusaHeads, TargetModel
from medusa_heads.checkpoint.checkpoint import save_heads
from medusa_heads.inference.models.medusa import MedusaModel
from medusa_heads.inference.models.named_target import named_target
from tests.conftest import TinyLlama


def test_heads_are_used_from_another_folder_than_they_were_trained_in(
    tiny_llama: TinyLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    elsewhere.mkdir()
    tiny_llama().save_pretrained(project / "assets" / "target")
    monkeypatch.chdir(project)
    target = TargetModel.from_pretrained("assets/target")
    folder = project / "runs" / "heads"
    save_heads(folder, MedusaHeads.from_target(target, HeadsConfig(num_heads=2)), target)
    assert named_target("runs/heads") == ("assets/target", None)

    monkeypatch.chdir(elsewhere)
    found = str(project / "assets" / "target")
    assert named_target(folder) == named_target("../project/runs/heads") == (found, None)
    model = MedusaModel.from_pretrained(folder, tree="chain")
    assert model.target.fingerprint() == target.fingerprint()

    # What came from a hub is not looked for on the disk.
    sidecar = json.loads((folder / "medusa_heads.json").read_text())
    sidecar["target"]["revision"] = "abc"
    (folder / "medusa_heads.json").write_text(json.dumps(sidecar))
    assert named_target(folder) == ("assets/target", "abc")
