"""transformers' Trainer for heads.

Shapes: B batch, T tokens, R supervised rows, K heads, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from medusa_heads.heads import DraftHeads
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.arguments.rates import by_width, rate_groups
from medusa_heads.training.arguments.renamed import CHECKPOINTING
from medusa_heads.training.hidden.states import DrawnOrder, HiddenStates
from medusa_heads.training.loss.heads import batch_loss
from medusa_heads.training.loss.rows import read_rows
from medusa_heads.training.loss.teacher import Teacher
from medusa_heads.training.measure.fresh_heads import FreshHeads
from medusa_heads.training.measure.metrics import (
    accepted_text,
    best_tree,
    describe,
    head_ranks,
    rank_metrics,
)
from medusa_heads.training.runs.trainer import Inputs, Judged, TaughtTrainer
from medusa_heads.trees.statistics import MAX_RANK


class HeadsObjective(nn.Module):
    """The heads together with their loss: what the Trainer wraps, so that the hooks of DDP see the
    forward that gradients come from. Its state dict is the heads' alone."""

    def __init__(self, heads: DraftHeads, objective: LossConfig, teacher: Teacher | None) -> None:
        super().__init__()
        self.heads = heads
        self.loss = partial(batch_loss, heads, objective=objective, teacher=teacher)

    def forward(self, hidden_BTD: Tensor, inputs: Inputs, num_items: Tensor | int) -> Tensor:
        return self.loss(hidden_BTD, inputs, num_items)


class HeadsTrainer(TaughtTrainer):
    """Trains heads, in place, on what a frozen target sees; on sets to train on and, perhaps, held
    out. Their ranks become `eval_head0_top1`, .., `eval_tokens_per_step_16`, ...

    Args:
        objective: what the heads learn. Default: cross-entropy.
        trained: the module that learns, with the heads as `heads`. Default: they and their loss.
        hidden_states: where the target's come from. Default: the target, run on every batch.
    """

    metrics_of = staticmethod(rank_metrics)
    describe = staticmethod(describe)
    tree_of = staticmethod(best_tree)
    worse = "the heads worse than fresh ones"
    with_adapter: ClassVar[bool] = False
    unusable: ClassVar[Mapping[str, Any]] = {
        **TaughtTrainer.unusable,
        "neftune_noise_alpha": None,
        **dict.fromkeys(CHECKPOINTING, False),
    }

    def __init__(
        self,
        heads: DraftHeads,
        target: TargetModel,
        args: TrainingArguments,
        *sets: Dataset,
        objective: LossConfig | None = None,
        trained: nn.Module | None = None,
        hidden_states: HiddenStates | None = None,
        **kwargs: Any,
    ) -> None:
        self.heads = heads
        target = target.with_features(heads.config.features)
        self.hidden_states = hidden_states or HiddenStates(target)
        self._fresh = FreshHeads.like(heads, target)  # no part of what learns
        if trained is None:
            target.freeze()  # before the teacher is read off it
            objective = objective or LossConfig()
            teacher = Teacher.from_target(target) if objective.needs_teacher else None
            trained = HeadsObjective(heads, objective, teacher)
        super().__init__(
            trained, target, args, *sets, data_collator=self.hidden_states.collate, **kwargs
        )

    def _order(self, rows: int, seed: int) -> DrawnOrder:
        """As it is drawn, or as a cache is read best."""
        return self.hidden_states.order(rows, seed)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As transformers', with the parts that have rates of their own in groups. Raises
        ValueError: the optimiser makes groups itself, or is given, and some part has another
        rate."""
        groups = self._groups() if self.optimizer is None else None
        if groups is not None:
            learnt: Any = self.model
            given = self.optimizer_cls_and_kwargs
            optimizer_cls, options = self.get_optimizer_cls_and_kwargs(self.args, learnt)
            if given is None and options.keys().isdisjoint(("params", "model", "optimizer_dict")):
                self.optimizer = optimizer_cls(groups, **options)
            else:
                optim = f"optim {OptimizerNames(self.args.optim).value}"
                named = optim if given is None else "optimizer_cls_and_kwargs"
                one_rate = f"{named} gives all parts one rate"
                if self.with_adapter:
                    raise ValueError(
                        f"{one_rate}, and an adapter has its own: choose another optim"
                    )
                if any(group["lr"] != self.args.learning_rate for group in groups):
                    raise ValueError(
                        f"{one_rate}: give a learning_rate for them, or choose another optim"
                    )
        return super().create_optimizer(model)

    def _groups(self) -> list[dict[str, Any]] | None:
        """Where the rate is a default, each part gets what suits it."""
        return rate_groups(self.heads, self.args, self._decaying()) if by_width(self.args) else None

    def _decaying(self) -> list[nn.Parameter]:
        trained: Any = self.model
        names = set(self.get_decay_parameter_names(trained))
        return [part for name, part in trained.named_parameters() if name in names]

    def _loss(self, model: nn.Module, inputs: Inputs, items: Any) -> Tensor:
        hidden_BTD = self.hidden_states.of_step(inputs)
        loss: Tensor = model(hidden_BTD, inputs, items)
        self._compare(inputs, lambda: (hidden_BTD, hidden_BTD))
        return loss

    def _read(self, inputs: Inputs) -> Tensor | None:
        return self.hidden_states.of(inputs)

    def _metrics(self, given: Any) -> dict[str, Any]:
        figures = super()._metrics(given)
        if self.tokenizer is not None and self.args.report_to:
            found = torch.as_tensor(given.predictions), torch.as_tensor(given.label_ids)
            figures["accepted_text"] = accepted_text(*found, self.tree_of(found[0]), self.tokenizer)
        return figures

    @torch.no_grad()
    def _compare(self, inputs: Inputs, hidden: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """Where it is time, compare the heads with fresh ones on a batch; `hidden` gives hidden_BTD
        that the heads read, and those that fresh ones would."""
        if self._comparison.is_due(self.state.global_step):
            # Plain, and per row: a run's own loss may weigh the heads by how good they are.
            losses = [
                batch_loss(heads, hidden_BTD, inputs, objective=LossConfig()).float()
                for heads, hidden_BTD in zip((self.heads, self._fresh), hidden(), strict=True)
            ]
            self._check_progress(torch.stack(losses)[:, None])

    def _judge(self, model: nn.Module, inputs: Inputs, items: Any) -> Judged:
        hidden_BTD = self.hidden_states.of_step(inputs)
        return model(hidden_BTD, inputs, items), *self._ranks(hidden_BTD, inputs)

    def _ranks(self, hidden_BTD: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        hidden_RD, rows = read_rows(self.heads, hidden_BTD, inputs)
        ranks_RK = head_ranks(self.heads, hidden_RD, rows, MAX_RANK)
        return rows.positions_R, ranks_RK.to(torch.int8)  # which an evaluation keeps
