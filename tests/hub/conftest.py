"""A hub on this machine, and heads to put on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_heads import HeadsConfig, MedusaHeads, TargetModel
from medusa_heads.checkpoint.checkpoint import save_heads
from medusa_heads.trees.statistics import HeadStatistics
from tests.conftest import TinyLlama
from tests.hub.hub_server import LocalHub, log_in

ALICE, BOB = "hf_alicealicealice", "hf_bobbobbobbob"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A hub where alice and bob are known, and alice is logged in."""
    with LocalHub({ALICE: "alice", BOB: "bob"}) as hub:
        log_in(hub, ALICE, tmp_path, monkeypatch)
        yield hub


@pytest.fixture(scope="session")
def model(tiny_llama: TinyLlama) -> Any:
    return tiny_llama(vocab_size=24)


@pytest.fixture(scope="session")
def target(model: Any, tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    """A target in a folder, as one that was trained here would be."""
    folder = tmp_path_factory.mktemp("home") / "alice" / "models" / "secret-target"
    model.save_pretrained(folder)
    return TargetModel.from_pretrained(str(folder))


@pytest.fixture
def checkpoint(target: TargetModel, tmp_path: Path) -> Path:
    """Heads of a target that is known by its name on the hub, amid the litter of training."""
    statistics = HeadStatistics.from_ranks(torch.tensor([[0, 0], [0, 1], [1, 0], [2, 0]]))
    folder = tmp_path / "run"
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
    target.model.config._name_or_path, path = "alice/target", target.name_or_path
    try:
        story = {"command": "train-heads"}
        save_heads(folder, heads, target, statistics=statistics, provenance=story)
    finally:
        target.model.config._name_or_path = path
    (folder / "checkpoint-8").mkdir()
    for litter in ("checkpoint-8/optimizer.pt", "run.yaml", "metrics.json", "events.out.tfevents"):
        (folder / litter).write_text("not for others")
    return folder
