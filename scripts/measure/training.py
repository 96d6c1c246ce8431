"""What training heads costs, beside the target's own forward, and how much memory it takes.

python -m scripts.measure.training --dtype bfloat16
python -m scripts.measure.training --measure memory --memory_heads 1 5

Rate: in one process and in turns, the frozen target's forward (its logits included), the same
forward up to the last hidden state, and a whole step of training: that forward, the heads, their
loss, its gradients, and the optimiser. Ratios are medians of the turns' ratios.

Memory: a fresh process for each number of heads. Counted is what a step takes at most beyond what
stands before it begins: the target's weights, the heads' and the optimiser's numbers.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from statistics import median
from typing import Any, Literal
from unittest.mock import patch

from medusa_heads.cli.flags.environment import told_to_torch

os.environ.update(told_to_torch())

import torch
from rich.table import Table
from torch import Tensor

from medusa_heads import HeadsConfig
from medusa_heads.cli.flags.arguments import command
from medusa_heads.config import HeadsKind
from medusa_heads.heads import new_heads
from medusa_heads.machine.devices import wait_for
from medusa_heads.machine.facts import describe_machine
from medusa_heads.machine.memory import PeakMemory
from medusa_heads.settings import at_least, flag
from medusa_heads.tables import formatted, on_screen
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.loss.heads import batch_loss
from medusa_heads.training.loss.teacher import Teacher
from scripts.measure.random_target import random_target
from scripts.measure.written import write_report

MEBIBYTE = 1 << 20


@dataclass
class MeasureArguments:
    """What to measure, on what."""

    measure: Literal["all", "rate", "memory"] = flag("all", "what is measured")
    random_target: str = flag("1024x12x16", "WIDTHxLAYERSxHEADS[xKV_HEADS] of a random Llama")
    vocabulary: int = flag(4096, "of the random target, in tokens")
    dtype: Literal["float32", "bfloat16"] = flag(
        "float32", "of the target; with bfloat16 the heads, kept in fp32, run in autocast"
    )
    device: str | None = flag(None, "such as cuda")
    kind: HeadsKind = flag("medusa", "of heads")
    vocab_matrix: Literal["shared", "own"] = flag("shared", "of heads")
    num_heads: int = flag(4, "heads trained for the rate")
    batch_size: int = flag(8, "rows of text in a step")
    length: int = flag(512, "tokens of a row, all supervised")
    repeats: int = flag(6, "turns; the first warms up")
    memory_heads: list[int] = flag([1, 5], "numbers of heads for the memory")
    output: str = flag("runs/measure_training.json", "the numbers")

    def __post_init__(self) -> None:
        at_least(self, 1, "vocabulary", "num_heads", "batch_size")
        at_least(self, 2, "repeats")
        at_least(self, 3, "length")
        if min(self.memory_heads, default=0) < 1:
            raise ValueError(f"expected memory_heads of at least 1, got {self.memory_heads}")


def write(arguments: MeasureArguments, objective: LossConfig) -> None:
    """Measure as the flags say, and write what comes out."""
    report: dict[str, Any] = {"machine": describe_machine(), "arguments": vars(arguments)}
    if arguments.measure in ("all", "rate"):
        report["rate"] = rate(Training(arguments, objective), arguments.repeats)
    if arguments.measure in ("all", "memory"):
        sizes = (replace(arguments, num_heads=heads) for heads in arguments.memory_heads)
        report["memory"] = [peak_alone(each, objective) for each in sizes]
    write_report(arguments.output, report, *tables_of(report))


class Training:
    """A random target, fresh heads, an optimiser, and one batch of random text."""

    def __init__(self, arguments: MeasureArguments, objective: LossConfig) -> None:
        self.objective = objective
        self.target = random_target(
            arguments.random_target,
            arguments.vocabulary,
            dtype=arguments.dtype,
            device=arguments.device,
        )
        config = HeadsConfig(
            kind=arguments.kind,
            num_heads=arguments.num_heads,
            vocab_matrix=arguments.vocab_matrix,
        )
        self.heads = new_heads(self.target, config)
        self.optimiser = torch.optim.AdamW(self.heads.parameters(), lr=1e-3, fused=True)
        self.teacher = Teacher.from_target(self.target) if objective.needs_teacher else None
        self.low = arguments.dtype != "float32"
        self.ids_BT = self.text(arguments.batch_size, arguments.length)

    def text(self, batch: int, length: int) -> Tensor:
        """Random tokens; they cost what any others do."""
        generator = torch.Generator().manual_seed(0)
        ids_BT = torch.randint(self.target.vocab_size, (batch, length), generator=generator)
        return ids_BT.to(self.target.device)

    @torch.no_grad()
    def forward(self) -> None:
        """The target's own forward, as it is without any heads."""
        self.target.model(input_ids=self.ids_BT, use_cache=False)

    def hidden(self) -> None:
        """The same up to the last hidden state."""
        self.target.hidden(self.ids_BT)

    def step(self, ids_BT: Tensor | None = None) -> None:
        """One optimiser step, on the same batch unless another is given."""
        ids_BT = self.ids_BT if ids_BT is None else ids_BT
        with torch.autocast(ids_BT.device.type, torch.bfloat16, enabled=self.low):
            hidden_BTD = self.target.hidden(ids_BT)
            loss = batch_loss(
                self.heads,
                hidden_BTD,
                {"input_ids": ids_BT, "labels": ids_BT},
                ids_BT.numel(),
                objective=self.objective,
                teacher=self.teacher,
            )
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()


def rate(training: Training, repeats: int) -> dict[str, Any]:
    """Tokens a second of the three, and training's share of the others."""
    ways: dict[str, Callable[[], None]] = {
        "forward": training.forward,
        "hidden": training.hidden,
        "training": training.step,
    }
    turns = []
    for _ in range(repeats):
        turn = {}
        for name, way in ways.items():
            wait_for(training.target.device)
            start = time.perf_counter()
            way()
            wait_for(training.target.device)
            turn[name] = time.perf_counter() - start
        turns.append(turn)
    turns = turns[1:]  # the first warmed up
    tokens = training.ids_BT.numel()
    matrix = training.target.get_output_embeddings().weight
    return {
        "parameters": training.target.model.num_parameters(),
        "vocab_matrix_share": matrix.numel() / training.target.model.num_parameters(),
        "tokens_per_second": {name: tokens / median(t[name] for t in turns) for name in ways},
        "training_over_forward": median(t["forward"] / t["training"] for t in turns),
        "training_over_hidden": median(t["hidden"] / t["training"] for t in turns),
    }


def peak_alone(arguments: MeasureArguments, objective: LossConfig) -> dict[str, Any]:
    """`peak` in a process of its own."""
    # Freed memory goes back at once, so that the peak is that of what is in use.
    with (
        patch.dict(os.environ, MALLOC_MMAP_THRESHOLD_="65536"),
        ProcessPoolExecutor(1, get_context("spawn")) as pool,
    ):
        measured = pool.submit(peak, arguments, objective).result()
    return {"num_heads": arguments.num_heads, **measured}


def peak(arguments: MeasureArguments, objective: LossConfig) -> dict[str, float]:
    """Mebibytes that stand before a step, and that it takes beyond them at most."""
    training = Training(arguments, objective)
    training.step(training.text(1, 3))  # the optimiser's numbers come with its first step
    training.step(training.text(1, 3))
    memory = PeakMemory(training.target.device)
    training.step()
    most, above = memory.read()
    if most is None or above is None:
        raise ValueError("memory on a CPU can be measured on Linux alone")
    return {"standing_mib": (most - above) / MEBIBYTE, "step_mib": above / MEBIBYTE}


def tables_of(report: dict[str, Any]) -> list[Table]:
    """What was measured, for the screen."""
    tables = []
    if "rate" in report:
        row, cells = report["rate"], []
        for name, label in {"forward": "target: forward", "hidden": "target: hidden"}.items():
            ratio = f"{row[f'training_over_{name}']:.3f}"
            cells.append([label, f"{row['tokens_per_second'][name]:.0f}", ratio])
        cells.append(["training", f"{row['tokens_per_second']['training']:.0f}", ""])
        size, share = row["parameters"] / 1e6, row["vocab_matrix_share"]
        title = f"{size:.0f}M parameters, {share:.1%} of them the vocabulary matrix"
        tables.append(on_screen(title, (("", "tokens/s", "training runs at"), cells)))
    if "memory" in report:
        columns = {
            "heads": "{num_heads}",
            "standing": "{standing_mib:.0f}",
            "a step beyond it": "{step_mib:.0f}",
        }
        tables.append(on_screen("memory, MiB", formatted(columns, report["memory"])))
    return tables


main = command("scripts.measure.training", write, __doc__)

if __name__ == "__main__":
    sys.exit(main())
