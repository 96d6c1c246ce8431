"""The command `train-draft`.

train-draft --config configs/draft-demo.yaml
train-draft --model_name_or_path Qwen/Qwen2.5-7B --draft_model Qwen/Qwen2.5-0.5B --dataset a.jsonl
"""

from __future__ import annotations

from pathlib import Path

from medusa_heads.cli.flags.arguments import command
from medusa_heads.cli.training import Command
from medusa_heads.inference.regeneration.arguments import DistillArguments
from medusa_heads.tables import on_screen
from medusa_heads.training.arguments.data import DataArguments
from medusa_heads.training.arguments.draft import (
    DraftArguments,
    DraftOptimisationArguments,
    draft_training_arguments,
)
from medusa_heads.training.arguments.target import TargetArguments
from medusa_heads.training.hidden.launched import launched_sharding

ARGUMENTS = (
    TargetArguments,
    DataArguments,
    DraftArguments,
    DistillArguments,
    DraftOptimisationArguments,
)


def train(
    to_target: TargetArguments,
    to_data: DataArguments,
    to_draft: DraftArguments,
    to_distill: DistillArguments,
    to_optimise: DraftOptimisationArguments,
) -> None:
    """Distil a small draft model from a causal language model."""
    if to_target.shard_target or launched_sharding() is not None:
        raise ValueError(
            "a draft model is taught by a whole target in each process: leave shard_target out, "
            "and launch several with configs/accelerate/ddp.yaml"
        )
    run = Command(to_target, to_data, to_distill, to_optimise)

    from medusa_heads.training.measure.metrics import CHAINS
    from medusa_heads.training.runs.pruned_target import draft_shape

    given = to_draft.draft_model is not None
    args = draft_training_arguments(to_optimise, given=given, autocast=run.autocast)
    beginning = {**to_draft.beginning(), "trust_remote_code": to_target.trust_remote_code}
    if to_optimise.dry_run:
        from medusa_heads.training.runs.dry_run import plan_draft

        run.plan(
            args,
            CHAINS[-1],
            lambda target, size: plan_draft(
                target,
                draft_shape(target, **beginning),
                args,
                size,
                four_bits=to_target.load_in_4bit,
            ),
        )
        return

    from medusa_heads.training.runs.draft import train_draft

    target = run.load_target(args)
    # Begun when the text is there; refused here, before hours may go into writing it.
    draft_shape(target, **beginning)
    data = run.prepare(target, args, CHAINS[-1])
    train_draft(
        target,
        data,
        draft=to_draft,
        training_args=args,
        tokenizer=run.tokenizer,
        trust_remote_code=to_target.trust_remote_code,
        **run.run_options(),
    )
    if args.process_index == 0:
        _report(Path(to_optimise.output_dir))


def _report(folder: Path) -> None:
    """What was learnt, and where it lies."""
    from rich.console import Console

    from medusa_heads.checkpoint.draft_checkpoint import read_draft_sidecar
    from medusa_heads.training.measure.metrics import CHAINS

    sidecar = read_draft_sidecar(folder)
    measured, history = sidecar["measured"], sidecar["provenance"]
    parameters = history["draft_parameters"]
    print(
        f"{parameters:,} parameters, {parameters / history['target_parameters']:.0%} of the "
        f"target's; held-out acceptance {measured['acceptance']:.3f}, agreement "
        f"{measured['agreement']:.3f}"
    )
    cells = [[str(length), f"{measured[f'tokens_per_step_{length}']:.2f}"] for length in CHAINS]
    title = "Chains of drafts on held-out text (simulated)"
    Console().print(on_screen(title, (["drafted tokens", "tokens per step"], cells)))
    print(f"Draft model: {folder}")


main = command("train-draft", train, ARGUMENTS, train.__doc__)

if __name__ == "__main__":  # accelerate launch -m medusa_heads.cli.train_draft
    raise SystemExit(main())
