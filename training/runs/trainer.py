"""transformers' Trainer for a model that a frozen target teaches: the target runs beside it, and
checkpoints survive a kill (see `resumable.py`).

Shapes: B batch, T tokens, P positions of a batch (B * T), R measured positions, F figures of each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import ProgressCallback, Trainer, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput, TrainOutput

from medusa_heads.config import IGNORED
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.rates import steps_of_schedule
from medusa_heads.training.arguments.training import use_one_gpu
from medusa_heads.training.data.pack import hidden_of
from medusa_heads.training.hidden.launched import launched_sharding, learning_whole, learns_next
from medusa_heads.training.hidden.sharding import is_sharded
from medusa_heads.training.hidden.states import DrawnOrder
from medusa_heads.training.measure.fresh_heads import Comparison
from medusa_heads.training.measure.health import Health
from medusa_heads.training.runs import resumable
from medusa_heads.training.runs.callbacks import BestSoFar, Interruptions, ReadableProgress
from medusa_heads.training.runs.record import write_run

Inputs = dict[str, Any]
Judged = tuple[Tensor, Tensor, Tensor]
"""The loss of a held-out batch, positions_R of it, and figures_RF that were measured there."""


class TaughtTrainer(Trainer, ABC):
    """Trains what fits a target, which is no part of the model: no checkpoint holds any of it, no
    optimiser knows it. Model and target are on the same device. Raises ValueError: the launch would
    take the model apart, or wants a spread target and got a whole one; or the run is given a
    setting of transformers that has no place in it.

    Attributes:
        record: gives what the `run.yaml` in each checkpoint says, as plain values.
        worse, rates: what a run that is stopped has done, and the settings that may be too high.
        metrics_of: what an evaluation says, out of figures_BTF.
        describe: the line that the screen shows of its metrics, None where they are others.
    """

    # Settings that would be dropped in silence or end in a fault, and what they are by default.
    unusable: ClassVar[Mapping[str, Any]] = {
        "label_smoothing_factor": 0.0,
        "prediction_loss_only": False,
        "batch_eval_metrics": False,
        "eval_do_concat_batches": True,
        # Whose dtype what was trained would take on, and be stored in.
        "bf16_full_eval": False,
        "fp16_full_eval": False,
        "push_to_hub": False,  # the folder as it is, with all that a run leaves there
        "parallelism_config": None,  # the launch's says how the target is spread
        "save_only_model": False,  # nothing could be resumed, and `auto` would begin anew
        "enable_jit_checkpoint": False,  # SIGTERM is answered here: see `Interruptions`
    }
    # The same of arguments of its own: the model is given, its loss and figures are made here.
    unread = "compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics", "model_init"

    worse: ClassVar[str]
    rates: ClassVar[str] = "learning_rate"
    metrics_of: Callable[[Tensor], dict[str, float]]
    describe: Callable[[Mapping[str, Any]], str | None]

    def __init__(
        self,
        model: nn.Module,
        target: TargetModel,
        args: TrainingArguments,
        train_dataset: Dataset,
        eval_dataset: Dataset | None = None,
        *,
        record: Callable[[], Mapping[str, Any]] | None = None,
        tokenizer: Any = None,
        **kwargs: Any,
    ) -> None:
        self.check_arguments(args)
        if given := [name for name in self.unread if kwargs.get(name) is not None]:
            raise ValueError(f"{given[0]} has no place in this training: leave it out")
        if launched_sharding() is not None and not is_sharded(target):
            raise ValueError(
                "this is an FSDP launch, and the target is whole in this process: spread it with "
                "shard_target first, or launch with configs/accelerate/ddp.yaml"
            )
        # Every resumable checkpoint holds the arguments: no token that nothing here reads.
        args.hub_token = None
        # Inputs are made from these columns, not by the model's own forward.
        args.remove_unused_columns = False
        use_one_gpu(args)
        target.freeze()
        self.target = target
        self.record, self.tokenizer = record, tokenizer
        self._best = BestSoFar(record)  # to be known before others ask
        self.health = Health(target)
        self._comparison = Comparison(self.worse, self.rates)
        self._sums: defaultdict[str, list[Tensor]] = defaultdict(list)  # of an evaluation's batches
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            compute_metrics=self._metrics,
            **{**kwargs, "callbacks": [self._best, *(kwargs.get("callbacks") or [])]},
        )
        self.add_callback(self.health)
        self.model_accepts_loss_kwargs = True  # the divisor is given: no second average
        if not args.disable_tqdm:
            self.remove_callback(ProgressCallback)
            self.add_callback(ReadableProgress(self.describe))

    @classmethod
    def check_arguments(cls, args: TrainingArguments) -> None:
        """Raises ValueError for what has no place in this training, before a target is loaded."""
        if args.fsdp or args.deepspeed:
            raise ValueError(
                "heads and draft models are trained whole in each process: leave fsdp and "
                "deepspeed out of training_args, and launch with configs/accelerate/fsdp.yaml, "
                "which spreads the target of heads, or with configs/accelerate/ddp.yaml"
            )
        for name, unset in cls.unusable.items():
            if getattr(args, name, unset) != unset:
                raise ValueError(
                    f"training_args: {name} has no place in this training: leave it out, got "
                    f"{getattr(args, name)!r}"
                )

    @abstractmethod
    def _loss(self, model: nn.Module, inputs: Inputs, items: Any) -> Tensor:
        """The loss of a batch, over so many tokens; may stop a run that makes worse what learns."""

    def _read(self, inputs: Inputs) -> Tensor | None:
        """hidden_BTD of the target as it was before, None where a batch is no text of the corpus;
        all processes ask together."""
        return hidden_of(self.target, inputs)

    @abstractmethod
    def _judge(self, model: nn.Module, inputs: Inputs, items: Any) -> Judged:
        """The loss of a held-out batch, and its figures."""

    def create_accelerator_and_postprocess(self) -> None:
        """As transformers', without FSDP: a launch's is for the target, which has it already."""
        with learning_whole():
            super().create_accelerator_and_postprocess()

    def get_train_dataloader(self) -> Any:
        """As transformers', without a list of all rows in each process."""
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return resumable.with_order(super().get_train_dataloader(), self._order, seed)

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers'; `dataloader_drop_last` leaves no held-out row out."""
        drop_last = self.args.dataloader_drop_last
        self.args.dataloader_drop_last = drop_last and kwargs.get("is_training", False)
        try:
            return super()._get_dataloader(*args, **kwargs)
        finally:
            self.args.dataloader_drop_last = drop_last

    def _order(self, rows: int, seed: int) -> DrawnOrder:
        return DrawnOrder(rows, seed)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> TrainOutput:
        """As transformers', which would take one step more where a finished run is resumed."""
        checkpoint = resume_from_checkpoint if isinstance(resume_from_checkpoint, str) else None
        self._best.checkpoint = checkpoint
        if checkpoint and (state := resumable.finished_state(checkpoint, self.args)):
            resumable.say_ended(state, self.args)
            self._load_from_checkpoint(checkpoint)
            self.state, state.is_world_process_zero = state, self.is_world_process_zero()
            for callback in (self._best, self.health):
                callback.on_train_begin(self.args, state, self.control)
            if self.args.load_best_model_at_end and state.best_model_checkpoint:
                self._load_best_model()
            return TrainOutput(state.global_step, 0.0, {})
        learns_next(self.model_wrapped, self.accelerator.num_processes)
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        except KeyboardInterrupt:
            if self.is_world_process_zero():
                resumable.say_how_to_go_on(Path(self._get_output_dir(trial=None)))
            raise
        finally:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, Interruptions):
                    callback.hand_back()

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """As transformers', also of a run that ends within its warm-up."""
        with steps_of_schedule(self.args, num_training_steps) as steps:
            return super().create_scheduler(steps, optimizer)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As transformers', at the rates of now."""
        if checkpoint is not None:
            with resumable.with_rates_of_now(checkpoint, self.optimizer, self.lr_scheduler):
                super()._load_optimizer_and_scheduler(checkpoint)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Inputs,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss over `num_items_in_batch` generated tokens, those of the whole step."""
        counted = num_items_in_batch is not None
        items = num_items_in_batch if counted else (inputs["labels"] != IGNORED).sum()
        first = self.is_world_process_zero()
        self.health.before_loss(lambda: self._read(inputs), inputs, self.accelerator.reduce, first)
        loss = self._loss(model, inputs, items)
        self.health.after_loss(loss)
        if counted and self.args.average_tokens_across_devices:
            # The count is over all processes, and DDP averages gradients: undo the average.
            loss = loss * self.accelerator.num_processes
        return (loss, {}) if return_outputs else loss

    def _metrics(self, given: Any) -> dict[str, Any]:
        return dict(self.metrics_of(torch.as_tensor(given.predictions)))

    def _check_progress(self, losses_2F: Tensor) -> None:
        """Hand on the losses of a comparison, averaged so that all processes stop together."""
        losses_2F = self.accelerator.reduce(losses_2F, reduction="mean")
        self._comparison.check(losses_2F, self.state.global_step, self.args.learning_rate)

    def prediction_step(
        self, model: nn.Module, inputs: Inputs, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, figures_BTF (-100 where nothing is measured) and labels_BT."""
        inputs = self._prepare_inputs(inputs)
        labels_BT = inputs["labels"] = resumable.once(inputs["labels"], self.accelerator)
        items = (labels_BT != IGNORED).sum()
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, positions_R, figures_RF = self._judge(model, inputs, items)
            self._add_up("loss", loss * items, items)
            self.health.after_held_out(loss, lambda: self._read(inputs))
        figures_PF = figures_RF.new_full((labels_BT.numel(), figures_RF.shape[1]), IGNORED)
        figures_PF[positions_R] = figures_RF
        return loss, figures_PF.view(*labels_BT.shape, -1), labels_BT

    def get_batch_samples(
        self, epoch_iterator: Iterator[Inputs], num_batches: int, device: torch.device
    ) -> tuple[list[Inputs], Tensor | int | None]:
        """As transformers'; several processes learn nothing from rows that fill their last batch
        up, as one would not."""
        once = partial(resumable.once, accelerator=self.accelerator)
        batches = (each | {"labels": once(each["labels"])} for each in epoch_iterator)
        return super().get_batch_samples(batches, num_batches, device)

    def _add_up(self, name: str, total: Tensor, count: Tensor) -> None:
        """Add to a metric that is a mean over all of an evaluation, whatever its batches are."""
        pair = torch.stack([total.float(), count.float()])
        self._sums[name].append(self.accelerator.reduce(pair, reduction="sum"))

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As in transformers, with a loss per token in place of a mean over batches."""
        self._sums.clear()
        output = super().evaluation_loop(*args, **kwargs)
        for name, pairs in self._sums.items():
            total, count = torch.stack(pairs).cpu().double().sum(dim=0).tolist()
            if output.metrics is not None:
                prefix = kwargs.get("metric_key_prefix", "eval")
                output.metrics[f"{prefix}_{name}"] = total / max(count, 1)
        return output

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """As transformers'; where the run is to end with the best, it is saved at once, also
        between two checkpoints."""
        better = super()._determine_best_metric(metrics, trial)
        self.control.should_save |= better and self.args.load_best_model_at_end
        return better

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        checkpoint = Path(self._get_output_dir(trial=trial)) / name
        if self.args.should_save:
            resumable.remove_checkpoint(checkpoint)
        self.accelerator.wait_for_everyone()
        with resumable.writing(checkpoint):
            super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        # The last that every process writes; what follows is trainer_state.json.
        super()._save_rng_state(output_dir)
        if self.record is not None and self.args.should_save:
            write_run(output_dir, self.record())
        self.accelerator.wait_for_everyone()
