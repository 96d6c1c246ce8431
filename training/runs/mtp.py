"""Train a target's own multi-token-prediction modules on: one call from text to a small folder.

A target that was fine-tuned predicts other text than its modules learnt to foresee. They learn
here as heads do, over the frozen target's hidden states, with its lm_head and its embeddings.

Source: DeepSeek-AI 2024, "DeepSeek-V3", arXiv:2412.19437, section 2.2.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainingArguments

from medusa_heads.checkpoint.mtp_checkpoint import check_mtp, save_mtp
from medusa_heads.config import IGNORED
from medusa_heads.contents import is_mtp
from medusa_heads.files import expanded
from medusa_heads.target.mtp import load_mtp, stored_tensors
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.arguments.mtp import MTP_LEARNING_RATE, MtpArguments
from medusa_heads.training.arguments.rates import fit_rate
from medusa_heads.training.arguments.training import OptimisationArguments, to_training_arguments
from medusa_heads.training.loss.heads import batch_loss
from medusa_heads.training.measure.metrics import (
    TREE_SIZES,
    chain_metrics,
    chain_tree,
    describe_chain,
)
from medusa_heads.training.runs.going_on import GoingOnTrainer
from medusa_heads.training.runs.heads_trainer import HeadsTrainer
from medusa_heads.training.runs.setup import GivenTarget, GivenText, Names, Run
from medusa_heads.training.runs.trainer import Inputs
from medusa_heads.training.runs.unrolled import UnrolledModules, check_depths


def train_mtp(
    target: GivenTarget,
    dataset: GivenText,
    *,
    eval_dataset: Dataset | Names | None = None,
    mtp: MtpArguments | None = None,
    output_dir: str | os.PathLike[str],
    training_args: TrainingArguments | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    objective: LossConfig | None = None,
    resume_from_checkpoint: str | None = None,
    overwrite_output_dir: bool = False,
    early_stopping_patience: int | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    record: Mapping[str, Any] | None = None,
    **data_settings: Any,
) -> Any:
    """Go on training a target's multi-token-prediction modules, and write them alone to a folder.

    `output_dir` gets the modules, `metrics.json` (held-out figures), `run.yaml` (what was run on
    what) and the Trainer's resumable `checkpoint-*` folders.

    Args:
        target: a hub id or path, or a model in memory that was loaded from one. It stays frozen.
        mtp: which modules to begin with, and how far they are unrolled.
        training_args: of the run. Default: as `train_heads`, with a peak rate of 1e-3.
        objective: what the depths learn, and how much each counts, as heads do.
        dataset, eval_dataset, output_dir, tokenizer, resume_from_checkpoint, overwrite_output_dir,
            early_stopping_patience, callbacks, record, data_settings: as in `train_heads`.

    Returns:
        The best modules by held-out figures, in the dtype they came in: transformers' `MtpModel`.

    Raises:
        ValueError: a target without modules that can be read, or a dataset or setting that cannot
            be used; the message says which. Or training made the modules worse than they were.
        UnsupportedArchitecture: the modules keep a recurrent state.
        RuntimeError: the target's weights changed, which a fault of this program would be.
        SystemExit: the process got SIGTERM; a checkpoint was written first.
    """
    mtp, objective = mtp or MtpArguments(mtp=True), objective or LossConfig()
    run = Run(
        target,
        dataset,
        eval_dataset,
        data_settings,
        output_dir=output_dir,
        args=training_args
        or to_training_arguments(OptimisationArguments(), "shared", rate=MTP_LEARNING_RATE),
        tokenizer=tokenizer,
        num_heads=mtp.mtp_depth or 1,
        resume_from_checkpoint=resume_from_checkpoint,
        overwrite_output_dir=overwrite_output_dir,
        early_stopping_patience=early_stopping_patience,
        callbacks=callbacks,
    )
    run.data.refuse_images("a target's modules do")
    fit_rate(run.args, run.target.hidden_size)
    modules, source = begin_modules(run.target, mtp)
    unrolled = UnrolledModules(modules, run.target, mtp.mtp_depth)
    run.begin({"mtp": asdict(mtp), "loss": asdict(objective), **(record or {})})
    trainer = MtpTrainer(
        unrolled,
        run.target,
        run.args,
        *run.sets,
        objective=objective,
        known_rows=run.data.known_rows,
        **run.hooks,
    )
    before = trainer.predict(run.data.held_out, metric_key_prefix="eval").metrics or {}
    trained, prediction = run.learn(trainer, "modules were")
    unrolled.restore_dtypes()

    def write() -> None:
        measured, story = prediction.metrics or {}, run.story()
        figures = _figures(measured) | {"before": _figures(before)}
        save_mtp(run.output, modules, run.target, source=source, measured=figures, provenance=story)
        run.write_figures(trainer, trained, measured, story)

    run.end(write)
    return modules


def begin_modules(target: TargetModel, mtp: MtpArguments) -> tuple[Any, str | None]:
    """The modules that training begins with, and what they came from, None for the target's own
    checkpoint. Raises ValueError: there are none that can be read and written again; or they were
    trained for another target."""
    source = mtp.mtp_from
    if source is not None and (folder := expanded(source)).is_dir():
        source = str(folder)
        if is_mtp(folder):
            check_mtp(folder, target)
    modules = load_mtp(target, source)
    check_depths(modules, mtp.mtp_depth)
    stored_tensors(target, modules, source)
    return modules, source


def _figures(metrics: Mapping[str, float]) -> dict[str, Any]:
    names = (f"eval_head{depth}_top1" for depth in range(len(metrics)))
    return {
        "loss": metrics["eval_loss"],
        "top1": [metrics[name] for name in names if name in metrics],
        "tokens_per_step": metrics[f"eval_tokens_per_step_{TREE_SIZES[0]}"],
    }


class MtpTrainer(GoingOnTrainer, HeadsTrainer):
    """Trains modules, in place, on what their frozen target sees. Evaluation measures each depth as
    a head, and the tokens per step of chains."""

    worse = "the modules worse than they were"

    metrics_of = staticmethod(chain_metrics)
    describe = staticmethod(describe_chain)
    tree_of = staticmethod(chain_tree)

    def _groups(self) -> None:
        """All of one rate."""

    def _compare(self, inputs: Inputs, hidden: Callable[[], tuple[Tensor, Tensor]]) -> None:
        self._compare_with_before()

    def _plain_and_own_loss(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        hidden_BTD = self.hidden_states.of(inputs)
        learnt: Any = self.model
        plain = batch_loss(self.heads, hidden_BTD, inputs, objective=LossConfig())
        own = learnt.loss(hidden_BTD, inputs, (inputs["labels"] != IGNORED).sum())
        return plain.float(), own.float()
