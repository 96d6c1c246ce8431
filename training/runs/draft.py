"""Train a draft model for a target: one call from text to a folder that transformers loads.

Shapes: B batch, T tokens, R supervised positions, D hidden.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainingArguments,
)

from medusa_heads.checkpoint.draft_checkpoint import save_draft
from medusa_heads.config import IGNORED
from medusa_heads.target.loading import find_tokenizer
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.draft import (
    DraftArguments,
    DraftOptimisationArguments,
    draft_training_arguments,
)
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.arguments.rates import fit_rate
from medusa_heads.training.data.columns import collate
from medusa_heads.training.data.own_text import OwnText
from medusa_heads.training.data.pack import check_packing, hidden_of
from medusa_heads.training.loss.fused import Pairs
from medusa_heads.training.loss.next_token import DraftLoss
from medusa_heads.training.loss.rows import next_rows
from medusa_heads.training.measure.metrics import CHAINS, describe_draft, draft_metrics
from medusa_heads.training.runs.going_on import GoingOnTrainer
from medusa_heads.training.runs.pruned_target import begin_draft
from medusa_heads.training.runs.setup import GivenTarget, GivenText, Names, Run
from medusa_heads.training.runs.trainer import Inputs, Judged

_OWN = "own_text"  # marks batches that the draft model wrote


def train_draft(
    target: GivenTarget,
    dataset: GivenText,
    *,
    eval_dataset: Dataset | Names | None = None,
    draft: DraftArguments | None = None,
    output_dir: str | os.PathLike[str],
    training_args: TrainingArguments | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    resume_from_checkpoint: str | None = None,
    overwrite_output_dir: bool = False,
    early_stopping_patience: int | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    record: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    **data_settings: Any,
) -> PreTrainedModel:
    """Distil a draft model from a target and write it as a folder that transformers loads.

    Args:
        dataset: best the target's own text.
        draft: what it begins as, and how it learns.
        training_args: of the run. Default: those of `draft_training_arguments`.
        tokenizer: for text, and to lie beside the draft model. Default: the target's.
        trust_remote_code: run the code that comes with a draft model that was named.
        target, eval_dataset, output_dir, resume_from_checkpoint, overwrite_output_dir,
            early_stopping_patience, callbacks, record, data_settings: as in `train_heads`.

    Returns:
        The best checkpoint by held-out acceptance, fp32.

    Raises:
        ValueError: a target, dataset or setting that cannot be used; the message says which. Or
            training made the draft model worse than it was, as too high a learning rate does.
        RuntimeError: the target's weights changed, which a fault of this program would be.
        SystemExit: the process got SIGTERM; a checkpoint was written first.
    """
    draft = draft or DraftArguments()
    given = draft.draft_model is not None
    run = Run(
        target,
        dataset,
        eval_dataset,
        data_settings,
        output_dir=output_dir,
        args=training_args or draft_training_arguments(DraftOptimisationArguments(), given=given),
        tokenizer=tokenizer,
        num_heads=CHAINS[-1],
        resume_from_checkpoint=resume_from_checkpoint,
        overwrite_output_dir=overwrite_output_dir,
        early_stopping_patience=early_stopping_patience,
        callbacks=callbacks,
    )
    run.data.refuse_images("a draft model does")
    model = begin_draft(run.target, **draft.beginning(), trust_remote_code=trust_remote_code)
    fit_rate(run.args, TargetModel(model).hidden_size)
    if run.data.is_packed:
        check_packing(TargetModel(model))
    run.begin(
        {
            "draft": asdict(draft),
            "draft_parameters": model.num_parameters(),
            "target_parameters": run.target.model.num_parameters(),
            **(record or {}),
        }
    )
    own_text = None
    if draft.on_policy_share:
        own_text = OwnText(
            TargetModel(model),
            run.data.known_rows,
            share=draft.on_policy_share,
            refresh=draft.on_policy_refresh,
            batches_a_step=run.args.gradient_accumulation_steps,
            batch_size=run.args.per_device_train_batch_size,
            temperature=draft.on_policy_temperature,
            seed=run.args.seed * 1_000_003 + run.args.process_index,
        )
    trainer = DraftTrainer(
        model,
        run.target,
        run.args,
        *run.sets,
        objective=draft.objective(),
        own_text=own_text,
        known_rows=run.data.known_rows,
        **run.hooks,
    )
    trained, prediction = run.learn(trainer, "draft model was")
    trainer.let_go()  # it is no wrapper's, as heads are

    def write() -> None:
        measured, story = prediction.metrics or {}, run.story()
        kept = ("eval_acceptance", "eval_agreement", "eval_tokens_per_step")
        save_draft(
            run.output,
            model,
            run.target,
            tokenizer=tokenizer or find_tokenizer(run.target.name_or_path, run.target.revision),
            measured={
                k.removeprefix("eval_"): v for k, v in measured.items() if k.startswith(kept)
            },
            provenance=story,
        )
        run.write_figures(trainer, trained, measured, story)

    run.end(write)
    return model


class DraftTrainer(GoingOnTrainer):
    """Teaches a draft model, in place, what a frozen target would say. Its checkpoints are those of
    the draft model alone, each a folder that transformers loads. During evaluation `draft_metrics`
    become `eval_acceptance`, `eval_tokens_per_step_4`, ...

    Args:
        own_text: batches that the draft model writes itself; without it, all are the corpus's.
    """

    worse = "the draft model worse than it was"

    metrics_of = staticmethod(draft_metrics)
    describe = staticmethod(describe_draft)

    def __init__(
        self,
        draft: PreTrainedModel,
        target: TargetModel,
        args: TrainingArguments,
        *sets: Dataset,
        objective: LossConfig,
        own_text: OwnText | None = None,
        **kwargs: Any,
    ) -> None:
        caches = getattr(draft.config, "use_cache", None)
        super().__init__(draft, target, args, *sets, data_collator=collate, **kwargs)
        if caches is not None:  # Trainer turns it off, also for whoever loads what is stored
            draft.config.use_cache = caches
        self.draft = TargetModel(draft)
        self.draft_loss = DraftLoss(self.draft, target, objective)
        self.own_text = own_text
        self._plain_loss = DraftLoss(self.draft, target, LossConfig())

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As GoingOnTrainer's, with the text at hand taken up again."""
        if self.own_text is not None and isinstance(resume_from_checkpoint, str):
            self.own_text.load(self._own_text_file(resume_from_checkpoint))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """As Trainer's, without the second names of tied weights, which no checkpoint holds."""
        tied = self.draft.model.all_tied_weights_keys
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def _save_rng_state(self, output_dir: str) -> None:
        if self.own_text is not None:
            # Another process may come here before the first has made the folder.
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            self.own_text.save(self._own_text_file(output_dir))
        super()._save_rng_state(output_dir)

    def _own_text_file(self, folder: str) -> Path:
        return Path(folder) / f"own_text-{self.args.process_index}.json"

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

    def _read(self, inputs: Inputs) -> Tensor | None:
        return None if _OWN in inputs else super()._read(inputs)

    def _plain_and_own_loss(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        read = self._supervised(self.draft.model, inputs)
        count = len(read[0])
        return self._plain_loss(*read, count), self.draft_loss(*read, count)

    def _loss(self, model: nn.Module, inputs: Inputs, items: Any) -> Tensor:
        own = bool(inputs.pop(_OWN, False))
        features_RD, rows, hidden_BTD = self._supervised(model, inputs)
        if own:  # no truth to learn, only a place to hear the target's
            rows = replace(rows, labels_N=torch.full_like(rows.labels_N, IGNORED))
        self._compare_with_before()
        return self.draft_loss(features_RD, rows, hidden_BTD, items)

    def _judge(self, model: nn.Module, inputs: Inputs, items: Any) -> Judged:
        read = self._supervised(model, inputs)
        figures_R3 = self.draft_loss.measure(*read)
        return self.draft_loss(*read, items), read[1].positions_N, figures_R3

    def _supervised(self, model: nn.Module, inputs: Inputs) -> tuple[Tensor, Pairs, Tensor]:
        """features_RD of the draft where the next token is generated text of the same document,
        these rows, and hidden_BTD of the target."""
        rows = next_rows(inputs["labels"], inputs.get("position_ids"))
        names = ("input_ids", "attention_mask", "position_ids")
        read = {name: inputs[name] for name in names if name in inputs}
        hidden_BTD = hidden_of(self.target, inputs)
        with self.draft.instead_of_logits() as features:
            model(**read, use_cache=False)  # the wrapped model, so that DDP sees the forward
        return features().flatten(0, 1).index_select(0, rows.positions_N), rows, hidden_BTD
