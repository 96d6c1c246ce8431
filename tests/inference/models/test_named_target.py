"""Where the target lies that a checkpoint names by a relative path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def test_only_of_a_target_that_is_not_there_it_is_said_who_named_it(
    tiny_llama: TinyLlama, tmp_path: Path
) -> None:
    tiny_llama().save_pretrained(tmp_path / "target")
    target = TargetModel.from_pretrained(str(tmp_path / "target"))
    heads = tmp_path / "heads"
    save_heads(heads, MedusaHeads.from_target(target, HeadsConfig(num_heads=2)), target)
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"device": "nowhere"}, "expected a device such as cpu or cuda, got 'nowhere'"),
        ({"dtype": "bla"}, "expected a dtype such as float32 or bfloat16, got 'bla'"),
    ]
    for asked, said in mistakes:
        with pytest.raises(ValueError, match=said) as raised:
            MedusaModel.from_pretrained(heads, **asked)
        assert "name it as their target" not in str(raised.value)
    (tmp_path / "target").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match="name it as their target; pass target="):
        MedusaModel.from_pretrained(heads)
