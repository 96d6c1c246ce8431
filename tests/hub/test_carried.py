"""What goes along with heads that were loaded and are saved again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from medusa_heads import HeadsConfig, MedusaHeads, MedusaModel, TargetModel
from medusa_heads.checkpoint.checkpoint import replace_statistics, save_heads
from medusa_heads.trees.statistics import HeadStatistics, prior_statistics
from tests.conftest import TinyLlama

MEASURED = ("report.json", "README.md")


def sidecar(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "medusa_heads.json").read_text())
    return read


def measured(folder: Path) -> list[str]:
    return [name for name in MEASURED if (folder / name).exists()]


@pytest.fixture
def loaded(checkpoint: Path, target: TargetModel) -> MedusaModel:
    """Heads whose folder says how good they are, calibrated since."""
    for name in MEASURED:
        (checkpoint / name).write_text("{}")
    replace_statistics(checkpoint, prior_statistics(2), {"text": "letters"})
    return MedusaModel.from_pretrained(checkpoint, target=target, tree="none")


def change(model: MedusaModel) -> None:
    with torch.no_grad():
        next(model.heads.parameters()).view(-1)[0].add_(1)


def test_what_was_measured_stays_with_the_heads_it_was_measured_of(
    loaded: MedusaModel, checkpoint: Path, tmp_path: Path
) -> None:
    before = sidecar(checkpoint)
    same = loaded.save_pretrained(tmp_path / "same")
    assert sidecar(same) == before and measured(same) == list(MEASURED)
    change(loaded)
    for folder in (tmp_path / "changed", checkpoint, tmp_path / "again"):
        told = sidecar(loaded.save_pretrained(folder))
        assert told["statistics"] is None and told["provenance"] == {"command": "train-heads"}
        assert not (folder / "report.json").exists()
    assert not measured(tmp_path / "changed")


def test_statistics_of_ones_own_are_stored_as_they_are(loaded: MedusaModel, tmp_path: Path) -> None:
    change(loaded)
    loaded.statistics = HeadStatistics.from_ranks(torch.tensor([[0, 0], [1, 0], [1, 1]]))
    told = sidecar(loaded.save_pretrained(tmp_path / "own"))
    assert told["statistics"] == loaded.statistics.to_dict()
    assert told["provenance"] == {"command": "train-heads"}


def test_rounded_heads_are_the_same_and_those_of_a_removed_folder_are_taken_for_it(
    checkpoint: Path, loaded: MedusaModel, target: TargetModel, tmp_path: Path
) -> None:
    in_bf16 = MedusaModel.from_pretrained(
        checkpoint, target=target.name_or_path, dtype=torch.bfloat16, tree="none"
    )
    for folder in (tmp_path / "rounded", checkpoint, checkpoint):
        in_bf16.save_pretrained(folder)
        assert measured(folder) == list(MEASURED)
        assert sidecar(folder)["statistics"] is not None
    told = sidecar(checkpoint)
    shutil.rmtree(checkpoint)
    assert sidecar(loaded.save_pretrained(tmp_path / "gone"))["statistics"] == told["statistics"]


def test_a_target_in_float16_keeps_the_fingerprint_it_was_loaded_by(
    checkpoint: Path, target: TargetModel, tmp_path: Path
) -> None:
    before = sidecar(checkpoint)["target"]
    assert before["lm_head_sha256"] is not None
    loaded = MedusaModel.from_pretrained(
        checkpoint, target=target.name_or_path, dtype=torch.float16, tree="none"
    )
    assert sidecar(loaded.save_pretrained(tmp_path / "same"))["target"] == before
    change(loaded)  # on a target that is known by its sizes alone, and has another name
    told = sidecar(loaded.save_pretrained(tmp_path / "changed"))["target"]
    assert told["lm_head_sha256"] is None
    loaded.target.model.config._name_or_path = before["name_or_path"]
    assert sidecar(loaded.save_pretrained(tmp_path / "named"))["target"] == before


def test_heads_are_saved_at_home_where_they_are_read_from(
    loaded: MedusaModel, target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`~` was a folder of that name where a program ran, and `from_pretrained` found nothing."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert loaded.save_pretrained("~/heads") == tmp_path / "heads"
    MedusaModel.from_pretrained("~/heads", target=target, tree="none")


def test_a_target_is_named_by_where_it_lies(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads knew it by a path that was relative to where they were trained."""
    target.model.save_pretrained(tmp_path / "project" / "models" / "mine")
    monkeypatch.chdir(tmp_path / "project")
    here = TargetModel.from_pretrained("models/mine")
    save_heads("runs/heads", MedusaHeads.from_target(here, HeadsConfig(num_heads=1)), here)
    monkeypatch.chdir(tmp_path)
    loaded = MedusaModel.from_pretrained("project/runs/heads", tree="none")
    told = sidecar(loaded.save_pretrained("elsewhere"))["target"]
    assert told["name_or_path"] == str(tmp_path / "project" / "models" / "mine")


def test_heads_of_an_adapter_still_name_their_target(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    """With an adapter that does not lie beside the heads, a target would have no name."""
    tiny_llama(vocab_size=24).save_pretrained(tmp_path / "target")
    plain = TargetModel.from_pretrained(str(tmp_path / "target"))
    adapted = get_peft_model(plain.model, LoraConfig(r=2, target_modules=["q_proj"]))
    carrying = TargetModel(adapted)  # type: ignore[arg-type]
    heads = MedusaHeads.from_target(carrying, HeadsConfig(num_heads=1))
    save_heads(tmp_path / "heads", heads, carrying, adapter=adapted)
    saved = MedusaModel.from_pretrained(tmp_path / "heads").save_pretrained(tmp_path / "saved")
    assert sidecar(saved)["target"] == sidecar(tmp_path / "heads")["target"]
    MedusaModel.from_pretrained(saved)
    moved = tmp_path / "moved"
    (tmp_path / "target").rename(moved)
    loaded = MedusaModel.from_pretrained(saved, target=str(moved))
    assert sidecar(loaded.save_pretrained(saved))["target"]["name_or_path"] == str(moved)
