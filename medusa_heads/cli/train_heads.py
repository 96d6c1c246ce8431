"""The command `train-heads`.

train-heads --config configs/demo.yaml --output_dir runs/demo/heads
train-heads --model_name_or_path Qwen/Qwen2.5-0.5B --dataset corpus.jsonl --self_distill
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

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
from medusa_heads.training.loss_arguments import LossArguments

ARGUMENTS = (
    TargetArguments,
    DataArguments,
    HeadsArguments,
    LossArguments,
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
    to_target, to_data, to_heads, to_loss, to_distill, to_cache, to_joint, to_optimise = (
        parse_arguments(
            ARGUMENTS,
            argv,
            prog="train-heads",
            description="Train extra decoding heads for a frozen causal language model.",
        )
    )
    config = to_heads.config()

    from medusa_heads.training.corpora import find_names

    # A mistyped path is answered before torch is loaded, which takes seconds.
    find_names([*to_data.dataset, *(to_data.eval_dataset or [])])

    from medusa_heads.target import TargetModel
    from medusa_heads.training.arguments import to_training_arguments
    from medusa_heads.training.data import find_tokenizer, load_corpora, prepare_data
    from medusa_heads.training.sample import show_sample
    from medusa_heads.training.train import train_heads

    training_args = to_training_arguments(to_optimise, config.vocab_matrix)
    corpus, held_out = load_corpora(to_data)
    tokenizer = find_tokenizer(
        to_target.model_name_or_path, trust_remote_code=to_target.trust_remote_code
    )
    if to_optimise.dry_run:
        from medusa_heads.cli.dry_run import dry_run

        joint = to_joint.config()
        dry_run(
            to_target,
            to_data,
            to_distill,
            config,
            training_args,
            corpus,
            held_out,
            tokenizer,
            joint=joint,
        )
        return
    target = TargetModel.from_pretrained(
        to_target.model_name_or_path,
        dtype=to_target.dtype,
        trust_remote_code=to_target.trust_remote_code,
        **to_target.placement(training_args.device),
    )
    if to_target.shard_target:
        from medusa_heads.training.sharding import shard_target

        if to_distill.self_distill:
            raise ValueError(
                "the processes of a sharded target cannot write text apart: make it with "
                "medusa-heads regenerate, and give it as --dataset"
            )
        shard_target(target, training_args.device)
    if to_distill.self_distill:
        from medusa_heads.cli.distilling import distilled_rows

        # The first process writes the text, the others read it from the cache.
        with training_args.main_process_first(desc="the target's text"):
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
        objective=to_loss.config(),
        resume_from_checkpoint=to_optimise.resume_from_checkpoint,
        overwrite_output_dir=to_optimise.overwrite_output_dir,
        early_stopping_patience=to_optimise.early_stopping_patience,
        hidden_cache=to_cache,
        joint=to_joint.config(),
        record={"data": asdict(to_data), "distillation": asdict(to_distill)},
    )
    if training_args.process_index == 0:
        _report(Path(to_optimise.output_dir))


def _report(folder: Path) -> None:
    """What was learnt: accuracy of each head, the trees that implies, and where it all lies."""
    from rich.console import Console

    from medusa_heads.training.joint import describe_own
    from medusa_heads.training.report import LEGEND, headline, read_report, tables

    report = read_report(folder)
    console = Console()
    for table in tables(report):
        console.print(table)
    console.print(LEGEND, style="dim", highlight=False)
    console.print(headline(report), highlight=False)
    if (own := report["held_out"].get("target")) is not None:
        console.print(describe_own(own), highlight=False)
    console.print(f"Checkpoint: {folder}", soft_wrap=True, highlight=False)


if __name__ == "__main__":  # accelerate launch -m medusa_heads.cli.train_heads
    raise SystemExit(main())
