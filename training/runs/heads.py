"""Train heads for a target: one call from text to a checkpoint folder."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, TrainingArguments, set_seed

from medusa_heads.checkpoint.provenance import provenance
from medusa_heads.checkpoint.stored_heads import check_takes_matrix
from medusa_heads.config import HeadsConfig
from medusa_heads.heads import DraftHeads, frequent_tokens, new_heads
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.cache import CacheArguments
from medusa_heads.training.arguments.joint_config import JointConfig
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.arguments.rates import fit_rate
from medusa_heads.training.arguments.training import OptimisationArguments, to_training_arguments
from medusa_heads.training.data.prepare import TrainingData
from medusa_heads.training.data.vocabulary import TOKENS_PER_ENTRY, count_tokens
from medusa_heads.training.hidden.cache_setup import open_hidden_states
from medusa_heads.training.hidden.launched import launched_sharding
from medusa_heads.training.hidden.sharding import is_sharded
from medusa_heads.training.runs.heads_trainer import HeadsTrainer
from medusa_heads.training.runs.joint import JointTrainer
from medusa_heads.training.runs.joint_objective import adapted
from medusa_heads.training.runs.record import changed_arguments, check_same_run
from medusa_heads.training.runs.results import write_heads
from medusa_heads.training.runs.resumable import clear_checkpoints
from medusa_heads.training.runs.setup import Names, as_target, find_start, prepare_sets, watchers

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase


def train_heads(
    target: str | TargetModel | PreTrainedModel,
    dataset: Dataset | IterableDataset | TrainingData | Names,
    *,
    eval_dataset: Dataset | Names | None = None,
    config: HeadsConfig | None = None,
    output_dir: str | os.PathLike[str],
    training_args: TrainingArguments | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    objective: LossConfig | None = None,
    resume_from_checkpoint: str | None = None,
    overwrite_output_dir: bool = False,
    early_stopping_patience: int | None = None,
    hidden_cache: CacheArguments | None = None,
    joint: JointConfig | None = None,
    with_vocab_matrix: bool = False,
    record: Mapping[str, Any] | None = None,
    **data_settings: Any,
) -> DraftHeads:
    """Train heads and write a checkpoint folder with their measured statistics.

    `output_dir` gets the checkpoint, `metrics.json` (held-out figures), `run.yaml` (what was run on
    what), `report.json`, `report.md` and pictures, and the Trainer's resumable `checkpoint-*`
    folders, which hold only heads as well.

    Args:
        target: a hub id or path, or a model in memory. It is frozen, and proved unchanged.
        dataset: names of corpora (see `load_corpus`), or a dataset in memory, with conversations in
            `messages`, with `prompt` and `completion`, with plain `text`, or with `input_ids` and
            `labels` (unshifted, -100 where the text was not generated); or data that
            `prepare_data` made.
        eval_dataset: held out, likewise. Default: `eval_share` of the documents.
        config: shape of the heads.
        output_dir: beats the one in `training_args`.
        training_args: of the run. Default: two epochs of AdamW without weight decay, cosine course
            with 5 % warm-up, peak rate 5e-3 with a shared vocabulary matrix and 1e-3 with own ones,
            less in proportion for targets wider than 384.
        tokenizer: for text. Default: the one beside the target.
        objective: what the heads learn, and how much each counts. Default: cross-entropy, head i
            counting 0.8**i.
        resume_from_checkpoint: a `checkpoint-*` folder; `"last"` for the newest whole one in
            `output_dir`; `"auto"` for the same, or a run from the start where there is none.
        overwrite_output_dir: a run from the start may remove the checkpoints of an earlier one.
        early_stopping_patience: stop after so many evaluations without new best heads.
        hidden_cache: whether the target's hidden states are kept on disk; default: they are not.
        joint: train a LoRA adapter in the target together with the heads. It is saved beside them,
            and both are loaded with `MedusaModel.from_pretrained(output_dir)`; a target in memory
            is left as it was.
        with_vocab_matrix: lay a copy of the target's vocabulary matrix beside heads that share it.
        record: what else `run.yaml` and the checkpoint should remember.
        data_settings: other fields of `DataArguments`: `max_length`, `packing`, `streaming`, ...

    Returns:
        The trained heads, fp32, attached to the target's vocabulary.

    Raises:
        ValueError: a target, dataset or setting that cannot be used; the message says which. Or the
            heads became worse than fresh ones, as they do where the learning rate is too high.
        RuntimeError: the target's weights changed, which a fault of this program would be.
        SystemExit: the process got SIGTERM; a checkpoint was written first.
    """
    config = config or HeadsConfig()
    objective = objective or LossConfig()
    output = Path(output_dir)
    args = copy.copy(
        training_args or to_training_arguments(OptimisationArguments(), config.vocab_matrix)
    )
    args.output_dir = str(output)
    checkpoint = find_start(output, resume_from_checkpoint, overwrite=overwrite_output_dir)
    callbacks = watchers(args, early_stopping_patience)
    hidden_cache = hidden_cache or CacheArguments()
    sharding = launched_sharding()
    spread = isinstance(target, TargetModel) and is_sharded(target)
    hidden_cache.check(joint=joint is not None, spread=spread or sharding is not None)
    target = as_target(target, args.device, sharding)
    fit_rate(args, target.hidden_size)
    data = prepare_sets(
        target, dataset, eval_dataset, data_settings, tokenizer, config.num_heads, args
    )

    set_seed(args.seed)
    draft_tokens = None
    if config.draft_vocab_size is not None:
        rows = data.known_rows if data.one_pass is None else data.one_pass
        counts_V = count_tokens(
            rows, target.vocab_size, most=config.draft_vocab_size * TOKENS_PER_ENTRY
        )
        draft_tokens = frequent_tokens(counts_V, config.draft_vocab_size)
    heads = new_heads(target, config, draft_tokens)
    if with_vocab_matrix:
        check_takes_matrix(heads.config, bias=heads.vocab_matrix(0)[1] is not None)
    before = target.weights_digest()
    if checkpoint is None:
        clear_checkpoints(output)

    def story() -> dict[str, Any]:
        return provenance(
            {
                "heads": heads.config.to_dict(),
                "loss": asdict(objective),
                **data.record(),
                "target_weights_sha256": before,
                "joint": None if joint is None else asdict(joint),
                "training_arguments": changed_arguments(args),
                **(record or {}),
            }
        )

    if checkpoint is not None:
        check_same_run(checkpoint, story())
    hidden_states = open_hidden_states(
        hidden_cache,
        target,
        data,
        heads.config,
        args,
        target_weights_sha256=before,
        resumed=checkpoint is not None,
    )
    carried: AbstractContextManager[PeftModel | None] = nullcontext()
    if joint is not None:
        carried = adapted(target, joint)
    with carried as adapter:
        trainer: HeadsTrainer
        common: dict[str, Any] = {"record": story, "callbacks": callbacks}
        if joint is None:
            trainer = HeadsTrainer(
                heads,
                target,
                args,
                data.rows,
                data.held_out,
                objective=objective,
                hidden_states=hidden_states,
                **common,
            )
        else:
            assert adapter is not None
            trainer = JointTrainer(
                heads,
                target,
                adapter,
                args,
                data.rows,
                data.held_out,
                config=joint,
                objective=objective,
                **common,
            )
        try:
            outcome = trainer.train(resume_from_checkpoint=checkpoint)
            measured = trainer.predict(data.held_out, metric_key_prefix="eval")
        finally:
            hidden_states.flush()
        if target.weights_digest(with_adapter=joint is None) != before:
            raise RuntimeError("the target's weights changed while its heads were trained")

        if trainer.is_world_process_zero() or is_sharded(target):
            write_heads(
                output,
                trainer,
                outcome.metrics,
                measured,
                data.held_out,
                story(),
                adapter,
                with_vocab_matrix=with_vocab_matrix,
            )
    return heads
