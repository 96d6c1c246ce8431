"""The command `train-draft`.

train-draft --config configs/draft-demo.yaml
train-draft --model_name_or_path Qwen/Qwen2.5-7B --draft_model Qwen/Qwen2.5-0.5B --dataset a.jsonl
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from medusa_heads.cli.flags.arguments import arguments_of, command
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


def train(
    to_target: TargetArguments,
    to_data: DataArguments,
    to_draft: DraftArguments,
    to_distill: DistillArguments,
    to_optimise: DraftOptimisationArguments,
) -> None:
    """Distil a small draft model from a causal language model."""
    if to_target.apart or launched_sharding() is not None:
        raise ValueError(
            "a draft model is taught by a whole target in each process: leave "
            f"{' and '.join(to_target.apart) or 'FSDP'} out, and launch several with "
            "configs/accelerate/ddp.yaml"
        )
    command = Command(to_target, to_data, to_distill, to_optimise)

    from medusa_heads.training.measure.metrics import CHAINS
    from medusa_heads.training.runs.draft import DraftTrainer, train_draft
    from medusa_heads.training.runs.dry_run import plan_draft
    from medusa_heads.training.runs.pruned_target import draft_shape

    given, trusted = to_draft.draft_model is not None, to_target.trust_remote_code
    args = draft_training_arguments(to_optimise, given=given, autocast=command.autocast)
    DraftTrainer.check_arguments(args)
    four_bits = to_target.load_in_4bit
    begins: dict[str, Any] = {**to_draft.beginning(), "quantised": four_bits}
    shape = partial(draft_shape, **begins, trust_remote_code=trusted)
    told = {"draft": to_draft, "tokenizer": command.tokenizer, "trust_remote_code": trusted}
    command.run(
        args,
        CHAINS[-1],
        plan=lambda target, _data, size: plan_draft(
            target, shape(target), args, size, four_bits=four_bits
        ),
        check=shape,
        train=partial(train_draft, **told),
        begins_as=to_draft.draft_model,
        report=_report,
    )


def _report(folder: Path) -> None:
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


ARGUMENTS = arguments_of(train)
main = command("train-draft", train, train.__doc__)

if __name__ == "__main__":  # accelerate launch -m medusa_heads.cli.train_draft
    raise SystemExit(main())
