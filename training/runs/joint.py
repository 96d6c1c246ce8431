"""transformers' Trainer for heads and an adapter of their target together.

Shapes: B batch, T tokens, N positions with a supervised next token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainingArguments

from medusa_heads.heads import DraftHeads
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.joint_config import JointConfig
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.arguments.rates import rate_groups
from medusa_heads.training.loss.own import own_rows
from medusa_heads.training.loss.rows import SupervisedRows, supervised_rows
from medusa_heads.training.measure.metrics import OWN_FIGURES, own_figures
from medusa_heads.training.runs.heads_trainer import HeadsTrainer
from medusa_heads.training.runs.joint_objective import JointObjective

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftModel
    from transformers import TrainerControl, TrainerState
    from transformers.trainer_utils import EvalLoopOutput

HEADS_TO_ADAPTER_RATE = 4  # the paper's


class JointTrainer(HeadsTrainer):
    """Trains heads, and after a warm-up an adapter of their target with them.

    Evaluation measures what HeadsTrainer's does, and the target's own loss per token:
    `eval_target_loss` with the adapter, `eval_target_loss_before` without, and `eval_target_kl`,
    how far its predictions have moved.

    Args:
        heads: trained in place.
        target: on the same device, carrying `model`'s adapter.
        model: what `adapted` gave.
        args: of the run; its learning rate is the heads'.
        train_dataset: columns `input_ids` and `labels`.
        eval_dataset: likewise, held out.
        config: of the adapter and the loss.
        objective: the heads' part of the loss.
        kwargs: further arguments of HeadsTrainer.
    """

    rates = "learning_rate or lora_learning_rate"
    unusable: ClassVar[Mapping[str, Any]] = {
        name: unset
        for name, unset in HeadsTrainer.unusable.items()
        if name != "gradient_checkpointing"
    }

    def __init__(
        self,
        heads: DraftHeads,
        target: TargetModel,
        model: PeftModel,
        args: TrainingArguments,
        train_dataset: Dataset,
        eval_dataset: Dataset | None = None,
        *,
        config: JointConfig,
        objective: LossConfig | None = None,
        **kwargs: Any,
    ) -> None:
        joint = JointObjective(heads, target, model, config, objective or LossConfig())
        super().__init__(heads, target, args, train_dataset, eval_dataset, trained=joint, **kwargs)
        joint.adapter.requires_grad_(True)  # which freezing the target took away
        self.joint = joint
        self._own_sums: list[Tensor] = []
        if not args.disable_tqdm:
            self.add_callback(OwnLossLine)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Groups, each with its own rate: the heads, then the adapter."""
        if self.optimizer is None:
            optimizer_cls, options = self.get_optimizer_cls_and_kwargs(self.args)
            rate = self.joint.settings.learning_rate
            if rate is None:
                rate = self.args.learning_rate / HEADS_TO_ADAPTER_RATE
            heads = self.joint.heads
            self.optimizer = optimizer_cls(
                [
                    *rate_groups(heads, self.args, decaying=list(heads.parameters())),
                    {
                        "params": list(self.joint.adapter.parameters()),
                        "weight_decay": self.args.weight_decay,
                        "lr": rate,
                    },
                ],
                **options,
            )
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """The run's course; where it is a function of the step, the adapter's rate rises again from
        its own first step on."""
        fresh = self.lr_scheduler is None
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if fresh and isinstance(scheduler, LambdaLR):
            course = scheduler.lr_lambdas[0]
            first = self.joint.settings.warmup(num_training_steps)
            rise = max(self.args.get_warmup_steps(num_training_steps), 1)

            def of_adapter(step: int) -> float:
                return float(course(step)) * min(max((step - first) / rise, 0.0), 1.0)

            scheduler.lr_lambdas[-1] = of_adapter
            group = scheduler.optimizer.param_groups[-1]
            group["lr"] = scheduler.base_lrs[-1] * of_adapter(0)
        return scheduler

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As in transformers, with the target's own losses among the metrics."""
        self._own_sums.clear()
        output = super().evaluation_loop(*args, **kwargs)
        if self._own_sums and output.metrics is not None:
            tokens, *sums = torch.cat(self._own_sums).double().sum(dim=0).tolist()
            prefix = kwargs.get("metric_key_prefix", "eval")
            for name, total in zip(OWN_FIGURES, sums, strict=True):
                output.metrics[f"{prefix}_target_{name}"] = total / max(tokens, 1)
        return output

    def _loss(self, model: nn.Module, inputs: dict[str, Any], items: Any) -> Tensor:
        alone = self.state.global_step < self.joint.settings.warmup(self.state.max_steps)
        rows = self._rows(inputs)
        loss: Tensor = model(inputs, rows, items, heads_alone=alone)
        self._compare(lambda: self._read_twice(inputs), inputs, rows)
        return loss

    @torch.no_grad()
    def _read_twice(self, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """hidden_BTD with the adapter and without: an adapter gone wrong would spoil fresh heads'
        loss as well."""
        reading = self.joint.read(inputs, before=True)
        assert reading.before_BTD is not None
        return reading.now_BTD, reading.before_BTD

    def _measure(
        self, model: nn.Module, inputs: dict[str, Any], items: Any
    ) -> tuple[Tensor, Tensor, SupervisedRows]:
        rows, own = self._rows(inputs), own_rows(inputs["labels"], inputs.get("position_ids"))
        reading = self.joint.read(inputs, before=True)
        losses_N, figures_N3 = self.joint.measure(reading, own)
        batch, tokens = inputs["labels"].shape
        sums_B4 = figures_N3.new_zeros(batch, 1 + len(OWN_FIGURES))
        figures_N4 = torch.cat([torch.ones_like(figures_N3[:, :1]), figures_N3], dim=1)
        sums_B4.index_add_(0, own.positions_N // tokens, figures_N4)
        # Row by row, because the last rows of the last batch may be there twice.
        self._own_sums.append(self.accelerator.gather_for_metrics(sums_B4).cpu())
        loss = self.joint.loss(reading, losses_N, inputs, rows, items)
        return loss, reading.now_BTD, rows

    def _rows(self, inputs: Mapping[str, Tensor]) -> SupervisedRows:
        num_heads = self.joint.heads.config.num_heads
        positions_BT = inputs.get("position_ids")
        return supervised_rows(inputs["input_ids"], inputs["labels"], num_heads, positions_BT)


class OwnLossLine(TrainerCallback):
    """A readable line of how the target itself does, after each evaluation."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write it, where these are the figures of an evaluation."""
        figures = None if logs is None else own_figures(logs, "eval")
        if state.is_world_process_zero and figures is not None:
            tqdm.write(describe_own(figures))


def describe_own(figures: Mapping[str, float]) -> str:
    """The target's own held-out loss, with and without the adapter."""
    now, before = figures["loss"], figures["loss_before"]
    return (
        f"the target's own held-out loss {now:.4f}, without adapter {before:.4f} "
        f"({now / before - 1:+.2%}), KL {figures['kl']:.4f}"
    )
