"""Train a draft model for a target: one call from text to a folder that transformers loads."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, TrainingArguments, set_seed

from medusa_heads.checkpoint.draft_checkpoint import save_draft
from medusa_heads.checkpoint.provenance import provenance
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.draft import (
    DraftArguments,
    DraftOptimisationArguments,
    draft_training_arguments,
)
from medusa_heads.training.arguments.rates import fit_rate
from medusa_heads.training.data.own_text import OwnText
from medusa_heads.training.data.pack import check_packing
from medusa_heads.training.data.prepare import TrainingData, find_tokenizer
from medusa_heads.training.measure.draft_metrics import CHAINS
from medusa_heads.training.runs.draft_trainer import DraftTrainer
from medusa_heads.training.runs.pruned_target import begin_draft
from medusa_heads.training.runs.record import changed_arguments, check_same_run
from medusa_heads.training.runs.results import write_figures
from medusa_heads.training.runs.resumable import clear_checkpoints
from medusa_heads.training.runs.setup import Names, as_target, find_start, prepare_sets, watchers

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase


def train_draft(
    target: str | TargetModel | PreTrainedModel,
    dataset: Dataset | IterableDataset | TrainingData | Names,
    *,
    eval_dataset: Dataset | Names | None = None,
    draft: DraftArguments | None = None,
    output_dir: str | os.PathLike[str],
    training_args: TrainingArguments | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    resume_from_checkpoint: str | None = None,
    overwrite_output_dir: bool = False,
    early_stopping_patience: int | None = None,
    record: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    **data_settings: Any,
) -> PreTrainedModel:
    """Distil a draft model from a target and write it as a folder that transformers loads.

    Args:
        target: a model, or its hub id or path. It stays frozen.
        dataset: best the target's own text: see `train_heads`, whose arguments these are.
        eval_dataset: held out, likewise.
        draft: what it begins as, and how it learns.
        output_dir: beats the one in `training_args`.
        training_args: of the run. Default: those of `draft_training_arguments`.
        tokenizer: for text, and to lie beside the draft model. Default: the target's.
        resume_from_checkpoint, overwrite_output_dir, early_stopping_patience: as in `train_heads`.
        record: what else `run.yaml` should remember.
        trust_remote_code: run the code that comes with a draft model that was named.
        data_settings: other fields of `DataArguments`: `max_length`, `packing`, `streaming`, ...

    Returns:
        The best checkpoint by held-out acceptance, fp32.

    Raises:
        ValueError: a target, dataset or setting that cannot be used; the message says which. Or
            training made the draft model worse than it was, as too high a learning rate does.
        RuntimeError: the target's weights changed, which a fault of this program would be.
        SystemExit: the process got SIGTERM; a checkpoint was written first.
    """
    draft = draft or DraftArguments()
    output = Path(output_dir)
    args = copy.copy(
        training_args
        or draft_training_arguments(
            DraftOptimisationArguments(), given=draft.draft_model is not None
        )
    )
    args.output_dir = str(output)
    checkpoint = find_start(output, resume_from_checkpoint, overwrite=overwrite_output_dir)
    callbacks = watchers(args, early_stopping_patience)
    target = as_target(target, args.device)
    tokenizer = tokenizer or find_tokenizer(target.name_or_path, target.revision)
    data = prepare_sets(target, dataset, eval_dataset, data_settings, tokenizer, CHAINS[-1], args)

    set_seed(args.seed)
    model = begin_draft(target, **draft.beginning(), trust_remote_code=trust_remote_code)
    fit_rate(args, TargetModel(model).hidden_size)
    if data.is_packed:
        check_packing(TargetModel(model))
    before = target.weights_digest()
    if checkpoint is None:
        clear_checkpoints(output)

    def story() -> dict[str, Any]:
        return provenance(
            {
                "draft": asdict(draft),
                "draft_parameters": model.num_parameters(),
                "target_parameters": target.model.num_parameters(),
                **data.record(),
                "target_weights_sha256": before,
                "training_arguments": changed_arguments(args),
                **(record or {}),
            }
        )

    if checkpoint is not None:
        check_same_run(checkpoint, story())
    trainer = DraftTrainer(
        model,
        target,
        args,
        data.rows,
        data.held_out,
        objective=draft.objective(),
        own_text=_own_text(draft, model, data.known_rows, args),
        known_rows=data.known_rows,
        record=story,
        callbacks=callbacks,
    )
    outcome = trainer.train(resume_from_checkpoint=checkpoint)
    measured = trainer.predict(data.held_out, metric_key_prefix="eval").metrics or {}
    if target.weights_digest() != before:
        raise RuntimeError("the target's weights changed while its draft model was trained")

    if trainer.is_world_process_zero():
        history = story()
        figures = {
            name.removeprefix("eval_"): value
            for name, value in measured.items()
            if name.startswith(("eval_acceptance", "eval_agreement", "eval_tokens_per_step"))
        }
        save_draft(output, model, target, tokenizer=tokenizer, measured=figures, provenance=history)
        write_figures(output, trainer, outcome.metrics, measured, history)
    return model


def _own_text(
    draft: DraftArguments, model: PreTrainedModel, rows: Dataset, args: TrainingArguments
) -> OwnText | None:
    if not draft.on_policy_share:
        return None
    return OwnText(
        TargetModel(model),
        rows,
        share=draft.on_policy_share,
        refresh=draft.on_policy_refresh,
        batches_a_step=args.gradient_accumulation_steps,
        batch_size=args.per_device_train_batch_size,
        temperature=draft.on_policy_temperature,
        seed=args.seed * 1_000_003 + args.process_index,
    )
