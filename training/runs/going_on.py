"""A run that trains what was trained before, such as a draft model, and must not make it worse."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers.trainer_utils import TrainOutput

from medusa_heads.training.runs.trainer import Inputs, TaughtTrainer


class GoingOnTrainer(TaughtTrainer):
    """Trains what was trained before, and compares it with what it was.

    Args:
        known_rows: some of the training set, the first of which are the text that is compared on.
            Default: the set, a table.
    """

    def __init__(self, *args: Any, known_rows: Dataset | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._known_rows: Any = self.train_dataset if known_rows is None else known_rows

    @abstractmethod
    def _plain_and_own_loss(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Cross-entropy and the run's own loss of a batch: one may rise while the other is
        learnt."""

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """As TaughtTrainer's; what a checkpoint replaces is measured before."""
        self.beginning = self._losses_of_known_text()
        if self.model_wrapped is self.model:
            # An evaluation before marks it as prepared: several processes would not average its
            # gradients, because accelerate prepares nothing twice.
            self.let_go()
        return super().train(*args, **kwargs)

    def let_go(self) -> None:
        """The model computes as it did before accelerate prepared it, say without autocast."""
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        vars(self.model).pop("_is_accelerate_prepared", None)

    def _compare_with_before(self) -> None:
        if self._comparison.is_due(self.state.global_step):
            self._check_progress(torch.stack([self._losses_of_known_text(), self.beginning]))

    @torch.no_grad()
    def _losses_of_known_text(self) -> Tensor:
        count = min(self.args.per_device_train_batch_size, len(self._known_rows))
        batch: Any = self.data_collator(list(self._known_rows.select(range(count))))
        with _evaluated(self.model):
            return torch.stack(self._plain_and_own_loss(self._prepare_inputs(batch)))


@contextmanager
def _evaluated(model: Any) -> Iterator[None]:
    """Within the block the model drops nothing out, as what dropout adds to a loss is no harm that
    training did; afterwards every module is in the mode in which it was."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in before.items():
            module.training = mode
