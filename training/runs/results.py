"""What a run leaves in its folder when it has come to its end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer

from medusa_heads.checkpoint.checkpoint import save_heads
from medusa_heads.files import replace_file
from medusa_heads.training.measure.calibration import calibrate
from medusa_heads.training.measure.metrics import complete_runs, rank_statistics
from medusa_heads.training.measure.report import make_report, write_report
from medusa_heads.training.runs.heads_trainer import HeadsTrainer
from medusa_heads.training.runs.record import write_run

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftModel
    from transformers.trainer_utils import PredictionOutput

METRICS_FILE = "metrics.json"
# transformers': flops of another model, and a time that only a run which takes no step measures.
_NOT_KEPT = ("total_flos", "eval_model_preparation_time")


def write_heads(
    output: Path,
    trainer: HeadsTrainer,
    trained: Mapping[str, float],
    measured: PredictionOutput,
    held_out: Dataset,
    history: Mapping[str, Any],
    adapter: PeftModel | None,
    *,
    with_vocab_matrix: bool = False,
) -> None:
    """The checkpoint, with an adapter if one was trained too, its figures, story and report.

    Only the first process writes; others are here where a sharded target needs them.
    """
    heads = trainer.accelerator.unwrap_model(trainer.model).heads
    target, hidden_states = trainer.target, trainer.hidden_states
    ranks_BTK = torch.as_tensor(measured.predictions)
    statistics = rank_statistics(ranks_BTK)
    calibrations = calibrate(statistics, heads, hidden_states, held_out)
    if not trainer.is_world_process_zero():
        return
    save_heads(
        output,
        heads,
        target,
        statistics=statistics,
        provenance=history,
        adapter=adapter,
        with_vocab_matrix=with_vocab_matrix,
    )
    metrics = write_figures(output, trainer, trained, measured.metrics or {}, history)
    report = make_report(
        statistics,
        complete_runs(ranks_BTK),
        calibrations,
        heads=heads.config.to_dict(),
        target=target.name_or_path,
        metrics=metrics,
        log=trainer.state.log_history,
    )
    write_report(output, report)


def mean_loss(log: Sequence[Mapping[str, float]]) -> float | None:
    """Mean training loss of a run's steps, also of those before it was interrupted, which
    transformers' own leaves out; None where none was logged."""
    steps, total = 0.0, 0.0
    for entry in log:
        if "loss" in entry:
            total += entry["loss"] * (entry["step"] - steps)
            steps = entry["step"]
    return total / steps if steps else None


def write_figures(
    output: Path,
    trainer: Trainer,
    trained: Mapping[str, float],
    measured: Mapping[str, float],
    history: Mapping[str, Any],
) -> dict[str, Any]:
    """`metrics.json` and `run.yaml`.

    Args:
        output: the folder of the run.
        trainer: at its end.
        trained: metrics of the training.
        measured: metrics of the last evaluation.
        history: what was run on what.

    Returns:
        What `metrics.json` holds.
    """
    metrics = {
        **{k: v for k, v in {**trained, **measured}.items() if k not in _NOT_KEPT},
        "train_loss": mean_loss(trainer.state.log_history),
        "epoch": trainer.state.epoch,
        "steps": trainer.state.global_step,
        "best_step": trainer.state.best_global_step,
    }
    replace_file(output / METRICS_FILE, json.dumps(metrics, indent=2) + "\n")
    write_run(output, history)
    return metrics
