"""The command `train-draft`.

train-draft --config configs/draft-demo.yaml
train-draft --model_name_or_path Qwen/Qwen2.5-7B --draft_model Qwen/Qwen2.5-0.5B --self_distill
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_heads.cli.arguments import parse_arguments, run_command
from medusa_heads.inference.regenerate_arguments import DistillArguments
from medusa_heads.training.arguments import TargetArguments
from medusa_heads.training.data_arguments import DataArguments
from medusa_heads.training.draft_arguments import DraftArguments, DraftOptimisationArguments

if TYPE_CHECKING:
    from medusa_heads.target import TargetModel

ARGUMENTS = (
    TargetArguments,
    DataArguments,
    DraftArguments,
    DistillArguments,
    DraftOptimisationArguments,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Train a draft model as the flags say; returns the exit code."""
    # Waiting threads sleep instead of spinning, which on busy cores slows small models tenfold.
    # Read when torch is loaded, so it is set before.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return run_command(lambda: _train(argv), prog="train-draft")


def _train(argv: Sequence[str] | None) -> None:
    to_target, to_data, to_draft, to_distill, to_optimise = parse_arguments(
        ARGUMENTS,
        argv,
        prog="train-draft",
        description="Distil a small draft model from a causal language model.",
    )
    from medusa_heads.target import TargetModel
    from medusa_heads.training.data import find_tokenizer, load_corpora, prepare_data
    from medusa_heads.training.draft_arguments import draft_training_arguments
    from medusa_heads.training.draft_metrics import CHAINS
    from medusa_heads.training.sample import show_sample
    from medusa_heads.training.train_draft import train_draft

    training_args = draft_training_arguments(to_optimise, given=to_draft.draft_model is not None)
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
    if to_optimise.dry_run:
        _show_plan(target, to_draft, to_target.trust_remote_code)
        return
    if to_distill.self_distill:
        from medusa_heads.cli.distilling import distilled_rows

        corpus, held_out = distilled_rows(
            target, tokenizer, corpus, held_out, to_data, to_distill, to_optimise
        )
    data = prepare_data(
        target,
        corpus,
        held_out,
        tokenizer,
        to_data,
        num_heads=CHAINS[-1],
        seed=to_optimise.seed,
        max_steps=training_args.max_steps,
    )
    if training_args.process_index == 0:
        from rich.console import Console

        show_sample(data.rows, tokenizer, Console())
    train_draft(
        target,
        data,
        draft=to_draft,
        output_dir=to_optimise.output_dir,
        training_args=training_args,
        tokenizer=tokenizer,
        resume_from_checkpoint=to_optimise.resume_from_checkpoint,
        overwrite_output_dir=to_optimise.overwrite_output_dir,
        early_stopping_patience=to_optimise.early_stopping_patience,
        record={"data": asdict(to_data), "distillation": asdict(to_distill)},
        trust_remote_code=to_target.trust_remote_code,
    )
    if training_args.process_index == 0:
        _report(Path(to_optimise.output_dir))


def _show_plan(target: TargetModel, to_draft: DraftArguments, trust_remote_code: bool) -> None:
    """What would be trained, without a step."""
    from medusa_heads.training.draft_model import begin_draft

    draft = begin_draft(
        target,
        draft_model=to_draft.draft_model,
        num_layers=to_draft.draft_layers,
        hidden_size=to_draft.draft_hidden_size,
        trust_remote_code=trust_remote_code,
    )
    own, whole = draft.num_parameters(), target.model.num_parameters()
    print(
        f"{type(draft).__name__} of {draft.config.num_hidden_layers} layers: {own:,} parameters, "
        f"{own / whole:.0%} of the target's {whole:,}; with AdamW about {16 * own / 1e9:.2f} GB"
    )


def _report(folder: Path) -> None:
    """What was learnt, and where it lies."""
    from rich.console import Console
    from rich.table import Table

    from medusa_heads.draft_checkpoint import read_draft_sidecar
    from medusa_heads.training.draft_metrics import CHAINS

    sidecar = read_draft_sidecar(folder)
    measured, history = sidecar["measured"], sidecar["provenance"]
    console = Console()
    share = history["draft_parameters"] / history["target_parameters"]
    console.print(
        f"{history['draft_parameters']:,} parameters, {share:.0%} of the target's; "
        f"held-out acceptance {measured['acceptance']:.3f}, "
        f"agreement {measured['agreement']:.3f}",
        highlight=False,
    )
    table = Table(title="Chains of drafts on held-out text (simulated)")
    for column in ("drafted tokens", "tokens per step"):
        table.add_column(column, justify="right")
    for length in CHAINS:
        table.add_row(str(length), f"{measured[f'tokens_per_step_{length}']:.2f}")
    console.print(table)
    console.print(f"Draft model: {folder}", soft_wrap=True, highlight=False)
