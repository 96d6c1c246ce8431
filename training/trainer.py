"""transformers' Trainer for heads: the target runs frozen beside the model that is trained.

Shapes: B batch, T tokens, R supervised rows, K heads, D hidden.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import EvalPrediction, ProgressCallback, TrainingArguments

from medusa_heads.config import IGNORED
from medusa_heads.heads import DraftHeads
from medusa_heads.statistics import MAX_RANK
from medusa_heads.target import TargetModel
from medusa_heads.training.hidden_states import HiddenStates
from medusa_heads.training.loss_config import LossConfig
from medusa_heads.training.metrics import describe, rank_metrics
from medusa_heads.training.ranks import head_ranks
from medusa_heads.training.resumable import ResumableTrainer
from medusa_heads.training.row_blocks import rows_loss
from medusa_heads.training.rows import SupervisedRows, encode_rows, supervised_rows
from medusa_heads.training.teacher import Teacher

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import TrainerControl, TrainerState


class HeadsObjective(nn.Module):
    """The heads together with their loss: what the Trainer wraps, so that the hooks of DDP or FSDP
    see the forward that gradients come from. Its state dict is the heads' alone.
    """

    accepts_loss_kwargs = True  # the divisor is given: the Trainer must not average once more

    def __init__(self, heads: DraftHeads, objective: LossConfig, teacher: Teacher | None) -> None:
        super().__init__()
        self.heads = heads
        self.objective = objective
        self.teacher = teacher

    def forward(
        self,
        hidden_BTD: Tensor,
        inputs: Mapping[str, Tensor],
        rows: SupervisedRows,
        num_items: Tensor | int,
    ) -> Tensor:
        hidden_RD = encode_rows(self.heads, hidden_BTD, inputs, rows)
        return rows_loss(
            self.heads,
            hidden_RD,
            rows,
            objective=self.objective,
            num_items=num_items,
            teacher=None if self.teacher is None else self.teacher.reading(hidden_BTD),
        )


class HeadsTrainer(ResumableTrainer):
    """Trains heads on what a frozen target sees.

    The target is no part of the model: no checkpoint holds any of it, no optimiser knows it. During
    evaluation the heads' ranks become `eval_head0_top1`, .., `eval_tokens_per_step_16`, ...

    Args:
        heads: trained in place.
        target: on the same device.
        args: of the run.
        train_dataset: columns `input_ids` and `labels`.
        eval_dataset: likewise, held out.
        objective: what the heads learn. Default: cross-entropy.
        record: gives what the `run.yaml` in each checkpoint says.
        trained: the module that learns, with the heads as `heads`. Default: they and their loss.
        hidden_states: where the target's come from. Default: the target, run on every batch.
        kwargs: further arguments of transformers.Trainer.
    """

    def __init__(
        self,
        heads: DraftHeads,
        target: TargetModel,
        args: TrainingArguments,
        train_dataset: Dataset,
        eval_dataset: Dataset | None = None,
        *,
        objective: LossConfig | None = None,
        record: Callable[[], Mapping[str, Any]] | None = None,
        trained: nn.Module | None = None,
        hidden_states: HiddenStates | None = None,
        **kwargs: Any,
    ) -> None:
        launched = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")
        if args.fsdp or args.deepspeed or any(os.environ.get(n) == "true" for n in launched):
            raise ValueError(
                "heads are trained whole in each process, not under FSDP or DeepSpeed: launch with "
                "configs/accelerate/ddp.yaml, and spread the target with shard_target"
            )
        if args.n_gpu > 1:
            # DataParallel would copy the heads to every GPU, but not the target.
            args._n_gpu = 1
        target.freeze()
        self.target = target
        self.record = record
        self.hidden_states = hidden_states or HiddenStates(target)
        if trained is None:
            objective = objective or LossConfig()
            teacher = Teacher.from_target(target) if objective.needs_teacher else None
            trained = HeadsObjective(heads, objective, teacher)
        super().__init__(
            model=trained,
            args=args,
            data_collator=self.hidden_states.collate,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            compute_metrics=_compute_metrics,
            **kwargs,
        )
        if not args.disable_tqdm:
            self.remove_callback(ProgressCallback)
            self.add_callback(ReadableProgress)
        for callback in self.hidden_states.callbacks:
            self.add_callback(callback)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The heads' loss over `num_items_in_batch` generated tokens, those of the whole step."""
        counted = num_items_in_batch is not None
        items = num_items_in_batch if counted else (inputs["labels"] != IGNORED).sum()
        loss = self._loss(model, inputs, items)
        if counted and self.args.average_tokens_across_devices:
            # The count is over all processes, and DDP averages gradients: undo the average.
            loss = loss * self.accelerator.num_processes
        return (loss, {}) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Loss, ranks_BTK of the true tokens (-100 where there is none) and labels_BT."""
        inputs = self._prepare_inputs(inputs)
        labels_BT = inputs["labels"]
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, hidden_BTD, rows = self._measure(model, inputs, (labels_BT != IGNORED).sum())
            if prediction_loss_only:
                return loss, None, None
            heads = self.accelerator.unwrap_model(model).heads
            hidden_RD = encode_rows(heads, hidden_BTD, inputs, rows)
            ranks_RK = head_ranks(heads, hidden_RD, rows, MAX_RANK)
        ranks_BTK = labels_BT.new_full((*labels_BT.shape, ranks_RK.shape[1]), IGNORED)
        ranks_BTK.view(-1, ranks_RK.shape[1])[rows.positions_R] = ranks_RK
        return loss, ranks_BTK, labels_BT

    def _loss(self, model: nn.Module, inputs: dict[str, Any], items: Any) -> Tensor:
        """The loss of a batch, over so many tokens."""
        return self._measure(model, inputs, items)[0]

    def _measure(
        self, model: nn.Module, inputs: dict[str, Any], items: Any
    ) -> tuple[Tensor, Tensor, SupervisedRows]:
        """The loss of a batch, and what the heads read where."""
        hidden_BTD, rows = self._supervised(inputs)
        return model(hidden_BTD, inputs, rows, items), hidden_BTD, rows

    def _supervised(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, SupervisedRows]:
        """The target's hidden states of a batch, and where heads learn from them."""
        num_heads = self.accelerator.unwrap_model(self.model).heads.config.num_heads
        positions_BT = inputs.get("position_ids")
        rows = supervised_rows(inputs["input_ids"], inputs["labels"], num_heads, positions_BT)
        return self.hidden_states.of(inputs), rows


class ReadableProgress(ProgressCallback):
    """The Trainer's progress bars, with lines of a few figures in place of whole dictionaries."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or logs is None:
            return
        place = f"step {state.global_step}/{state.max_steps}"
        if "eval_head0_top1" in logs:
            tqdm.write(f"{place}  {describe(logs)}")
        elif "loss" in logs:
            tqdm.write(
                f"{place}  loss {float(logs['loss']):.3f}  "
                f"learning rate {float(logs['learning_rate']):.2e}"
            )


def _compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    return rank_metrics(torch.as_tensor(prediction.predictions))
