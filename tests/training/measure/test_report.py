"""The report of a run: true to its statistics, and whole on disk."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from rich.console import Console

from medusa_heads.checkpoint.checkpoint import load_heads
from medusa_heads.config import HeadsConfig
from medusa_heads.target.target import TargetModel
from medusa_heads.training.measure.calibration import reliability
from medusa_heads.training.measure.report import (
    make_report,
    markdown,
    read_report,
    tables,
    write_report,
)
from medusa_heads.training.runs.heads import train_heads
from medusa_heads.trees.statistics import HeadStatistics
from tests.training.runs.test_heads import quick

Rows = Callable[..., Dataset]
METRICS = {"steps": 4, "best_step": 2, "eval_loss": 1.5, "train_runtime": 3.0}
LOG = [
    {"step": 1, "loss": 2.0},
    {"step": 2, "eval_loss": 1.5, "eval_tokens_per_step_32": 2.5},
    {"step": 4, "train_loss": 1.8},
]


@pytest.fixture(autouse=True)
def pictures() -> None:
    """Here they are drawn."""


def by_hand() -> dict:
    ranks = torch.tensor([[0, 0], [0, 3], [1, 0], [0, 0]])
    right = torch.tensor([True, True, True, False])
    honest = [
        {
            "head": head,
            "temperature": 1.1,
            "before": reliability(torch.full((4,), 0.5), right),
            "after": reliability(torch.full((4,), 0.7), right),
        }
        for head in range(2)
    ]
    return make_report(
        HeadStatistics.from_ranks(ranks),
        ranks[None],
        honest,
        heads={"kind": "medusa", "num_heads": 2},
        target="a/b",
        metrics=METRICS,
        log=LOG,
    )


def test_figures_by_hand() -> None:
    report = by_hand()
    assert report["accuracy"][0] == {"head": 0, "looks_ahead": 2, "top_k": [0.75, 1, 1, 1, 1]}
    assert report["accuracy"][1]["top_k"] == [0.75, 0.75, 0.75, 1, 1]
    # Nodes (0), (0, 0), (1), (0, 3), (1, 0) are met 3, 2, 1, 1, 1 times at 4 positions.
    sizes = {tree["nodes"]: tree for tree in report["static_trees"]}
    assert sizes[1]["tokens_per_step_anywhere"] == 1.75 and sizes[1]["nodes_by_depth"] == [1, 0]
    assert sizes[3]["tokens_per_step_anywhere"] == 2.5 and sizes[3]["nodes_by_depth"] == [2, 1]
    # Walked with (0), (0, 0), (1): position 0 commits 3 tokens, position 3 commits 3.
    assert sizes[3]["tokens_per_step"] == 3 and 7 not in sizes
    assert report["tokens_per_step"] == {"nodes": 5, "static": 3.0}
    assert report["calibration"][1]["before"]["expected_error"] == 0.25
    assert report["training"]["loss"] == [[1, 2.0]]
    assert report["training"]["evaluations"] == [{"step": 2, "loss": 1.5, "tokens_per_step": 2.5}]


def test_it_comes_back_from_disk_and_names_its_pictures(tmp_path: Path) -> None:
    write_report(tmp_path, by_hand())
    assert read_report(tmp_path) == json.loads(json.dumps(by_hand()))
    text = (tmp_path / "report.md").read_text()
    assert "the best, of step 2" in text and "| 0 | 2 | 0.750 |" in text
    for name in ("tokens_per_step.png", "accuracy.png", "reliability.png"):
        assert f"]({name})" in text
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]
    console = Console(record=True, width=120)
    for table in tables(by_hand()):
        console.print(table)
    assert "ECE at T" in console.export_text()
    (tmp_path / "report.json").write_text('{"report_version": 99}')
    with pytest.raises(ValueError, match="is of report_version 99, expected 1"):
        read_report(tmp_path)


def test_a_run_leaves_a_report_that_agrees_with_its_checkpoint(
    target: TargetModel, make_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_heads.training.measure.report.draw_plots", lambda *_: [])
    train_heads(
        target,
        make_rows(30),
        eval_dataset=make_rows(30, seed=7),
        config=HeadsConfig(num_heads=2),
        output_dir=tmp_path,
        training_args=quick(tmp_path, 10),
    )
    report = read_report(tmp_path)
    statistics = load_heads(tmp_path, target).statistics
    assert statistics is not None
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert report["tokens_per_step"]["static"] == metrics["eval_tokens_per_step_32"]
    assert [entry["temperature"] for entry in report["calibration"]] == statistics.temperatures
    assert [entry["top_k"][4] for entry in report["accuracy"]] == statistics.top_k_accuracy(5)
    for entry in report["calibration"]:
        for moment in ("before", "after"):
            bins = entry[moment]["bins"]
            assert bins and all(0 <= part["confidence"] <= 1 for part in bins)
    counts = [
        sum(part["count"] for part in entry["after"]["bins"]) for entry in report["calibration"]
    ]
    assert counts[0] == statistics.positions
    assert "dynamic, anywhere" in markdown(report)
