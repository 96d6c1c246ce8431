"""Train heads for a target: one call from text to a checkpoint folder."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import PreTrainedModel, TrainingArguments, set_seed

from medusa_heads.checkpoint import provenance, save_heads
from medusa_heads.config import HeadsConfig
from medusa_heads.files import replace_file
from medusa_heads.heads import DraftHeads, frequent_tokens, new_heads
from medusa_heads.target import TargetModel
from medusa_heads.training.arguments import OptimisationArguments, to_training_arguments
from medusa_heads.training.calibration import calibrate
from medusa_heads.training.data import (
    check_length,
    check_rows,
    find_tokenizer,
    hold_out,
    load_corpus,
    prepare_rows,
)
from medusa_heads.training.metrics import rank_statistics
from medusa_heads.training.trainer import HeadsTrainer
from medusa_heads.training.vocabulary import count_tokens

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

METRICS_FILE = "metrics.json"
RUN_FILE = "run.yaml"
TRAIN: Literal["train"] = "train"
HELD_OUT: Literal["held_out"] = "held_out"


def train_heads(
    target: str | TargetModel | PreTrainedModel,
    dataset: Dataset | str,
    *,
    eval_dataset: Dataset | str | None = None,
    config: HeadsConfig | None = None,
    output_dir: str | os.PathLike[str],
    training_args: TrainingArguments | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_length: int = 512,
    eval_share: float = 0.05,
    head_loss_decay: float = 0.8,
    resume_from_checkpoint: str | None = None,
    record: Mapping[str, Any] | None = None,
) -> DraftHeads:
    """Train heads and write a checkpoint folder with their measured statistics.

    `output_dir` gets the checkpoint, `metrics.json` (held-out figures), `run.yaml` (what was run on
    what) and the Trainer's resumable `checkpoint-*` folders, which hold only heads as well.

    Args:
        target: a hub id or path, or a model in memory. It is frozen, and proved unchanged.
        dataset: rows with `input_ids` and `labels` (unshifted, -100 where the text was not
            generated), or documents in a column `text`, or what `load_corpus` takes.
        eval_dataset: held out, likewise. Default: `eval_share` of the documents.
        config: shape of the heads.
        output_dir: beats the one in `training_args`.
        training_args: of the run. Default: two epochs of AdamW without weight decay, cosine course
            with 5 % warm-up, peak rate 5e-3 with a shared vocabulary matrix and 1e-3 with own ones.
        tokenizer: for text. Default: the one beside the target.
        max_length: rows cut from text have at most so many tokens.
        eval_share: share of documents held out where no `eval_dataset` is given.
        head_loss_decay: head i counts decay**i in the loss.
        resume_from_checkpoint: a `checkpoint-*` folder, or `"last"` for the newest in `output_dir`.
        record: what else `run.yaml` and the checkpoint should remember.

    Returns:
        The trained heads, fp32, attached to the target's vocabulary.

    Raises:
        ValueError: a target, dataset or setting that cannot be used; the message says which.
        RuntimeError: the target's weights changed, which a fault of this program would be.
    """
    config = config or HeadsConfig()
    output = Path(output_dir)
    args = copy.copy(
        training_args or to_training_arguments(OptimisationArguments(), config.vocab_matrix)
    )
    args.output_dir = str(output)
    checkpoint = find_checkpoint(resume_from_checkpoint, output)
    target = as_target(target, args.device)
    rows, held_out = prepare_sets(
        target, dataset, eval_dataset, tokenizer, max_length, eval_share, args.seed
    )
    facts = check_rows(rows, target, name="training set", heads_reached=1)
    held_out_facts = check_rows(
        held_out, target, name="held-out set", heads_reached=config.num_heads
    )

    set_seed(args.seed)
    draft_tokens = None
    if config.draft_vocab_size is not None:
        counts_V = count_tokens(rows, target.vocab_size)
        draft_tokens = frequent_tokens(counts_V, config.draft_vocab_size)
    heads = new_heads(target, config, draft_tokens)
    before = target.weights_digest()
    trainer = HeadsTrainer(heads, target, args, rows, held_out, head_loss_decay=head_loss_decay)
    outcome = trainer.train(resume_from_checkpoint=checkpoint)
    measured = trainer.predict(held_out, metric_key_prefix="eval")
    if target.weights_digest() != before:
        raise RuntimeError("the target's weights changed while its heads were trained")

    if trainer.is_world_process_zero():
        history = provenance(
            {
                "heads": heads.config.to_dict(),
                "head_loss_decay": head_loss_decay,
                "training_set": asdict(facts),
                "held_out_set": asdict(held_out_facts),
                "target_weights_sha256": before,
                "training_arguments": changed_arguments(args),
                **(record or {}),
            }
        )
        statistics = rank_statistics(torch.as_tensor(measured.predictions))
        calibrate(statistics, heads, target, held_out)
        save_heads(output, heads, target, statistics=statistics, provenance=history)
        metrics = {
            **{name: value for name, value in outcome.metrics.items() if name != "total_flos"},
            **(measured.metrics or {}),
            "steps": trainer.state.global_step,
        }
        replace_file(output / METRICS_FILE, json.dumps(metrics, indent=2) + "\n")
        replace_file(output / RUN_FILE, to_yaml(history))
    return heads


def as_target(target: str | TargetModel | PreTrainedModel, device: torch.device) -> TargetModel:
    """The target, frozen and on the device of the run."""
    if isinstance(target, str):
        target = TargetModel.from_pretrained(target)
    elif not isinstance(target, TargetModel):
        target = TargetModel(target)
    target.freeze()
    # A target that accelerate spread over devices stays where it is.
    if target.device.type != device.type and getattr(target.model, "hf_device_map", None) is None:
        target.model.to(device)  # type: ignore[arg-type]
    return target


def prepare_sets(
    target: TargetModel,
    dataset: Dataset | str,
    eval_dataset: Dataset | str | None,
    tokenizer: PreTrainedTokenizerBase | None,
    max_length: int,
    eval_share: float,
    seed: int,
) -> tuple[Dataset, Dataset]:
    """Rows to train on and held-out rows; arguments as those of `train_heads`."""
    if eval_dataset is None and dataset == "stdlib":
        eval_dataset = load_corpus("stdlib", "held_out")
    corpora = [
        load_corpus(corpus, split) if isinstance(corpus, str) else corpus
        for corpus, split in ((dataset, TRAIN), (eval_dataset, HELD_OUT))
        if corpus is not None
    ]
    if any("text" in corpus.column_names for corpus in corpora):
        check_length(max_length, target)
        tokenizer = tokenizer or find_tokenizer(target.name_or_path)
    prepared = [prepare_rows(corpus, tokenizer, max_length) for corpus in corpora]
    if len(prepared) == 1:
        return hold_out(prepared[0], eval_share, seed)
    return prepared[0], prepared[1]


def find_checkpoint(name: str | None, output: Path) -> str | None:
    """The checkpoint to go on from; `"last"` is the newest in `output`."""
    if name != "last":
        return name
    from transformers.trainer_utils import get_last_checkpoint

    found = get_last_checkpoint(str(output)) if output.is_dir() else None
    if found is None:
        raise ValueError(f"nothing to resume: {str(output)!r} has no checkpoint-* folder")
    return str(found)


def changed_arguments(args: TrainingArguments) -> dict[str, Any]:
    """The training arguments that are not transformers' defaults, as plain values."""
    default = TrainingArguments(output_dir=args.output_dir).to_dict()
    plain = json.loads(json.dumps(args.to_dict(), default=str))
    return {name: value for name, value in plain.items() if value != default.get(name)}


def to_yaml(content: Mapping[str, Any]) -> str:
    """Plain data as YAML, in the order given."""
    import yaml

    # Through JSON: provenance is plain data, and nothing else should get in.
    text: str = yaml.safe_dump(json.loads(json.dumps(content)), sort_keys=False)
    return text
