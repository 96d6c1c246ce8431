"""Proof that default learning rates hold at the widths of real models.

python -m scripts.prove.width --report runs/width/report.json
python -m scripts.prove.width --kinds hydra prefix --undivided --num_prompts 96 --seeds 0

The demo's target is grown to 2,048 channels and turned into a random basis: another width, every
channel in use, the same logits and so the same text. Heads learn from that text at both widths, at
the default rate of each: as many passes, steps and tokens, in the same order. The best static tree
of 15 nodes that their ranks on one half of held-out texts imply is then walked, greedily, on the
other half. Tokens per step may differ by the tolerance.

The small target runs once over each text. What the wide one makes of it follows from that by one
matrix, which is compared with what the wide one itself makes of a text.

Two more runs say what else a difference could come from: other seeds at the small width, and the
small target turned into a random basis at its own width, which folds its norms as the wide one's.
The negative control gives the wide target the small one's rate, and must come out of tolerance.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from transformers import set_seed

from medusa_heads import HeadsConfig, TargetModel
from medusa_heads.checkpoint.provenance import provenance
from medusa_heads.cli.flags.arguments import command
from medusa_heads.files import replace_file
from medusa_heads.heads import new_heads
from medusa_heads.machine.facts import describe_machine
from medusa_heads.settings import flag
from medusa_heads.training.arguments.cache import CacheArguments
from medusa_heads.training.arguments.rates import fit_rate
from medusa_heads.training.arguments.training import OptimisationArguments, to_training_arguments
from medusa_heads.training.hidden.cache_setup import open_hidden_states
from medusa_heads.training.measure.beginning import scale_fresh
from medusa_heads.training.runs.heads_trainer import HeadsTrainer
from medusa_heads.training.runs.setup import prepare_sets
from scripts.compare.recipes import measure
from scripts.demo.texts import windows, written
from scripts.grown.model import load_small
from scripts.grown.rotated_states import Rotated, RotatedStates

if TYPE_CHECKING:
    from datasets import Dataset

KINDS: dict[str, dict[str, Any]] = {
    "medusa": {},
    "hydra": {"kind": "hydra"},
    "prefix": {"prefix_attention": True},
    "block": {"kind": "block"},
    "eagle3": {"kind": "eagle3"},
}
NODES = 15


@dataclass
class Arguments:
    """How much to learn, and what is compared."""

    target: str = flag("assets/demo-target", "folder of a Llama with the demo's tokens")
    width: int = flag(2048, "channels of the wide target")
    kinds: list[str] = flag(["medusa"], f"of {', '.join(KINDS)}")
    num_heads: int = flag(2, "heads of each kind")
    num_prompts: int = flag(768, "texts to learn from")
    num_train_epochs: float = flag(2.0, "passes over them")
    num_eval_prompts: int = flag(192, "held-out texts to walk")
    seeds: list[int] = flag(
        [0, 1, 2], "orders of the text at the small width; the first is the wide one's too"
    )
    tolerance: float = flag(0.02, "of the ratio of tokens per step")
    undivided: bool = flag(False, "the negative control: the wide target at the full rate")
    output_dir: Path = flag(Path("runs/width"), "texts and states")
    report: str | None = flag(None, "JSON file to write")

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.kinds) - set(KINDS)):
            raise ValueError(f"kinds are {', '.join(KINDS)}, got {unknown}")
        if not self.kinds or not self.seeds:
            raise ValueError("give at least one kind and one seed")


@dataclass(frozen=True)
class Outcome:
    """What a run of training came to.

    Attributes:
        kind: of heads.
        target: `own`, `rotated` at the small width, `wide`, or `undivided`: wide at the full rate.
        seed: of the order of the text.
        width: of the target.
        learning_rate: the default's peak.
        steps: of the optimiser.
        losses: of training, by step.
        tokens_per_step: on held-out text; 1 where the run stopped, and left no heads.
        top_1: likewise, of each head.
        cpu_seconds: of training and measuring.
        stopped: the sentence that it stopped with.
    """

    kind: str
    target: str
    seed: int
    width: int
    learning_rate: float
    steps: int
    losses: Mapping[int, float]
    tokens_per_step: float
    top_1: Sequence[float]
    cpu_seconds: float
    stopped: str | None = None


def prove(arguments: Arguments) -> int:
    """Train, measure, compare and report; returns the exit code, 1 where a ratio is out of
    tolerance."""
    console = Console(soft_wrap=True, highlight=False)
    small = load_small(arguments.target)
    texts = [
        written(small, windows(part, count), greedy_share, arguments.output_dir, 1)  # type: ignore[arg-type]
        for part, count, greedy_share in (
            ("train", arguments.num_prompts, 0.5),
            ("held_out", arguments.num_eval_prompts, 1.0),
        )
    ]
    outcomes: list[Outcome] = []
    first, *others = arguments.seeds
    once = ["own", "wide", "rotated", *["undivided"] * arguments.undivided]
    for name, seeds in (*((name, [first]) for name in once), ("own", others)):
        rotated = None
        if name != "own":
            width = small.hidden_size if name == "rotated" else arguments.width
            rotated = Rotated.of(small, width)
        for kind, seed in product(arguments.kinds, seeds):
            found = run(kind, rotated, small, texts, seed, arguments, fitted=name != "undivided")
            outcomes.append(Outcome(kind=kind, target=name, seed=seed, **found))
            console.print(line(outcomes[-1]))
            _write(outcomes, arguments)
    verdicts = [verdict(kind, outcomes, arguments.tolerance) for kind in arguments.kinds]
    for _, sentence in verdicts:
        console.print(sentence)
    return 0 if all(holds for holds, _ in verdicts) else 1


def run(
    kind: str,
    rotated: Rotated | None,
    small: TargetModel,
    texts: Sequence[Dataset],
    seed: int,
    arguments: Arguments,
    *,
    fitted: bool,
) -> dict[str, Any]:
    """Train one set of heads and measure it: the rest of an Outcome.

    Args:
        kind, seed: see Outcome.
        rotated: the target, where it is not the small one.
        small: the small target.
        texts: to learn from, and held out.
        arguments: amounts.
        fitted: whether the default rate is fitted to the width.
    """
    started = time.process_time()
    optimisation = OptimisationArguments(
        output_dir=str(arguments.output_dir),
        num_train_epochs=arguments.num_train_epochs,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        bf16=False,
        seed=seed,
        load_best_model_at_end=False,
        training_args={"eval_strategy": "no", "save_strategy": "no", "use_cpu": True},
    )
    args = to_training_arguments(optimisation, "shared")
    config = HeadsConfig(num_heads=arguments.num_heads, **KINDS[kind])
    train, held_out = texts
    data = prepare_sets(small, train, held_out, {}, None, config.num_heads, args)
    states = open_hidden_states(
        CacheArguments("auto", str(arguments.output_dir / "states")),
        small,
        data,
        config,
        args,
        target_weights_sha256=small.weights_digest(),
    )
    target = small
    if rotated is not None:
        target, states = rotated.target, RotatedStates(rotated, states)
    if fitted:
        fit_rate(args, target.hidden_size)
    set_seed(seed)
    heads = new_heads(target, config)
    scale_fresh(heads, states, data.held_out, args.eval_batch_size)
    trainer = HeadsTrainer(heads, target, args, data.rows, data.held_out, hidden_states=states)
    measured: dict[str, Any] = {"top_1": [], "tokens_per_step": {NODES: 1.0}}
    stopped = None
    try:
        trainer.train()
        measured = measure(torch.as_tensor(trainer.predict(data.held_out).predictions), (NODES,))
    except ValueError as error:
        if fitted:
            raise
        stopped = str(error)
    return {
        "width": target.hidden_size,
        "learning_rate": args.learning_rate,
        "steps": trainer.state.global_step,
        "losses": {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log},
        "tokens_per_step": measured["tokens_per_step"][NODES],
        "top_1": measured["top_1"],
        "cpu_seconds": round(time.process_time() - started, 1),
        "stopped": stopped,
    }


def verdict(kind: str, outcomes: Sequence[Outcome], tolerance: float) -> tuple[bool, str]:
    """Whether the wide run is within tolerance of the small one with the same seed, and the control
    is not; in words."""
    of_kind = [o for o in outcomes if o.kind == kind]
    own = [o.tokens_per_step for o in of_kind if o.target == "own"]
    (rotated,) = [o.tokens_per_step for o in of_kind if o.target == "rotated"]
    (wide,) = [o for o in of_kind if o.target == "wide"]
    ratio = wide.tokens_per_step / own[0]
    control = [o.tokens_per_step / own[0] for o in of_kind if o.target == "undivided"]
    holds = abs(ratio - 1) <= tolerance
    sentence = (
        f"{kind}: {ratio:.3f} of the small width's tokens per step at width {wide.width} "
        f"({'within' if holds else 'NOT within'} {tolerance:.0%}); rotated at the small width "
        f"{rotated / own[0]:.3f}; over {len(own)} seeds at the small width "
        f"{min(own):.3f} to {max(own):.3f}"
    )
    if control:
        sentence += f"; at the full rate {control[0]:.3f}"
    return holds and all(other < 1 - tolerance for other in control), sentence


def line(outcome: Outcome) -> str:
    """A run in words."""
    losses = list(outcome.losses.values())
    return (
        f"{outcome.kind}, {outcome.target} target of width {outcome.width}, seed {outcome.seed}: "
        f"{outcome.tokens_per_step:.3f} tokens per step, loss {losses[0]:.3f} to {losses[-1]:.3f} "
        f"in {outcome.steps} steps at a peak rate of {outcome.learning_rate:.3g}, "
        f"{outcome.cpu_seconds:.0f} CPU seconds"
        + (f"; {outcome.stopped}" if outcome.stopped else "")
    )


def _write(outcomes: Sequence[Outcome], arguments: Arguments) -> None:
    """The report so far."""
    if arguments.report is None:
        return
    story = provenance({"machine": describe_machine(), "settings": asdict(arguments)})
    story["outcomes"] = [asdict(outcome) for outcome in outcomes]
    replace_file(Path(arguments.report), json.dumps(story, indent=2, default=str) + "\n")


main = command("scripts.prove.width", prove, __doc__)

if __name__ == "__main__":
    sys.exit(main())
