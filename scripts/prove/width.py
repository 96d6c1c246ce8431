"""Proof that default learning rates hold at the widths of real models.

python -m scripts.prove.width --report runs/width/report.json
python -m scripts.prove.width --kinds medusa hydra prefix --num_prompts 128 --seeds 0

The demo's target is grown to 2,048 channels and turned into a random basis: another width, every
channel in use, the same logits and so the same text. Heads learn from that text at both widths, at
the default rate of each: as many passes, steps and tokens, in the same order. Both then draft for
their targets, greedily and with the best static tree of 15 nodes that their own ranks imply, on
held-out prompts. Tokens per step may differ by the tolerance.

Two more runs say what else a difference could come from: other seeds at the small width, and the
small target turned into a random basis at its own width, which folds its norms as the wide one's.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_heads.cli.arguments import parse_arguments, run_command

if TYPE_CHECKING:
    from datasets import Dataset

    from medusa_heads import TargetModel

KINDS: dict[str, dict[str, Any]] = {
    "medusa": {},
    "hydra": {"kind": "hydra"},
    "prefix": {"prefix_attention": True},
}
NODES = 15
CHOOSING = 32  # held-out texts that the best heads and their tree are chosen by; not decoded


@dataclass
class Arguments:
    """How much to learn, and what is compared."""

    target: str = field(
        default="assets/demo-target", metadata={"help": "folder of a Llama with the demo's tokens"}
    )
    width: int = field(default=2048, metadata={"help": "channels of the wide target"})
    kinds: list[str] = field(
        default_factory=lambda: ["medusa"], metadata={"help": f"of {', '.join(KINDS)}"}
    )
    num_heads: int = field(default=4, metadata={"help": "heads, as in the demo"})
    num_prompts: int = field(default=768, metadata={"help": "texts to learn from"})
    num_train_epochs: float = field(default=2.0, metadata={"help": "passes over them"})
    num_eval_prompts: int = field(default=64, metadata={"help": "held-out prompts to decode"})
    seeds: list[int] = field(
        default_factory=lambda: [0, 1, 2],
        metadata={"help": "orders of the text at the small width; the first is the wide one's too"},
    )
    tolerance: float = field(default=0.02, metadata={"help": "of the ratio of tokens per step"})
    output_dir: Path = field(default=Path("runs/width"), metadata={"help": "texts, states, heads"})
    report: str | None = field(default=None, metadata={"help": "JSON file to write"})

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.kinds) - set(KINDS)):
            raise ValueError(f"kinds are {', '.join(KINDS)}, got {unknown}")
        if not self.kinds or not self.seeds:
            raise ValueError("give at least one kind and one seed")


@dataclass(frozen=True)
class Case:
    """A run of training.

    Attributes:
        kind: of heads.
        target: `own`, `rotated` at the small width, or `wide`.
        seed: of the order of the text.
    """

    kind: str
    target: str
    seed: int


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
        case: see Case.
        width: of the target.
        learning_rate: peak, by default.
        steps: of the optimiser.
        losses: of training, first to last.
        tokens_per_step: in decoding.
        cpu_seconds: of training.
    """

    case: Case
    width: int
    learning_rate: float
    steps: int
    losses: list[float]
    tokens_per_step: float
    cpu_seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    """Prove as the flags say; returns the exit code, 1 where a ratio is out of tolerance."""
    prog = "prove.width"
    codes: list[int] = []

    def work() -> None:
        (arguments,) = parse_arguments((Arguments,), argv, prog=prog, description=__doc__ or "")
        codes.append(prove(arguments))

    return run_command(work, prog=prog) or codes[0]


def prove(arguments: Arguments) -> int:
    """Train, decode, compare and report; returns the exit code."""
    from rich.console import Console

    from medusa_heads.files import replace_file
    from medusa_heads.machine.facts import describe_machine
    from medusa_heads.provenance import provenance
    from scripts.demo_texts import windows, written
    from scripts.grown_model import load_small

    console = Console(soft_wrap=True, highlight=False)
    small = load_small(arguments.target)
    prompts = windows("held_out", CHOOSING + arguments.num_eval_prompts)
    rows = written(small, windows("train", arguments.num_prompts), 0.5, arguments.output_dir, 1)
    held_out = written(small, prompts, 1.0, arguments.output_dir, 1)
    outcomes: list[Outcome] = []
    for name in ("own", "rotated", "wide"):
        target = small if name == "own" else turned(small, arguments.width if name == "wide" else 0)
        for kind in arguments.kinds:
            for seed in arguments.seeds if name == "own" else arguments.seeds[:1]:
                outcomes.append(run(Case(kind, name, seed), target, rows, held_out, arguments))
                console.print(line(outcomes[-1]))
                if arguments.report:
                    story = provenance({"machine": describe_machine()})
                    content = {"settings": asdict(arguments), "outcomes": map(asdict, outcomes)}
                    text = json.dumps({**story, **content}, indent=2, default=_plain)
                    replace_file(Path(arguments.report), text + "\n")
    verdicts = [verdict(kind, outcomes, arguments.tolerance) for kind in arguments.kinds]
    for _, sentence in verdicts:
        console.print(sentence)
    return 0 if all(holds for holds, _ in verdicts) else 1


def turned(small: TargetModel, width: int) -> TargetModel:
    """The target in a random basis, grown to `width` channels; 0 leaves its own."""
    import torch

    from scripts.grown_model import grow
    from scripts.grown_shape import Shape

    shape = Shape.of(small.config)
    if width:
        heads, keys = shape.num_attention_heads, shape.num_key_value_heads
        heads = next(n for n in range(heads, width) if width % n == 0 and n % keys == 0)
        shape = shape.with_sizes({"hidden_size": width, "num_attention_heads": heads})
    grown = grow(small, None, shape, dtype=torch.float32, rotation=0)
    difference, spread = grown.differences()["target"]
    assert difference < 1e-3 * spread, "a rotated target has the logits of the small one"
    return grown.target


def run(
    case: Case, target: TargetModel, rows: Dataset, held_out: Dataset, arguments: Arguments
) -> Outcome:
    """Train one set of heads at its default rate, and decode with them."""
    import yaml

    from medusa_heads import HeadsConfig, MedusaModel, train_heads
    from medusa_heads.training.arguments import OptimisationArguments, to_training_arguments
    from medusa_heads.training.cache_arguments import CacheArguments

    folder = arguments.output_dir / "-".join(map(str, asdict(case).values()))
    optimisation = OptimisationArguments(
        num_train_epochs=arguments.num_train_epochs,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        bf16=False,
        seed=case.seed,
        save_total_limit=1,
    )
    started = time.process_time()
    train_heads(
        target,
        rows,
        eval_dataset=held_out.select(range(CHOOSING)),
        config=HeadsConfig(num_heads=arguments.num_heads, **KINDS[case.kind]),
        output_dir=folder,
        training_args=to_training_arguments(optimisation, "shared"),
        overwrite_output_dir=True,
        # The target runs once over each text; all runs that read the same states share them.
        hidden_cache=CacheArguments("auto", str(arguments.output_dir / f"states-{case.target}")),
    )
    seconds = time.process_time() - started
    model = MedusaModel.from_pretrained(folder, target=target, tree=NODES)
    story = yaml.safe_load((folder / "run.yaml").read_text(encoding="utf-8"))
    steps, losses = loss_curve(folder)
    return Outcome(
        case,
        target.hidden_size,
        story["training_arguments"]["learning_rate"],
        steps,
        losses,
        tokens_per_step(model, held_out.select(range(CHOOSING, len(held_out)))),
        round(seconds, 1),
    )


def loss_curve(folder: Path) -> tuple[int, list[float]]:
    """Steps of a finished run, and its logged losses."""
    from medusa_heads.training.resumable import STATE_FILE, last_checkpoint

    last = last_checkpoint(folder)
    assert last is not None
    state = json.loads((last / STATE_FILE).read_text(encoding="utf-8"))
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    return state["global_step"], losses


def tokens_per_step(model: Any, held_out: Dataset) -> float:
    """Of greedy decoding: committed tokens over forwards of the target, over all prompts."""
    import torch

    from scripts.demo_texts import CONTINUATION, PROMPT

    tokens = steps = 0
    for ids in held_out["input_ids"]:
        prompt = torch.tensor([ids[:PROMPT]])
        model.generate(prompt, max_new_tokens=CONTINUATION, do_sample=False)
        tokens, steps = tokens + model.last_stats.tokens, steps + model.last_stats.steps
    return tokens / steps


def verdict(kind: str, outcomes: Sequence[Outcome], tolerance: float) -> tuple[bool, str]:
    """Whether the wide run is within tolerance of the small one with the same seed, in words."""
    of_kind = [o for o in outcomes if o.case.kind == kind]
    own = [o.tokens_per_step for o in of_kind if o.case.target == "own"]
    (rotated,) = [o.tokens_per_step for o in of_kind if o.case.target == "rotated"]
    (wide,) = [o for o in of_kind if o.case.target == "wide"]
    ratio = wide.tokens_per_step / own[0]
    holds = abs(ratio - 1) <= tolerance
    return holds, (
        f"{kind}: {ratio:.3f} of the small width's tokens per step at width {wide.width} "
        f"({'within' if holds else 'NOT within'} {tolerance:.0%}); rotated at the small width "
        f"{rotated / own[0]:.3f}; over {len(own)} seeds at the small width "
        f"{min(own):.3f} to {max(own):.3f}"
    )


def line(outcome: Outcome) -> str:
    """A run in words."""
    case = outcome.case
    return (
        f"{case.kind}, {case.target} target of width {outcome.width}, seed {case.seed}: "
        f"{outcome.tokens_per_step:.3f} tokens per step, loss {outcome.losses[0]:.3f} to "
        f"{outcome.losses[-1]:.3f} in {outcome.steps} steps at a peak rate of "
        f"{outcome.learning_rate:.3g}, {outcome.cpu_seconds:.0f} CPU seconds"
    )


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else list(value)


if __name__ == "__main__":
    sys.exit(main())
