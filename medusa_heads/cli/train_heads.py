"""The command `train-heads`.

train-heads --config configs/demo.yaml --output_dir runs/demo/heads
train-heads --model_name_or_path Qwen/Qwen2.5-0.5B --dataset corpus.jsonl --self_distill
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from medusa_heads.cli.flags.arguments import parse_arguments
from medusa_heads.cli.training import (
    autocast_for,
    find_texts,
    load_target,
    prepare_texts,
    run_training,
)
from medusa_heads.inference.regeneration.arguments import DistillArguments
from medusa_heads.training.arguments.cache import CacheArguments
from medusa_heads.training.arguments.data import DataArguments
from medusa_heads.training.arguments.heads import HeadsArguments
from medusa_heads.training.arguments.joint import JointArguments
from medusa_heads.training.arguments.loss import LossArguments
from medusa_heads.training.arguments.target import TargetArguments
from medusa_heads.training.arguments.training import OptimisationArguments
from medusa_heads.training.hidden.launched import Sharding, launched_sharding

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
    return run_training(lambda: _train(argv), prog="train-heads")


def _train(argv: Sequence[str] | None) -> None:
    to_target, to_data, to_heads, to_loss, to_distill, to_cache, to_joint, to_optimise = (
        parse_arguments(
            ARGUMENTS,
            argv,
            prog="train-heads",
            description="Train extra decoding heads for a frozen causal language model.",
        )
    )
    config, joint = to_heads.config(), to_joint.config()
    if to_heads.with_vocab_matrix:
        from medusa_heads.checkpoint.stored_heads import check_takes_matrix

        check_takes_matrix(config)
    sharding = launched_sharding() or (Sharding() if to_target.shard_target else None)
    if sharding is not None and to_distill.self_distill:
        raise ValueError(
            "processes that share a target (shard_target, or an FSDP launch) cannot write text "
            "apart: make it with medusa-heads regenerate, and give it as --dataset"
        )
    to_cache.check(joint=joint is not None, spread=sharding is not None)
    texts = find_texts(to_target, to_data, to_distill)

    from medusa_heads.training.arguments.training import to_training_arguments

    autocast = autocast_for(to_target)
    args = to_training_arguments(to_optimise, config.vocab_matrix, autocast=autocast)
    if to_optimise.dry_run:
        from medusa_heads.cli.dry_run import dry_run_heads

        dry_run_heads(to_target, texts, config, args, joint=joint)
        return

    from medusa_heads.training.runs.heads import train_heads

    target = load_target(to_target, to_optimise, args, sharding)
    data = prepare_texts(target, texts, to_optimise, args, config.num_heads)
    train_heads(
        target,
        data,
        config=config,
        output_dir=to_optimise.output_dir,
        training_args=args,
        objective=to_loss.config(),
        resume_from_checkpoint=to_optimise.resume_from_checkpoint,
        overwrite_output_dir=to_optimise.overwrite_output_dir,
        early_stopping_patience=to_optimise.early_stopping_patience,
        hidden_cache=to_cache,
        joint=joint,
        with_vocab_matrix=to_heads.with_vocab_matrix,
        record={"data": asdict(to_data), "distillation": asdict(to_distill)},
    )
    if args.process_index == 0:
        _report(Path(to_optimise.output_dir))


def _report(folder: Path) -> None:
    """What was learnt: accuracy of each head, the trees that implies, and where it all lies."""
    from rich.console import Console

    from medusa_heads.training.measure.report import LEGEND, headline, read_report, tables
    from medusa_heads.training.runs.joint import describe_own

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
