"""Train heads for a target: one call from text to a checkpoint folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainingArguments
from transformers.utils import SAFE_WEIGHTS_NAME

from medusa_heads.checkpoint.checkpoint import save_heads
from medusa_heads.checkpoint.stored_heads import DRAFT_TOKENS, check_takes_matrix
from medusa_heads.checkpoint.tensor_file import mapped_tensors
from medusa_heads.config import HeadsConfig
from medusa_heads.heads import DraftHeads, new_heads
from medusa_heads.heads.vocabulary import logit_scale
from medusa_heads.training.arguments.batch import fit_batch
from medusa_heads.training.arguments.cache import CacheArguments
from medusa_heads.training.arguments.joint_config import JointConfig
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.arguments.rates import fit_rate
from medusa_heads.training.arguments.training import OptimisationArguments, to_training_arguments
from medusa_heads.training.arguments.vocabulary import DraftVocab
from medusa_heads.training.data.draft_vocabulary import DraftVocabulary, choose_vocabulary
from medusa_heads.training.hidden.cache_setup import open_hidden_states
from medusa_heads.training.hidden.launched import launched_sharding
from medusa_heads.training.hidden.sharding import in_all, is_sharded
from medusa_heads.training.measure.attention import attend_as_target
from medusa_heads.training.measure.beginning import fit_fresh, scale_fresh
from medusa_heads.training.measure.calibration import calibrate, calibration_figures
from medusa_heads.training.measure.metrics import rank_statistics
from medusa_heads.training.measure.report import make_report, write_report
from medusa_heads.training.runs.heads_trainer import HeadsTrainer
from medusa_heads.training.runs.joint import JointTrainer, adapted
from medusa_heads.training.runs.record import steps_before
from medusa_heads.training.runs.setup import GivenTarget, GivenText, Names, Run

logger = logging.getLogger(__name__)


def train_heads(
    target: GivenTarget,
    dataset: GivenText,
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
    callbacks: Sequence[TrainerCallback] = (),
    hidden_cache: CacheArguments | None = None,
    joint: JointConfig | None = None,
    with_vocab_matrix: bool = False,
    draft_vocab: DraftVocab = "auto",
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
            less in proportion for targets wider than 384, and for steps of fewer than 1,024 tokens;
            of little text these are (see `arguments/batch.py`).
        tokenizer: for text. Default: the one beside the target.
        objective: what the heads learn, and how much each counts. Default: cross-entropy, head i
            counting 0.8**i.
        resume_from_checkpoint: a `checkpoint-*` folder; `"last"` for the newest whole one in
            `output_dir`; `"auto"` for the same, or a run from the start where there is none.
        overwrite_output_dir: a run from the start may remove the checkpoints of an earlier one.
        early_stopping_patience: stop after so many evaluations without new best heads.
        callbacks: of transformers.Trainer, which watch the run or end it.
        hidden_cache: whether the target's hidden states are kept on disk; default: they are not.
        joint: train a LoRA adapter in the target together with the heads. It is saved beside them,
            and both are loaded with `MedusaModel.from_pretrained(output_dir)`; a target in memory
            is left as it was.
        with_vocab_matrix: lay a copy of the target's vocabulary matrix beside heads that share it.
        draft_vocab: which tokens the heads draft where `config` has no `draft_vocab_size`: of a
            large vocabulary as few as nearly all of the held-out text is made of (docs/heads.md),
            or `"all"`. A resumed run keeps what it had.
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
    if draft_vocab not in get_args(DraftVocab):
        words = " or ".join(get_args(DraftVocab))
        raise ValueError(
            f"draft_vocab must be {words}, got {draft_vocab!r}: a number of tokens is the "
            "draft_vocab_size of HeadsConfig"
        )
    config, objective = config or HeadsConfig(), objective or LossConfig()
    hidden_cache = hidden_cache or CacheArguments()
    sharding = launched_sharding()
    if joint is not None and sharding is not None:
        sharding.check_joint()
    streaming = bool(data_settings.get("streaming"))
    hidden_cache.check(joint=joint is not None, streaming=streaming)
    run = Run(
        target,
        dataset,
        eval_dataset,
        data_settings,
        output_dir=output_dir,
        args=training_args or to_training_arguments(OptimisationArguments(), config.vocab_matrix),
        tokenizer=tokenizer,
        num_heads=config.num_heads,
        features=config.features,
        resume_from_checkpoint=resume_from_checkpoint,
        overwrite_output_dir=overwrite_output_dir,
        early_stopping_patience=early_stopping_patience,
        callbacks=callbacks,
        sharding=sharding,
    )
    share = 1.0
    if joint is not None:
        run.data.refuse_images("an adapter does")
    else:
        share = fit_batch(run.args, *run.data.rows_and_learnt(), steps_before(run.checkpoint))
    fit_rate(run.args, run.target.hidden_size, share)
    drafted = _drafted(run, config, draft_vocab, whole_matrix=with_vocab_matrix)
    scale = logit_scale(run.target.config)
    config = replace(config, draft_vocab_size=drafted.size, logit_scale=scale)
    heads = new_heads(run.target, config, drafted.tokens_C)
    if with_vocab_matrix:
        check_takes_matrix(heads.config, bias=heads.vocab_matrix(0)[1] is not None)
    run.begin(
        {
            "heads": heads.config.to_dict(),
            "loss": asdict(objective),
            "joint": None if joint is None else asdict(joint),
            "draft_vocabulary": drafted.record(),
            **(record or {}),
        }
    )
    if run.args.process_index == 0 and (sentence := drafted.sentence()):
        logger.warning(sentence)
    hidden_states = open_hidden_states(
        hidden_cache,
        run.target,
        run.data,
        heads.config,
        run.args,
        target_weights_sha256=run.target_sha256,
    )
    batch_size = run.args.eval_batch_size
    in_all(lambda: scale_fresh(heads, hidden_states, run.data.held_out, batch_size))
    in_all(lambda: attend_as_target(heads, run.target.model))
    common = {"objective": objective, "hidden_states": hidden_states, **run.hooks}
    carried: Any = nullcontext() if joint is None else adapted(run.target, joint)
    with carried as adapter:
        if joint is None:
            trainer = HeadsTrainer(heads, run.target, run.args, *run.sets, **common)
        else:
            trainer = JointTrainer(
                heads, run.target, adapter, run.args, *run.sets, config=joint, **common
            )
        fitted = 0
        if run.checkpoint is None:
            fitted = in_all(lambda: fit_fresh(heads, hidden_states, run.data, run.args))
        trained, measured = run.learn(trainer, "heads were", with_adapter=joint is None)
        ranks_BTK = torch.as_tensor(measured.predictions)
        statistics = rank_statistics(ranks_BTK)
        asked = trainer.is_world_process_zero() or is_sharded(run.target)  # which all run together
        given = statistics, heads, hidden_states, run.data.held_out, batch_size
        calibrations = in_all(lambda: calibrate(*given) if asked else [])

        def write() -> None:
            if trainer.args.report_to:
                trainer.log(calibration_figures(calibrations))
            story = run.story()
            save_heads(
                run.output,
                heads,
                run.target,
                statistics=statistics,
                provenance=story,
                adapter=adapter,
                with_vocab_matrix=with_vocab_matrix,
            )
            figures = {**(measured.metrics or {}), "fitted_positions": fitted}
            metrics = run.write_figures(trainer, trained, figures, story)
            report = make_report(
                statistics,
                ranks_BTK,
                calibrations,
                heads=heads.config.to_dict(),
                target=run.target.name_or_path,
                metrics=metrics,
                log=trainer.state.log_history,
            )
            write_report(run.output, report)

        run.end(write)
    return heads


def trainer_of(joint: JointConfig | None) -> type[HeadsTrainer]:
    return HeadsTrainer if joint is None else JointTrainer


def _drafted(
    run: Run, config: HeadsConfig, asked: DraftVocab, *, whole_matrix: bool
) -> DraftVocabulary:
    """The tokens that heads draft: of a run that goes on those of its checkpoint, unless other ones
    are asked for, with which it is refused."""
    known_C, vocab_size = None, run.target.vocab_size
    if run.checkpoint is not None:
        tensors = mapped_tensors(Path(run.checkpoint) / SAFE_WEIGHTS_NAME)
        known_C = next((t for name, t in tensors.items() if name.endswith(DRAFT_TOKENS)), None)
        if config.draft_vocab_size is None and asked == "auto":
            asked = "all"  # where none are known
        elif known_C is None or config.draft_vocab_size != len(known_C):
            known_C = None
    if known_C is not None and not _are_ids(known_C, vocab_size):
        raise ValueError(
            f"the heads in {run.checkpoint!r} draft tokens that this target does not have (its "
            f"vocabulary has {vocab_size:,}): go on with the target that they were begun for, or "
            "begin anew"
        )
    return choose_vocabulary(
        run.data, vocab_size, config, asked, known_C=known_C, whole_matrix=whole_matrix
    )


def _are_ids(tokens: Tensor, vocab_size: int) -> bool:
    plain = tokens.dtype == torch.int64 and tokens.dim() == 1 and len(tokens) > 0
    return plain and bool(tokens.min() >= 0 and tokens.max() < vocab_size)
