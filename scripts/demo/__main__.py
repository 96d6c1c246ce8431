"""The demo: train heads for the small embedded model, then measure what they are worth.

    python -m scripts.demo

`make demo` does that, too. It tries for some seconds how fast this machine is, plans as much text
and as many prompts as fit into a few minutes, and does what two public commands do: `train-heads
--config configs/demo.yaml` and `medusa-heads benchmark runs/demo/heads`. What they make is kept in
`runs/demo`; a stage whose inputs have not changed since it last finished is not run again.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

from medusa_heads.cli.flags.environment import told_to_torch

os.environ.update(told_to_torch())

from rich.console import Console

from medusa_heads.cli import train_heads
from medusa_heads.cli.flags.arguments import command, run_command
from medusa_heads.files import read_json, replace_json
from medusa_heads.machine.products import dtype_name
from scripts.demo.plan import Plan, in_words
from scripts.demo.recipe import Recipe
from scripts.demo.screen import show_plan, show_result

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Stage:
    """A part of the demo.

    Attributes:
        name: of it.
        purpose: what it does, for the screen.
        seconds: that it is expected to take.
        made: what it leaves behind.
        key: stands for everything that decides the result.
        run: does it; returns an exit code.
    """

    name: str
    purpose: str
    seconds: float
    made: tuple[Path, ...]
    key: Callable[[], str]
    run: Callable[[], int]


def demo() -> int:
    """Run the demo; returns the exit code."""
    os.chdir(ROOT)  # the paths of the configuration are relative to the repository
    return run_demo(Recipe(), Console())


def run_demo(recipe: Recipe, console: Console) -> int:
    """Run the stages that are needed; returns the exit code.

    Raises:
        ValueError: the configuration or the target cannot be used.
    """
    console.print("Trying how fast this machine is ...")
    plan = recipe.plan()
    stages = stages_of(recipe, plan)
    reused = []
    # Heads that are trained anew make any report an old one.
    if is_done(stages[0], recipe):
        plan = with_time_left(recipe, plan)
        stages = stages_of(recipe, plan)
        reused = [stage for stage in stages if is_done(stage, recipe)]
    show_plan(
        console,
        recipe,
        plan,
        [
            (stage.name, stage.purpose, None if stage in reused else stage.seconds)
            for stage in stages
        ],
    )
    again = stages[1] in reused
    for number in range(len(reused), len(stages)):
        stage = stages_of(recipe, plan)[number]
        console.rule(f"{number + 1} of {len(stages)}: {stage.name}")
        started = time.perf_counter()
        code = stage.run()
        if code != 0:
            return code
        seconds = time.perf_counter() - started
        remember(stage, recipe, seconds)
        console.print(f"{stage.name}: {seconds:.0f} seconds")
        planned, plan = plan.amounts.prompts, with_time_left(recipe, plan)
        if plan.amounts.prompts < planned:
            console.print(
                f"That took longer than planned: {plan.amounts.prompts} prompts are measured in "
                f"place of {planned}, which takes about {in_words(plan.measure_seconds)}."
            )
    console.rule("result")
    show_result(console, recipe, reread=again)
    return 0


def with_time_left(recipe: Recipe, plan: Plan) -> Plan:
    """The plan once training has taken what it took; these seconds are kept, so that an
    interrupted demo goes on with the same prompts."""
    took = _done(recipe).get("train_seconds")
    if not isinstance(took, float) or not 0.0 < took < float("inf"):
        return plan
    return plan.after_training(took, budget=recipe.budget, least=recipe.floor.prompts)


def stages_of(recipe: Recipe, plan: Plan) -> tuple[Stage, Stage]:
    """What there is to do, as much of it as was planned."""
    rows, prompts = plan.amounts.rows, plan.amounts.prompts
    dtype = dtype_name(recipe.decode.dtype)
    proof = "their texts compared, too" if dtype == "float32" else "and their texts in float32"
    return (
        Stage(
            "train",
            f"The target continues {rows:,} pieces of Python's standard library itself; "
            f"{recipe.heads_config.num_heads} heads learn from that text to guess its next tokens.",
            plan.train_seconds,
            (recipe.heads / "medusa_heads.json", recipe.heads / "medusa_lm_head.safetensors"),
            lambda: recipe.heads_key(plan),
            lambda: train(recipe, plan),
        ),
        Stage(
            "measure",
            f"{prompts} prompts from packages that neither has seen: heads against transformers' "
            f"own decoding and against copying from the text, speed in {dtype}, {proof}.",
            plan.measure_seconds,
            (recipe.report_file, recipe.folder / "report.png"),
            lambda: recipe.report_key(plan),
            lambda: run_command(lambda: recipe.measure(plan), prog="demo"),
        ),
    )


def train(recipe: Recipe, plan: Plan) -> int:
    """Train the heads; returns the exit code of train-heads. The states that they learnt from are
    removed, since they take more room than all the rest."""
    code = train_heads.main(recipe.train_flags(plan))
    if code == 0:
        rmtree(recipe.states, ignore_errors=True)
    return code


def is_done(stage: Stage, recipe: Recipe) -> bool:
    """Whether the stage finished before, from the same inputs, and its files are still there."""
    if not all(path.is_file() for path in (*stage.made, recipe.heads / recipe.weights_file)):
        return False
    return bool(_done(recipe).get(stage.name) == stage.key())


def remember(stage: Stage, recipe: Recipe, seconds: float) -> None:
    """Note that the stage has finished, and what it took."""
    content = _done(recipe) | {stage.name: stage.key(), f"{stage.name}_seconds": seconds}
    replace_json(recipe.stages_file, content)


def _done(recipe: Recipe) -> dict[str, Any]:
    try:
        return read_json(recipe.stages_file)
    except ValueError:
        return {}


main = command("demo", demo, __doc__)

if __name__ == "__main__":
    sys.exit(main())
