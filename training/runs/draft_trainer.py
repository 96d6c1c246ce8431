"""transformers' Trainer for a draft model.

Shapes: B batch, T tokens, R supervised positions, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import EvalPrediction, TrainingArguments

from medusa_heads.config import IGNORED
from medusa_heads.data.sources import is_stream
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.data.own_text import OwnText
from medusa_heads.training.data.prepare import collate
from medusa_heads.training.loss.draft import DraftLoss
from medusa_heads.training.loss.own import own_rows
from medusa_heads.training.measure.draft_metrics import describe_draft, draft_metrics
from medusa_heads.training.measure.fresh_heads import Comparison
from medusa_heads.training.runs.trainer import TaughtTrainer

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel

_OWN = "own_text"  # marks batches that the draft model wrote


class DraftTrainer(TaughtTrainer):
    """Teaches a draft model what a frozen target would say.

    Its checkpoints are those of the draft model alone, each a folder that transformers loads.
    During evaluation `draft_metrics` become `eval_acceptance`, `eval_tokens_per_step_4`, ...

    Args:
        draft: trained in place.
        target: on the same device.
        args: of the run.
        train_dataset: columns `input_ids` and `labels`.
        eval_dataset: likewise, held out.
        objective: the terms of the loss.
        own_text: batches that the draft model writes itself; without it, all are the corpus's.
        known_rows: some of the training set, of which the first are the text that the draft model
            is compared on with what it was. Default: `train_dataset`, unless that is a stream.
        record: gives what the `run.yaml` in each checkpoint says.
        kwargs: further arguments of transformers.Trainer.
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        target: TargetModel,
        args: TrainingArguments,
        train_dataset: Dataset,
        eval_dataset: Dataset | None = None,
        *,
        objective: LossConfig,
        own_text: OwnText | None = None,
        known_rows: Dataset | None = None,
        record: Callable[[], Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            draft,
            target,
            args,
            record=record,
            describe=describe_draft,
            data_collator=collate,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            compute_metrics=_compute_metrics,
            **kwargs,
        )
        self.draft = TargetModel(draft)
        self.draft_loss = DraftLoss(self.draft, target, objective)
        self.own_text = own_text
        self._comparison = Comparison("the draft model worse than it was")
        self._plain_loss = DraftLoss(self.draft, target, LossConfig())
        if known_rows is None and not is_stream(train_dataset):
            known_rows = train_dataset
        self._known_rows = known_rows
        self.beginning: Tensor | None = None

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """As transformers' own, with the text at hand taken up again; what a checkpoint replaces is
        measured before."""
        if self._known_rows is not None:
            self.beginning = self._losses_of_known_text()
        if self.own_text is not None and isinstance(resume_from_checkpoint, str):
            self.own_text.load(_own_text_file(resume_from_checkpoint, self.args.process_index))
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.own_text is not None:
            self.own_text.save(_own_text_file(output_dir, self.args.process_index))
        super()._save_rng_state(output_dir)

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """The batches of one optimiser step, some of them the draft model's own."""
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.own_text is None:
            return batches, count
        for number in range(len(batches)):
            rows = self.own_text.batch(self.state.global_step, number)
            if rows is not None:
                batches[number] = collate(rows) | {_OWN: torch.tensor(True)}
        return batches, self._get_num_items_in_batch(batches, device)

    @torch.no_grad()
    def _losses_of_known_text(self) -> Tensor:
        """Cross-entropy and the run's own loss, [2]: one may rise while the other is learnt."""
        assert self._known_rows is not None
        count = min(self.args.per_device_train_batch_size, len(self._known_rows))
        batch: Any = self._prepare_inputs(collate(list(self._known_rows.select(range(count)))))
        supervised = self._supervised(self.draft.model, batch)
        both = (self._plain_loss, self.draft_loss)
        return torch.stack([loss(*supervised, len(supervised[1])) for loss in both])

    def _loss(self, model: nn.Module, inputs: dict[str, Any], items: Any) -> Tensor:
        """The loss of a batch.

        Raises:
            ValueError: training makes the draft model worse than it was.
        """
        own = bool(inputs.pop(_OWN, False))
        features_RD, next_R, positions_R, hidden_BTD = self._supervised(model, inputs)
        # The draft's own tokens are no truth to learn, only a place to hear the target's.
        labels_R = torch.full_like(next_R, IGNORED) if own else next_R
        if self.beginning is not None and self._comparison.is_due(self.state.global_step):
            losses = [self._losses_of_known_text(), self.beginning]
            self._check_progress(self._comparison, torch.stack(losses))
        return self.draft_loss(features_RD, labels_R, positions_R, hidden_BTD, items)

    def _judge(
        self, model: nn.Module, inputs: dict[str, Any], items: Any
    ) -> tuple[Tensor, Callable[[], tuple[Tensor, Tensor]]]:
        """The figures are those of `draft_metrics`."""
        features_RD, next_R, positions_R, hidden_BTD = self._supervised(model, inputs)

        def figures() -> tuple[Tensor, Tensor]:
            measured = self.draft_loss.measure(features_RD, next_R, positions_R, hidden_BTD)
            return positions_R, measured

        return self.draft_loss(features_RD, next_R, positions_R, hidden_BTD, items), figures

    def _supervised(
        self, model: nn.Module, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """features_RD of the draft, next_R the tokens to come, positions_R, and hidden_BTD of the
        target, where the next token is generated text of the same document."""
        positions_BT = inputs.get("position_ids")
        rows = own_rows(inputs["labels"], positions_BT)
        ids_BT, mask_BT = inputs["input_ids"], inputs.get("attention_mask")
        read: dict[str, Any] = {"input_ids": ids_BT, "attention_mask": mask_BT}
        if positions_BT is not None:
            read["position_ids"] = positions_BT
        hidden_BTD = self.target.hidden(ids_BT, mask_BT, positions_BT)
        with self.draft.instead_of_logits() as features:
            model(**read, use_cache=False)  # the wrapped model, so that DDP sees the forward
        features_RD = features().flatten(0, 1).index_select(0, rows.positions_N)
        return features_RD, rows.labels_N, rows.positions_N, hidden_BTD


def _own_text_file(folder: str | Path, process: int) -> Path:
    return Path(folder) / f"own_text-{process}.json"


def _compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    return draft_metrics(torch.as_tensor(prediction.predictions))
