"""What runs of heads and of draft models do alike: from a folder, a target and text to a story that
is told, with a target that is proved unchanged."""

from __future__ import annotations

import copy
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from datasets import Dataset, IterableDataset
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import PredictionOutput

from medusa_heads.checkpoint.files import remove_trained
from medusa_heads.checkpoint.provenance import provenance
from medusa_heads.files import expanded, replace_json
from medusa_heads.target.fingerprint import weights_sums
from medusa_heads.target.recurrent import is_recurrent
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.batch import check_filled
from medusa_heads.training.arguments.data import DataArguments, corpus_names
from medusa_heads.training.arguments.rates import fit_schedule
from medusa_heads.training.arguments.target import TargetArguments
from medusa_heads.training.arguments.training import use_one_gpu
from medusa_heads.training.arguments.usable import check_usable
from medusa_heads.training.data.prepare import TrainingData, load_corpora, prepare_data
from medusa_heads.training.hidden.launched import Sharding
from medusa_heads.training.hidden.sharding import (
    any_process,
    digest_for_all,
    in_all,
    is_sharded,
    load_to_spread,
    several_processes,
    shard_target,
)
from medusa_heads.training.hidden.tensor_parallel import PartedTarget
from medusa_heads.training.runs.callbacks import Interruptions, Pace, StopInTime
from medusa_heads.training.runs.record import (
    METRICS_FILE,
    NOT_KEPT,
    changed_arguments,
    check_same_run,
    mean_loss,
    target_dtype_before,
    write_run,
)
from medusa_heads.training.runs.resumable import checkpoints, find_start, lies_in, remove_checkpoint
from medusa_heads.training.runs.trainer import TaughtTrainer

logger = logging.getLogger(__name__)

Names = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
GivenTarget = str | os.PathLike[str] | TargetModel | PreTrainedModel
GivenText: TypeAlias = Dataset | IterableDataset | TrainingData | Names


class Run:
    """A run of training; arguments are as those of `train_heads`."""

    def __init__(
        self,
        target: GivenTarget,
        dataset: GivenText,
        eval_dataset: Dataset | Names | None,
        data_settings: Mapping[str, Any],
        *,
        output_dir: str | os.PathLike[str],
        args: TrainingArguments,
        tokenizer: PreTrainedTokenizerBase | None,
        num_heads: int,
        resume_from_checkpoint: str | None,
        overwrite_output_dir: bool,
        early_stopping_patience: int | None,
        callbacks: Sequence[TrainerCallback] = (),
        sharding: Sharding | None = None,
        features: Sequence[int] | None = None,
    ) -> None:
        if not isinstance(args, TrainingArguments):
            raise ValueError(
                "training_args must be transformers.TrainingArguments (to_training_arguments makes "
                f"them of OptimisationArguments), got {type(args).__name__}"
            )
        check_usable(args)
        self.output = expanded(output_dir)
        self.args = copy.copy(args)
        self.args.output_dir = str(self.output)
        fit_schedule(self.args)
        use_one_gpu(self.args)  # by which batches are counted, also of states that are cached
        self._overwrite = overwrite = overwrite_output_dir
        target = os.fspath(target) if isinstance(target, os.PathLike) else target
        name = target if isinstance(target, str) else target.name_or_path or ""
        self.checkpoint = find_start(self.output, resume_from_checkpoint, name, overwrite=overwrite)
        self.pace = Pace()
        watching = [self.pace, *_watchers(self.args, early_stopping_patience), *callbacks]
        before = target_dtype_before(self.checkpoint)  # other numbers would be another target
        plain = as_target(target, self.args.device, sharding, before)
        self.target = plain.with_features(features)
        self.data = prepare_sets(
            plain, dataset, eval_dataset, data_settings, tokenizer, num_heads, self.args
        )
        if is_sharded(self.target) and is_recurrent(self.target.config) and self.data.is_packed:
            raise ValueError(
                "a target with a recurrent state reads packed documents in several forwards, and "
                "processes that share one must all run it equally often: leave packing, or "
                "what spreads it (shard_target, tensor_parallel, FSDP), off"
            )
        self.sets = self.data.rows, self.data.held_out
        self.hooks: dict[str, Any] = {
            "record": self.story,
            "callbacks": watching,
            "tokenizer": self.data.tokenizer,
        }
        set_seed(self.args.seed)

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Note what the story should tell of the run; refuse to go on from another one's
        checkpoint."""
        check_filled(self.args, None if self.data.is_stream else len(self.data.rows))
        self._facts = facts
        if self.args.process_index == 0:
            for sentence in self.data.warnings:
                logger.warning(sentence)
        self.target_sha256 = digest_for_all(self.target)
        self._sums = weights_sums(self.target.model)
        if self.checkpoint is not None:
            check_same_run(self.checkpoint, self.story())

    def story(self) -> dict[str, Any]:
        """What is run on what, as far as is known by now."""
        return provenance(
            {
                **self._facts,
                **self.data.record(),
                "target_weights_sha256": self.target_sha256,
                "target_loaded": _how_loaded(self.target, self.args.world_size),
                "training_arguments": changed_arguments(self.args),
            }
        )

    def learn(
        self, trainer: TaughtTrainer, what: str, *, with_adapter: bool = True
    ) -> tuple[Mapping[str, float], PredictionOutput]:
        """Train and measure; the metrics of the training, and what was measured. Raises
        RuntimeError where the target's weights changed, which a fault of this program would be."""
        self._make_room()
        outcome = trainer.train(resume_from_checkpoint=self.checkpoint)
        measured = trainer.predict(self.data.held_out, metric_key_prefix="eval")
        changed = weights_sums(self.target.model, with_adapter=with_adapter) != self._sums
        if any_process(changed, self.args.device):
            raise RuntimeError(f"the target's weights changed while its {what} trained")
        return outcome.metrics, measured

    def _make_room(self) -> None:
        """Remove what an earlier run has left, now that nothing of this one is refused any more."""
        if lies_in(self.checkpoint, self.output):
            return
        if self._overwrite:
            remove_trained(self.output)
        # Which would be mistaken for this run's own; last, because they say whose the others are.
        for checkpoint in checkpoints(self.output):
            remove_checkpoint(checkpoint)

    def end(self, write: Callable[[], object]) -> None:
        """Let the first process write what is left of the run. The others wait until they can read
        it, and end where it cannot be written."""
        in_all(write if self.args.process_index == 0 else lambda: None)

    def write_figures(
        self,
        trainer: TaughtTrainer,
        trained: Mapping[str, float],
        measured: Mapping[str, float],
        story: Mapping[str, Any],
    ) -> dict[str, Any]:
        """`metrics.json`, of the training and the last evaluation, and `run.yaml`; returns what the
        former holds."""
        state, warnings = trainer.state, [*self.data.warnings, *trainer.health.said]
        told = {"step_runtime": self.pace.median(), "warnings": warnings}
        figures = {**trained, **told, **measured}
        with_best = trainer.args.load_best_model_at_end and state.best_model_checkpoint
        metrics = {
            **{name: figure for name, figure in figures.items() if name not in NOT_KEPT},
            "train_loss": mean_loss(state.log_history),
            "epoch": state.epoch,
            "steps": state.global_step,
            # Of the heads that are left: the last where no best were to be loaded, or could.
            "best_step": state.best_global_step if with_best else None,
        }
        replace_json(self.output / METRICS_FILE, metrics)
        write_run(self.output, story)
        return metrics


def _how_loaded(target: TargetModel, processes: int) -> dict[str, Any]:
    """In what form the target ran, and where: what was asked for, as it came to be."""
    modules = Counter(map(str, (getattr(target.model, "hf_device_map", None) or {}).values()))
    spread = "tensor_parallel" if isinstance(target, PartedTarget) else "shard_target"
    return {
        "revision": target.revision,
        "dtype": str(target.dtype).removeprefix("torch."),
        "attn_implementation": target.config._attn_implementation,
        "processes": processes,
        "shared_by": spread if is_sharded(target) else None,
        "modules_by_device": dict(modules) if len(modules) > 1 else None,
    }


def _watchers(args: TrainingArguments, patience: int | None) -> list[TrainerCallback]:
    """Callbacks that end a run when told to, or after so many evaluations without a new best."""
    if patience is None:
        return [Interruptions()]
    if patience < 1:
        raise ValueError(f"early_stopping_patience must be at least 1, got {patience}")
    if not args.load_best_model_at_end:
        raise ValueError(
            "early_stopping_patience ends with the best: leave load_best_model_at_end on"
        )
    return [Interruptions(), StopInTime(patience)]


def as_target(
    target: str | TargetModel | PreTrainedModel,
    device: torch.device,
    sharding: Sharding | None = None,
    dtype: str | None = None,
) -> TargetModel:
    """The target, frozen and on the device of the run, or spread over its processes; one that is
    named in a dtype, by default the one that suits. Raises ValueError: there is no such target, or
    it cannot be spread."""
    if isinstance(target, str) and sharding is not None:
        target = load_to_spread(TargetArguments(target), sharding)
    elif isinstance(target, str):
        use: Any = None if several_processes() else "batch"  # each of several would measure it
        target = TargetModel.from_pretrained(target, device=device, dtype=dtype or "auto", use=use)
    elif not isinstance(target, TargetModel):
        target = TargetModel(target)
    target.freeze()
    if sharding is not None and not is_sharded(target):
        shard_target(target, device, sharding)
    # A target that accelerate spread over devices, or that is sharded, stays where it is.
    stays = is_sharded(target) or getattr(target.model, "hf_device_map", None) is not None
    if not stays and target.device != device:  # another GPU is another device
        target.model.to(device)  # type: ignore[arg-type]
    if getattr(target.model, "hf_quantizer", None) is not None:
        # compressed-tensors unpacks weights in their first forward, which is no change.
        target.hidden(torch.zeros(1, 1, dtype=torch.long, device=target.device))
    return target


def prepare_sets(
    target: TargetModel,
    dataset: GivenText,
    eval_dataset: Dataset | Names | None,
    data_settings: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    num_heads: int,
    args: TrainingArguments,
) -> TrainingData:
    """Rows to train on and held-out rows; streams are then read by each process for itself. Raises
    ValueError: a corpus or setting that cannot be used."""
    data: Any = dataset
    if not isinstance(data, TrainingData):
        given = {"dataset": dataset, "eval_dataset": eval_dataset}
        in_memory: dict[str, Any] = {
            name: value for name, value in given.items() if hasattr(value, "column_names")
        }
        names: dict[str, Any] = {
            name: corpus_names(value, name)
            for name, value in given.items()
            if name not in in_memory and (name == "dataset" or value is not None)
        }
        settings = DataArguments(**names, **data_settings)
        corpus, held_out = load_corpora(settings, **in_memory)
        limits: dict[str, Any] = {"num_heads": num_heads, "max_steps": args.max_steps}
        data = prepare_data(target, corpus, held_out, tokenizer, settings, seed=args.seed, **limits)
    accelerator_config: Any = args.accelerator_config
    if data.is_stream or accelerator_config.dispatch_batches:
        # Batches of rows of unequal lengths cannot be joined by one process and dealt out.
        args.accelerator_config = replace(accelerator_config, dispatch_batches=False)
    return data
