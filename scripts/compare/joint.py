"""What joint training gains over heads alone, and costs the target, at equal training tokens.

    python -m scripts.compare.joint
    python -m scripts.compare.joint --recipes alone kl --num_prompts 2048

Every recipe trains 4 heads on the demo target's own continuations. Then the target, with its
adapter if there is one, continues held-out prompts, and its own loss is measured on held-out pieces
of the standard library and on held-out continuations that it wrote before.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset, load_from_disk
from rich.console import Console
from rich.table import Table

from medusa_heads import HeadsConfig, MedusaModel, TargetModel, train_heads
from medusa_heads.cli.flags.arguments import command
from medusa_heads.files import replace_json
from medusa_heads.settings import flag
from medusa_heads.training.arguments.joint_config import JointConfig
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.arguments.training import OptimisationArguments, to_training_arguments
from medusa_heads.training.data.columns import collate
from medusa_heads.training.loss.next_token import next_losses
from medusa_heads.training.loss.rows import next_rows
from medusa_heads.training.loss.teacher import Teacher
from scripts.demo.texts import (
    CONTINUATION,
    PROMPT,
    TARGET,
    autocast,
    check_recipes,
    windows,
    written,
)

RECIPES = {
    "alone": None,
    "ce": JointConfig(),
    "kl": JointConfig(lm_weight=0.0),
    "heads": JointConfig(lm_weight=0.0, heads_weight=1.0),
}
NAMES = {
    "alone": "heads alone",
    "ce": "joint: CE + KL + 0.2 heads",
    "kl": "joint: KL + 0.2 heads",
    "heads": "joint: KL + 1.0 heads",
}


@dataclass
class CompareArguments:
    """How much text, and where the results go."""

    recipes: list[str] = flag(list(RECIPES), f"Of {', '.join(RECIPES)}.")
    num_prompts: int = flag(2048, "Prompts to learn from.")
    num_eval_prompts: int = flag(192, "Held-out prompts.")
    num_decoded: int = flag(192, "Of these, how many are decoded.")
    text: str | None = flag(None, "Folder of such rows, instead of writing them anew.")
    held_out: str | None = flag(None, "Likewise, of held-out rows.")
    workers: int = flag(2, "Processes that generate text.")
    output_dir: Path = flag(Path("runs/joint"), "Results and texts.")

    def __post_init__(self) -> None:
        check_recipes(self.recipes, RECIPES)


def compare(arguments: CompareArguments) -> None:
    """Train and measure the recipes, and print the table."""
    target = TargetModel.from_pretrained(str(TARGET))
    rows = own_text(target, "train", arguments.text, arguments.num_prompts, arguments)
    held_out = own_text(
        target, "held_out", arguments.held_out, arguments.num_eval_prompts, arguments
    )
    corpus = windows("held_out", arguments.num_eval_prompts, PROMPT + CONTINUATION)
    corpus = corpus.map(lambda row: {"labels": row["input_ids"]})
    texts = {"own text": held_out, "standard library": corpus}
    before = {name: own_loss(target, text) for name, text in texts.items()}
    results: list[dict[str, Any]] = []
    for name in arguments.recipes:
        started = time.process_time()
        folder = train(name, target, rows, held_out, arguments)
        seconds = time.process_time() - started
        model = MedusaModel.from_pretrained(folder, tree=32)
        results.append(
            {
                "recipe": NAMES[name],
                "cpu_seconds": round(seconds),
                "loss": {name: own_loss(model.target, text) for name, text in texts.items()},
                "loss_before": before,
                "tokens_per_step": decode(model, held_out, arguments.num_decoded),
            }
        )
        replace_json(arguments.output_dir / "joint.json", results)
    show(results)


def own_text(
    target: TargetModel,
    part: Literal["train", "held_out"],
    folder: str | None,
    count: int,
    arguments: CompareArguments,
) -> Dataset:
    """Continuations that the target wrote, half of them greedy, half at temperature 0.7."""
    if folder is not None:
        return load_from_disk(folder).select(range(count))
    return written(target, windows(part, count), 0.5, arguments.output_dir, arguments.workers)


def train(
    name: str, target: TargetModel, rows: Dataset, held_out: Dataset, arguments: CompareArguments
) -> Path:
    """One recipe's folder."""
    folder = arguments.output_dir / name
    optimisation = OptimisationArguments(
        num_train_epochs=1,
        per_device_train_batch_size=16,
        bf16=autocast(),
        per_device_eval_batch_size=32,
        logging_steps=32,
    )
    train_heads(
        target,
        rows,
        eval_dataset=held_out,
        config=HeadsConfig(num_heads=4),
        output_dir=folder,
        training_args=to_training_arguments(optimisation, "shared"),
        overwrite_output_dir=True,
        joint=RECIPES[name],
    )
    return folder


@torch.no_grad()
def own_loss(target: TargetModel, rows: Dataset) -> float:
    """The target's own loss per supervised token."""
    head, total, count = Teacher.from_target(target), 0.0, 0
    for start in range(0, len(rows), 16):
        batch = collate([rows[i] for i in range(start, min(start + 16, len(rows)))])
        hidden_BTD = target.hidden(batch["input_ids"], batch["attention_mask"])
        losses_N, _ = next_losses(head, hidden_BTD, next_rows(batch["labels"]), LossConfig())
        total, count = total + float(losses_N.sum()), count + len(losses_N)
    return total / count


def decode(model: MedusaModel, held_out: Dataset, count: int) -> dict[str, float]:
    """Tokens per step over `count` prompts, by how the next token is taken."""
    prompts = [row[:PROMPT] for row in held_out["input_ids"][:count]]
    figures = {}
    for name, options in (
        ("greedy", {"do_sample": False}),
        ("T = 0.7", {"do_sample": True, "temperature": 0.7, "top_k": 0}),
    ):
        tokens = steps = 0
        for i, prompt in enumerate(prompts):
            torch.manual_seed(i)
            model.generate(torch.tensor([prompt]), max_new_tokens=CONTINUATION, **options)
            tokens, steps = tokens + model.last_stats.tokens, steps + model.last_stats.steps
        figures[name] = tokens / steps
    return figures


def show(results: list[dict[str, Any]]) -> None:
    """The table."""
    table = Table(title="Heads alone and together with an adapter (static tree of 32 nodes)")
    for column in ("recipe", "own text", "standard library", "greedy", "T = 0.7", "CPU seconds"):
        table.add_column(column, justify="left" if column == "recipe" else "right")
    for result in results:
        changes = [
            f"{loss:.4f} ({loss / result['loss_before'][name] - 1:+.2%})"
            for name, loss in result["loss"].items()
        ]
        steps = [f"{value:.3f}" for value in result["tokens_per_step"].values()]
        table.add_row(result["recipe"], *changes, *steps, str(result["cpu_seconds"]))
    Console(width=120).print(table)


main = command("scripts.compare.joint", compare, __doc__)

if __name__ == "__main__":
    sys.exit(main())
