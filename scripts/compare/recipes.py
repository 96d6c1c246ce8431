"""What each ingredient of a recipe is worth, at equal training tokens, on the demo target.

    python -m scripts.compare.recipes
    python -m scripts.compare.recipes --recipes plain together --num_prompts 1024
    python -m scripts.compare.recipes --recipes together --num_prompts 1024 2048 4096

Every recipe trains on as many tokens, in the same order of prompts, from pieces of the standard
library, at the rate and with the rows a step that train-heads chooses by itself. All are measured
on the target's own continuations of held-out prompts: tokens per step, by walking each text with
the best static tree that the other half of the texts implies, and of dynamic trees at any of their
positions. The heads stay in OUTPUT_DIR/heads/RECIPE. Of several amounts of text the smaller begin
the larger, and below the table stands what twice the text gives.

Shapes: B texts, T tokens, K heads.
"""

from __future__ import annotations

import math
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from torch import Tensor

from medusa_heads import HeadsConfig, TargetModel, train_heads
from medusa_heads.cli.flags.arguments import command
from medusa_heads.config import IGNORED
from medusa_heads.decoder_shape import DecoderShape
from medusa_heads.files import replace_json
from medusa_heads.settings import flag
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.arguments.training import OptimisationArguments, to_training_arguments
from medusa_heads.training.data.columns import learnt_whole
from medusa_heads.training.measure.calibration import measure_heads
from medusa_heads.training.measure.metrics import rank_statistics
from medusa_heads.training.runs.heads_trainer import HeadsTrainer
from medusa_heads.trees.statistics import simulate_tokens_per_step
from scripts.demo.texts import (
    CONTINUATION,
    PROMPT,
    TARGET,
    autocast,
    check_recipes,
    windows,
    written,
)

NODES = (16, 32, 64)


@dataclass(frozen=True)
class Recipe:
    """How one set of heads is made.

    Attributes:
        name: of the row in the table.
        heads: arguments of HeadsConfig.
        self_distilled: learn from the target's own text instead of the corpus's.
        loss: weights of LossConfig's terms.
    """

    name: str
    heads: Mapping[str, Any]
    self_distilled: bool = False
    loss: Mapping[str, float] = field(default_factory=lambda: {"cross_entropy": 1.0})


FORWARD_KL = {"forward_kl": 1.0}
FIVE = {"num_heads": 5}
SEQUENTIAL = FIVE | {"kind": "hydra"}
TOGETHER = SEQUENTIAL | {"prefix_attention": True}
CORRECTED = FIVE | {"correction_rank": 128}
EAGLE3 = FIVE | {"kind": "eagle3"}
TARGET_WIDTH = 384
NORMED: dict[str, Any] = {"decoder": replace(DecoderShape.of_width(TARGET_WIDTH), norm_output=True)}
PREFIX = {"prefix_attention": True}
INDUCTION = {"induction": True}
SHORTCUT: dict[str, Any] = {"linear_shortcut": True}
RECIPES = {
    "plain-own": Recipe("plain: corpus text, own matrices", {"vocab_matrix": "own"}),
    "plain": Recipe("plain: corpus text, shared matrix", {}),
    "distilled": Recipe("plain + self-distilled text", {}, True),
    "kl": Recipe("plain + KL to the target", {}, False, FORWARD_KL),
    "sequential": Recipe("plain + sequential heads", {"kind": "hydra"}),
    "prefix": Recipe("plain + prefix attention", PREFIX),
    "together-kl": Recipe("all together, KL", TOGETHER, True, FORWARD_KL),
    "together-6": Recipe("all together, 6 heads", TOGETHER | {"num_heads": 6}, True),
}
RECIPES |= {
    key: Recipe(f"self-distilled, 5 {name}", heads, True)
    for key, name, heads in (
        ("independent", "independent heads", FIVE),
        ("prefix-distilled", "independent heads, prefix attention", FIVE | PREFIX),
        ("corrected", "corrected heads", CORRECTED),
        ("corrected-features", "corrected heads, features", CORRECTED | {"features": [1, 3]}),
        ("prefix-corrected", "corrected heads, prefix attention", CORRECTED | PREFIX),
        (
            "prefix-corrected-features",
            "corrected heads, prefix attention, features",
            CORRECTED | PREFIX | {"features": [1, 3]},
        ),
        (
            "block",
            "corrected heads of a block over three layers",
            CORRECTED | {"kind": "block", "features": [1, 3, 5]},
        ),
        ("sequential-distilled", "sequential heads", SEQUENTIAL),
        ("together", "sequential heads, prefix attention", TOGETHER),
        ("induction", "independent heads, induction", FIVE | SHORTCUT | INDUCTION),
        ("induction-corrected", "corrected, induction", CORRECTED | SHORTCUT | INDUCTION),
        ("induction-sequential", "sequential heads, induction", SEQUENTIAL | INDUCTION),
        ("eagle3", "steps of an eagle3 layer", EAGLE3),
        (
            "eagle3-features",
            "steps of an eagle3 layer over three layers",
            EAGLE3 | {"features": [1, 3, 5]},
        ),
    )
}
for suffix, said, more, keys in (
    ("norm", "norm_output", NORMED, ("eagle3", "eagle3-features")),
    ("shortcut", "linear shortcuts", SHORTCUT, ("prefix-distilled", "prefix-corrected")),
):
    RECIPES |= {
        f"{key}-{suffix}": replace(of, name=f"{of.name}, {said}", heads={**of.heads, **more})
        for key, of in ((key, RECIPES[key]) for key in keys)
    }


@dataclass
class CompareArguments:
    """How much text, and where the results go."""

    recipes: list[str] = flag(list(RECIPES), f"Of {', '.join(RECIPES)}.")
    num_prompts: list[int] = flag([6144], "Prompts to learn from, each for itself.")
    num_eval_prompts: int = flag(256, "Held-out prompts.")
    num_train_epochs: float = flag(1.0, "Passes over the text.")
    workers: int = flag(2, "Processes that generate text.")
    output_dir: Path = flag(Path("runs/recipes"), "Results and caches.")

    def __post_init__(self) -> None:
        check_recipes(self.recipes, RECIPES)


def compare(arguments: CompareArguments) -> None:
    """Train and measure the recipes, and print the table."""
    texts, results = Texts(TargetModel.from_pretrained(str(TARGET)), arguments), []
    for name in arguments.recipes:
        for prompts in sorted(arguments.num_prompts):
            results.append(run(name, texts, prompts, arguments))
            replace_json(arguments.output_dir / "recipes.json", results)
    show(results)
    print(*gains(results), sep="\n")


class Texts:
    """The rows that recipes learn from, and those that all are measured on."""

    def __init__(self, target: TargetModel, arguments: CompareArguments) -> None:
        self.target, self._arguments = target, arguments
        pieces = windows("train", max(arguments.num_prompts), PROMPT + CONTINUATION)
        prompts = pieces.map(lambda row: {"input_ids": row["input_ids"][:PROMPT]})
        self.corpus = pieces.map(
            lambda row: {
                "input_ids": row["input_ids"],
                "labels": [IGNORED] * PROMPT + row["input_ids"][PROMPT:],
            },
            remove_columns=pieces.column_names,
        )
        self.distilled = self._written(prompts, greedy_share=0.5)
        held_out = windows("held_out", arguments.num_eval_prompts)
        self.measured = {
            "greedy": self._written(held_out, greedy_share=1.0),
            "T = 0.7": self._written(held_out, greedy_share=0.0),
        }

    def _written(self, prompts: Dataset, greedy_share: float) -> Dataset:
        output, workers = self._arguments.output_dir, self._arguments.workers
        return written(self.target, prompts, greedy_share, output, workers)


def run(name: str, texts: Texts, prompts: int, arguments: CompareArguments) -> dict[str, Any]:
    """Train one recipe's heads on the text of so many prompts, and measure them."""
    recipe, folder = RECIPES[name], arguments.output_dir / "heads" / name
    if folder.exists():
        shutil.rmtree(folder)  # of an earlier run
    config = HeadsConfig(**recipe.heads)
    rows = (texts.distilled if recipe.self_distilled else texts.corpus).select(range(prompts))
    if recipe.self_distilled:
        rows = learnt_whole(rows)
    optimisation = OptimisationArguments(
        num_train_epochs=arguments.num_train_epochs,
        bf16=autocast(),
        per_device_eval_batch_size=32,
        logging_steps=50,
    )
    training_args = to_training_arguments(optimisation, config.vocab_matrix)
    started = time.perf_counter()
    heads = train_heads(
        texts.target,
        rows,
        eval_dataset=texts.measured["greedy"].select(range(8)),  # measured in full below
        config=config,
        output_dir=folder,
        training_args=training_args,
        objective=LossConfig(recipe.loss),
    )
    seconds = time.perf_counter() - started
    trainer = HeadsTrainer(heads, texts.target, training_args, rows, texts.measured["greedy"])
    figures = {}
    for setting, text in texts.measured.items():
        figures[setting] = measure(torch.as_tensor(trainer.predict(text).predictions))
        of_heads, _ = measure_heads(heads, trainer.hidden_states, text)
        figures[setting]["dynamic"] = of_heads.dynamic_tokens_per_step
    return {
        "recipe": recipe.name,
        **asdict(recipe),
        "prompts": prompts,
        "training_tokens": sum(label != IGNORED for row in rows["labels"] for label in row)
        * arguments.num_train_epochs,
        "parameters": sum(parameter.numel() for parameter in heads.parameters()),
        "seconds": round(seconds),
        "bf16": optimisation.bf16,
        "measured": figures,
    }


def measure(ranks_BTK: Tensor, sizes: Sequence[int] = NODES) -> dict[str, Any]:
    """Top-1 accuracies, and tokens per step by nodes: each half's tree walked on the other half."""
    halves = ranks_BTK[::2], ranks_BTK[1::2]
    tokens_per_step = {}
    for nodes in sizes:
        walked = [
            simulate_tokens_per_step(walked_BTK, rank_statistics(chosen_BTK).choices(nodes))
            for chosen_BTK, walked_BTK in (halves, halves[::-1])
        ]
        tokens_per_step[nodes] = sum(walked) / 2
    return {
        "top_1": rank_statistics(ranks_BTK).top_k_accuracy(1),
        "tokens_per_step": tokens_per_step,
    }


def show(results: list[dict[str, Any]]) -> None:
    """The table, with each recipe as a ratio to the plain one with a shared matrix."""
    table = Table(title="Tokens per step on held-out prompts (static trees, dynamic ones of 31)")
    table.add_column("recipe")
    of_greedy = ("greedy: 16", "32", "64", "over plain at 32", "dynamic")
    columns = ("prompts", "parameters", "top-1 by head, greedy", *of_greedy, "T = 0.7: 32")
    for column in (*columns, "dynamic", "seconds"):
        table.add_column(column, justify="right")
    plain = next((r for r in results if r["recipe"] == RECIPES["plain"].name), results[0])
    base = plain["measured"]["greedy"]["tokens_per_step"][32]
    for result in results:
        greedy, sampled = result["measured"]["greedy"], result["measured"]["T = 0.7"]
        table.add_row(
            result["recipe"],
            str(result["prompts"]),
            f"{result['parameters'] / 1e6:.1f} M",
            " ".join(f"{accuracy:.2f}" for accuracy in greedy["top_1"]),
            *(f"{greedy['tokens_per_step'][nodes]:.2f}" for nodes in NODES),
            f"{greedy['tokens_per_step'][32] / base:.2f}x",
            f"{greedy['dynamic'][31]:.2f}",
            f"{sampled['tokens_per_step'][32]:.2f}",
            f"{sampled['dynamic'][31]:.2f}",
            str(result["seconds"]),
        )
    Console(width=150).print(table)


def gains(results: list[dict[str, Any]]) -> list[str]:
    """What twice the text gives: by least squares over its logarithm."""
    lines = []
    for name in dict.fromkeys(result["recipe"] for result in results):
        own = [result for result in results if result["recipe"] == name]
        doublings = [math.log2(result["training_tokens"]) for result in own]
        for setting in own[0]["measured"] if len(own) > 1 else ():
            reached = [result["measured"][setting]["tokens_per_step"][32] for result in own]
            slope = statistics.linear_regression(doublings, reached).slope
            lines.append(f"{name}: twice the text gives {slope:+.2f} at 32 nodes, {setting}")
    return lines


main = command("scripts.compare.recipes", compare, __doc__)

if __name__ == "__main__":
    sys.exit(main())
