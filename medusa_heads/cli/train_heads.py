"""The command `train-heads`.

train-heads --config configs/demo.yaml --output_dir runs/demo/heads
train-heads --model_name_or_path Qwen/Qwen2.5-0.5B --dataset corpus.jsonl --self_distill
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_heads.cli.arguments import parse_arguments, run_command
from medusa_heads.inference.regenerate_arguments import DistillArguments
from medusa_heads.training.arguments import (
    HeadsArguments,
    OptimisationArguments,
    TargetArguments,
)
from medusa_heads.training.cache_arguments import CacheArguments
from medusa_heads.training.data_arguments import DataArguments
from medusa_heads.training.joint_arguments import JointArguments

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import TrainingArguments

    from medusa_heads.config import HeadsConfig
    from medusa_heads.target import TargetModel
    from medusa_heads.training.corpora import Corpus

ARGUMENTS = (
    TargetArguments,
    DataArguments,
    HeadsArguments,
    DistillArguments,
    CacheArguments,
    JointArguments,
    OptimisationArguments,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Train heads as the flags say; returns the exit code."""
    # Waiting threads sleep instead of spinning, which on busy cores slows small models tenfold.
    # Read when torch is loaded, so it is set before.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return run_command(lambda: _train(argv), prog="train-heads")


def _train(argv: Sequence[str] | None) -> None:
    to_target, to_data, to_heads, to_distill, to_cache, to_joint, to_optimise = parse_arguments(
        ARGUMENTS,
        argv,
        prog="train-heads",
        description="Train extra decoding heads for a frozen causal language model.",
    )
    config = to_heads.config()

    from medusa_heads.training.corpora import find_names

    # A mistyped path is answered before torch is loaded, which takes seconds.
    find_names([*to_data.dataset, *(to_data.eval_dataset or [])])

    from medusa_heads.training.arguments import to_training_arguments
    from medusa_heads.training.data import find_tokenizer, load_corpora, prepare_data
    from medusa_heads.training.sample import show_sample
    from medusa_heads.training.train import train_heads

    training_args = to_training_arguments(to_optimise, config.vocab_matrix)
    corpus, held_out = load_corpora(to_data)
    target = TargetModel.from_pretrained(
        to_target.model_name_or_path,
        dtype=to_target.dtype,
        trust_remote_code=to_target.trust_remote_code,
        **to_target.placement(training_args.device),
    )
    tokenizer = find_tokenizer(
        to_target.model_name_or_path, trust_remote_code=to_target.trust_remote_code
    )
    if to_distill.self_distill:
        corpus, held_out = distilled_rows(
            target, tokenizer, corpus, held_out, to_data, to_distill, to_optimise
        )
    data = prepare_data(
        target,
        corpus,
        held_out,
        tokenizer,
        to_data,
        num_heads=config.num_heads,
        seed=to_optimise.seed,
        max_steps=training_args.max_steps,
    )
    if training_args.process_index == 0:
        from rich.console import Console

        show_sample(data.rows, tokenizer, Console())
    train_heads(
        target,
        data,
        config=config,
        output_dir=to_optimise.output_dir,
        training_args=training_args,
        tokenizer=tokenizer,
        head_loss_decay=to_heads.head_loss_decay,
        resume_from_checkpoint=to_optimise.resume_from_checkpoint,
        overwrite_output_dir=to_optimise.overwrite_output_dir,
        early_stopping_patience=to_optimise.early_stopping_patience,
        hidden_cache=to_cache,
        joint=to_joint.config(),
        record={"data": asdict(to_data), "distillation": asdict(to_distill)},
    )
    if training_args.process_index == 0:
        _report(Path(to_optimise.output_dir))


def distilled_rows(
    target: TargetModel,
    tokenizer: Any,
    corpus: Corpus,
    held_out: Corpus | None,
    to_data: DataArguments,
    to_distill: DistillArguments,
    to_optimise: OptimisationArguments,
) -> tuple[Corpus, Corpus]:
    """The target's own continuations of prompts from both corpora, cached on disk."""
    from medusa_heads.inference.regenerate import regenerate
    from medusa_heads.training.corpora import as_corpus

    cache_dir = Path(to_distill.distill_cache or Path(to_optimise.output_dir) / "distilled")
    rows = [
        regenerate(
            target,
            prompts,
            max_new_tokens=to_distill.continuation_length,
            batch_size=to_distill.generation_batch_size,
            greedy_share=to_distill.greedy_share,
            temperature=to_distill.temperature,
            seed=to_optimise.seed,
            cache_dir=cache_dir,
            num_workers=to_distill.generation_workers,
        )
        for prompts in distilled_prompts(
            target, tokenizer, corpus, held_out, to_data, to_distill, to_optimise.seed
        )
    ]
    return as_corpus(rows[0], "distilled text"), as_corpus(rows[1], "distilled held-out text")


def distilled_prompts(
    target: TargetModel,
    tokenizer: Any,
    corpus: Corpus,
    held_out: Corpus | None,
    to_data: DataArguments,
    to_distill: DistillArguments,
    seed: int,
) -> list[Dataset]:
    """Prompts from the text to train on, and from the held-out text."""
    from medusa_heads.corpus import prompt_windows
    from medusa_heads.training.data import hold_out
    from medusa_heads.training.row_facts import check_length

    if tokenizer is None:
        raise ValueError("self_distill needs the target's tokenizer, and none lies beside it")
    for part in (corpus, held_out):
        if part is not None and (part.format.name != "text" or part.is_stream):
            raise ValueError(
                f"self_distill draws prompts from a table of plain text, got {part.found_as} in "
                f"{part.name!r}"
            )
    check_length(to_distill.prompt_length + to_distill.continuation_length, target)
    if held_out is None:
        texts = hold_out(corpus.rows, to_data.eval_share, seed, to_data.eval_rows)
    else:
        texts = corpus.rows, held_out.rows
    counts = (to_distill.num_prompts, to_distill.num_eval_prompts)
    return [
        prompt_windows(
            text, tokenizer, num_prompts=count, prompt_length=to_distill.prompt_length, seed=seed
        )
        for text, count in zip(texts, counts, strict=True)
    ]


def _dry_run(
    to_target: TargetArguments,
    to_data: DataArguments,
    to_distill: DistillArguments,
    config: HeadsConfig,
    training_args: TrainingArguments,
    corpus: Corpus,
    held_out: Corpus | None,
    tokenizer: Any,
) -> None:
    """Print what the run would be."""
    from rich.console import Console

    from medusa_heads.training.data import prepare_data
    from medusa_heads.training.dry_run import TextSize, meta_target, plan_run, show_plan, text_size
    from medusa_heads.training.packing import pack_rows
    from medusa_heads.training.sample import show_sample

    target = meta_target(to_target)
    if to_distill.self_distill:
        rows: Any = distilled_prompts(
            target, tokenizer, corpus, held_out, to_data, to_distill, training_args.seed
        )[0]
        length = to_distill.prompt_length + to_distill.continuation_length
        learnt = len(rows) * to_distill.continuation_length
        text = TextSize(len(rows), len(rows) * length, learnt, length)
        rows = rows.map(lambda row: {"labels": row["input_ids"]})
    else:
        # Whether packed documents see each other is measured with weights, which are not here.
        data = prepare_data(
            target,
            corpus,
            held_out,
            tokenizer,
            replace(to_data, packing=False),
            num_heads=config.num_heads,
            seed=training_args.seed,
            max_steps=training_args.max_steps,
        )
        rows = data.rows
        if data.is_stream:
            text = TextSize(None, None, None, to_data.max_length)
        else:
            rows = pack_rows(data.rows, to_data.max_length) if to_data.packing else data.rows
            text = text_size(rows, to_data.max_length, data.facts.supervised_tokens)
    console = Console()
    show_sample(rows, tokenizer, console)
    plan = plan_run(target, config, training_args, text, bits=to_target.bits)
    show_plan(plan, config, console)


def _report(folder: Path) -> None:
    """What was learnt: accuracy of each head, the trees that implies, and where it all lies."""
    from rich.console import Console

    from medusa_heads.training.report import headline, read_report, tables

    report = read_report(folder)
    console = Console()
    for table in tables(report):
        console.print(table)
    console.print(headline(report), highlight=False)
    console.print(f"Checkpoint: {folder}", soft_wrap=True, highlight=False)
