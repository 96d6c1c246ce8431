"""transformers' Trainer for a draft model: its target runs frozen beside it.

Shapes: B batch, T tokens, R supervised positions, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import (
    EvalPrediction,
    ProgressCallback,
    TrainingArguments,
)

from medusa_heads.config import IGNORED
from medusa_heads.target import TargetModel
from medusa_heads.training.data import collate
from medusa_heads.training.draft_loss import DraftLoss
from medusa_heads.training.draft_metrics import FIGURES, describe_draft, draft_metrics
from medusa_heads.training.loss_config import LossConfig
from medusa_heads.training.own_text import OwnText
from medusa_heads.training.resumable import ResumableTrainer
from medusa_heads.training.trainer import ReadableProgress

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, TrainerControl, TrainerState

_OWN = "own_text"  # marks batches that the draft model wrote


class DraftTrainer(ResumableTrainer):
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
        record: Callable[[], Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        if args.n_gpu > 1:
            # DataParallel would copy the draft model to every GPU, but not the target.
            args._n_gpu = 1
        target.freeze()
        self.target = target
        self.draft = TargetModel(draft)
        self.draft_loss: DraftLoss = DraftLoss(self.draft, target, objective)
        self.own_text = own_text
        self.record = record
        super().__init__(
            model=draft,
            args=args,
            data_collator=collate,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            compute_metrics=_compute_metrics,
            **kwargs,
        )
        self.model_accepts_loss_kwargs = True  # the divisor is given: no second average
        if not args.disable_tqdm:
            self.remove_callback(ProgressCallback)
            self.add_callback(DraftProgress)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """As transformers' own, with the text at hand taken up again."""
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

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss over `num_items_in_batch` generated tokens, those of the whole step."""
        own = bool(inputs.pop(_OWN, False))
        features_RD, next_R, positions_R, hidden_BTD = self._supervised(model, inputs)
        counted = num_items_in_batch is not None
        items: Any = num_items_in_batch if counted else (inputs["labels"] != IGNORED).sum()
        # The draft's own tokens are no truth to learn, only a place to hear the target's.
        labels_R = torch.full_like(next_R, IGNORED) if own else next_R
        loss = self.draft_loss(features_RD, labels_R, positions_R, hidden_BTD, items)
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
        """Loss, figures_BT3 (-100 where nothing is predicted) and labels_BT."""
        inputs = self._prepare_inputs(inputs)
        labels_BT = inputs["labels"]
        with torch.no_grad(), self.compute_loss_context_manager():
            features_RD, next_R, positions_R, hidden_BTD = self._supervised(model, inputs)
            items = (labels_BT != IGNORED).sum()
            loss = self.draft_loss(features_RD, next_R, positions_R, hidden_BTD, items)
            if prediction_loss_only:
                return loss, None, None
            figures_R3 = self.draft_loss.measure(features_RD, next_R, positions_R, hidden_BTD)
        figures_P3 = figures_R3.new_full((labels_BT.numel(), len(FIGURES)), IGNORED)
        figures_P3[positions_R] = figures_R3
        return loss, figures_P3.view(*labels_BT.shape, -1), labels_BT

    def _supervised(
        self, model: nn.Module, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """features_RD of the draft, next_R the tokens to come, positions_R, and hidden_BTD of the
        target, where the next token is generated text of the same document."""
        ids_BT, labels_BT = inputs["input_ids"], inputs["labels"]
        positions_BT = inputs.get("position_ids")
        next_BT = torch.full_like(labels_BT, IGNORED)
        next_BT[:, :-1] = labels_BT[:, 1:]
        read: dict[str, Any] = {
            "input_ids": ids_BT,
            "attention_mask": inputs.get("attention_mask"),
        }
        if positions_BT is not None:
            next_BT[:, :-1].masked_fill_(positions_BT[:, 1:] == 0, IGNORED)
            read["position_ids"] = positions_BT
        positions_R = (next_BT.flatten() != IGNORED).nonzero().squeeze(1)
        hidden_BTD = self.target.hidden(ids_BT, inputs.get("attention_mask"), positions_BT)
        with self.draft.instead_of_logits() as features:
            model(**read, use_cache=False)  # the wrapped model, so that DDP sees the forward
        features_RD = features().flatten(0, 1).index_select(0, positions_R)
        return features_RD, next_BT.flatten()[positions_R], positions_R, hidden_BTD


class DraftProgress(ReadableProgress):
    """The progress lines of a draft model."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if state.is_world_process_zero and logs is not None and "eval_acceptance" in logs:
            tqdm.write(f"step {state.global_step}/{state.max_steps}  {describe_draft(logs)}")
        else:
            super().on_log(args, state, control, logs, **kwargs)


def _own_text_file(folder: str | Path, process: int) -> Path:
    return Path(folder) / f"own_text-{process}.json"


def _compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    return draft_metrics(torch.as_tensor(prediction.predictions))
