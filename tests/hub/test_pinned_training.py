"""Heads that are trained on a target at a named revision of the hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset

from medusa_heads import TargetModel
from medusa_heads.cli import train_heads
from tests.conftest import Refused
from tests.hub.hub_server import LocalHub


@pytest.fixture
def rows(tmp_path: Path) -> str:
    ids = [list(range(3, 19))] * 8
    Dataset.from_dict({"input_ids": ids, "labels": ids}).save_to_disk(tmp_path / "rows")
    return str(tmp_path / "rows")


def test_the_revision_is_loaded_and_recorded(
    hub: LocalHub,
    target: TargetModel,
    rows: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Path(target.name_or_path)
    commit = hub.upload("alice/target", {file.name: file.read_bytes() for file in folder.iterdir()})
    hub.upload("alice/target", {"config.json": b"{}"})  # a later one, which no longer works
    given = ["--model_name_or_path", "alice/target", "--dataset", rows, "--eval_share", "0.4"]
    given += ["--output_dir", str(tmp_path / "run"), "--num_heads", "1", "--max_steps", "1"]
    given += ["--training_args", '{"use_cpu": true, "disable_tqdm": true}']
    assert train_heads.main([*given, "--dry_run"]) == 2
    for flags in (["--dry_run"], []):
        assert train_heads.main([*given, "--model_revision", commit, *flags]) == 0
    sidecar = json.loads((tmp_path / "run" / "medusa_heads.json").read_text())
    assert sidecar["target"]["revision"] == commit


def test_a_folder_has_no_revisions(target: TargetModel, rows: str, refused: Refused) -> None:
    given = ["--model_name_or_path", target.name_or_path, "--dataset", rows]
    said = refused(train_heads.main, [*given, "--model_revision", "main"])
    assert "model_revision is of a model on the hub" in said
