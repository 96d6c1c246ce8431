"""transformers' Trainer for heads.

Shapes: B batch, T tokens, R supervised rows, K heads, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import EvalPrediction, TrainingArguments

from medusa_heads.heads import DraftHeads
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.arguments.rates import by_width, rate_groups
from medusa_heads.training.hidden.states import HiddenStates
from medusa_heads.training.loss.row_blocks import rows_loss
from medusa_heads.training.loss.rows import SupervisedRows, encode_rows, supervised_rows
from medusa_heads.training.loss.teacher import Teacher
from medusa_heads.training.measure.fresh_heads import Comparison, FreshHeads, plain_loss
from medusa_heads.training.measure.metrics import describe, rank_metrics
from medusa_heads.training.measure.ranks import head_ranks
from medusa_heads.training.runs.trainer import TaughtTrainer
from medusa_heads.trees.statistics import MAX_RANK

if TYPE_CHECKING:
    from datasets import Dataset


class HeadsObjective(nn.Module):
    """The heads together with their loss: what the Trainer wraps, so that the hooks of DDP or FSDP
    see the forward that gradients come from. Its state dict is the heads' alone.
    """

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


class HeadsTrainer(TaughtTrainer):
    """Trains heads on what a frozen target sees.

    During evaluation the heads' ranks become `eval_head0_top1`, .., `eval_tokens_per_step_16`, ...

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

    rates = "learning_rate"  # settings of what learns
    unusable: ClassVar[Mapping[str, Any]] = {
        **TaughtTrainer.unusable,
        "neftune_noise_alpha": None,
        "gradient_checkpointing": False,
    }

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
        self.hidden_states = hidden_states or HiddenStates(target)
        self._comparison = Comparison("the heads worse than fresh ones", self.rates)
        self._compared = (heads, FreshHeads.beside(heads, target))  # no parts of what learns
        if trained is None:
            target.freeze()  # before the teacher is read off it
            objective = objective or LossConfig()
            teacher = Teacher.from_target(target) if objective.needs_teacher else None
            trained = HeadsObjective(heads, objective, teacher)
        super().__init__(
            trained,
            target,
            args,
            record=record,
            describe=describe,
            data_collator=self.hidden_states.collate,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            compute_metrics=_compute_metrics,
            **kwargs,
        )
        for callback in self.hidden_states.callbacks:
            self.add_callback(callback)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # What goes on from a checkpoint finds all that it has seen, and computes it in no other
        # batches, which round otherwise.
        self.hidden_states.flush()
        super()._save_checkpoint(model, trial)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As transformers', but where the rate is a default each part gets what suits it."""
        if self.optimizer is None and by_width(self.args):
            optimizer_cls, options = self.get_optimizer_cls_and_kwargs(self.args)
            trained: Any = self.model
            names = set(self.get_decay_parameter_names(trained))
            decaying = [p for name, p in trained.named_parameters() if name in names]
            groups = rate_groups(trained.heads, self.args, decaying)
            self.optimizer = optimizer_cls(groups, **options)
        return super().create_optimizer(model)

    def _loss(self, model: nn.Module, inputs: dict[str, Any], items: Any) -> Tensor:
        """The loss of a batch.

        Raises:
            ValueError: training makes the heads worse than they began.
        """
        loss, hidden_BTD, rows = self._measure(model, inputs, items)
        self._compare(lambda: (hidden_BTD, hidden_BTD), inputs, rows)
        return loss

    def _compare(
        self,
        hidden: Callable[[], tuple[Tensor, Tensor]],
        inputs: Mapping[str, Tensor],
        rows: SupervisedRows,
    ) -> None:
        """Where it is time, compare the heads with fresh ones on a batch.

        Args:
            hidden: gives hidden_BTD that the heads read, and those that fresh ones would.
            inputs, rows: the batch, and where heads learn in it.

        Raises:
            ValueError: training makes the heads worse than they began.
        """
        if self._comparison.is_due(self.state.global_step):
            pairs = zip(self._compared, hidden(), strict=True)
            losses = [plain_loss(heads, read_BTD, inputs, rows) for heads, read_BTD in pairs]
            self._check_progress(self._comparison, torch.stack(losses)[:, None])

    def _judge(
        self, model: nn.Module, inputs: dict[str, Any], items: Any
    ) -> tuple[Tensor, Callable[[], tuple[Tensor, Tensor]]]:
        """The figures are ranks_RK of the true tokens."""
        loss, hidden_BTD, rows = self._measure(model, inputs, items)

        def ranks() -> tuple[Tensor, Tensor]:
            heads = self.accelerator.unwrap_model(model).heads
            hidden_RD = encode_rows(heads, hidden_BTD, inputs, rows)
            return rows.positions_R, head_ranks(heads, hidden_RD, rows, MAX_RANK)

        return loss, ranks

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


def _compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    return rank_metrics(torch.as_tensor(prediction.predictions))
