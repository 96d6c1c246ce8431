"""The demo: train heads for the small embedded model, then measure what they are worth.

python scripts/demo.py            (or: make demo)

It runs two public commands one after the other, `train-heads --config configs/demo.yaml` and
`medusa-heads benchmark runs/demo/heads --report runs/demo`. What they make is kept in `runs/demo`;
a stage whose inputs have not changed since it last finished is not run again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

# Waiting threads sleep instead of spinning; read when torch is loaded, so set before it is.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import yaml
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from medusa_heads.cli import train_heads
from medusa_heads.cli.arguments import run_command
from medusa_heads.cli.benchmark import BenchmarkArguments, run_benchmark
from medusa_heads.files import replace_file

ROOT = Path(__file__).resolve().parents[1]
CONFIG = Path("configs/demo.yaml")
TARGET = Path("assets/demo-target")
FOLDER = Path("runs/demo")
HEADS = FOLDER / "heads"
STAGES_FILE = FOLDER / "stages.json"
BENCHMARK = BenchmarkArguments(checkpoint=str(HEADS), report=str(FOLDER))


@dataclass(frozen=True)
class Stage:
    """A part of the demo: what it does, how long it takes on two cores, what it leaves behind.

    `key` stands for everything that decides the result, `run` returns an exit code.
    """

    name: str
    purpose: str
    duration: str
    made: tuple[Path, ...]
    key: Callable[[], str]
    run: Callable[[], int]


def main() -> int:
    """Run the stages that are needed; returns the exit code."""
    os.chdir(ROOT)  # the paths of the configuration are relative to the repository
    console = Console()
    recipe = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    stages = (
        Stage(
            "train",
            f"The target continues {recipe['num_prompts']:,} pieces of Python's standard library "
            f"itself; {recipe['num_heads']} heads learn from that text to guess its next tokens.",
            "3 minutes",
            (HEADS / "medusa_heads.json", HEADS / "medusa_lm_head.safetensors"),
            heads_key,
            lambda: train_heads.main(["--config", str(CONFIG), "--output_dir", str(HEADS)]),
        ),
        Stage(
            "measure",
            f"{BENCHMARK.num_prompts} prompts from packages that neither has seen: heads against "
            "transformers' own decoding, speed in bf16, identity in fp32.",
            "2 minutes",
            (FOLDER / "report.json", FOLDER / "report.png"),
            report_key,
            lambda: run_command(lambda: run_benchmark(BENCHMARK), prog="demo"),
        ),
    )
    reused = [stage for stage in stages if is_done(stage)]
    # Heads that are trained anew make any report an old one.
    if stages[0] not in reused:
        reused = []
    show_plan(console, stages, reused)
    for number, stage in enumerate(stages, start=1):
        if stage in reused:
            continue
        console.rule(f"{number} of {len(stages)}: {stage.name}")
        started = time.perf_counter()
        code = stage.run()
        if code != 0:
            return code
        remember(stage)
        console.print(f"{stage.name}: {time.perf_counter() - started:.0f} seconds")
    console.rule("result")
    show_result(console, reread=stages[1] in reused)
    return 0


def heads_key() -> str:
    """The configuration, the target's files, this package's sources, and the Python whose library
    is the text."""
    digest = hashlib.sha256(f"{metadata.version('medusa-heads')} {corpus_version()}".encode())
    sources = [file for room in ("medusa_heads", "training", "inference") for file in _python(room)]
    for file in (CONFIG, *sorted(path for path in TARGET.iterdir() if path.is_file()), *sources):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def _python(room: str) -> list[Path]:
    return sorted(Path(room).rglob("*.py"))


def report_key() -> str:
    """The heads as they lie there, their target, and the settings of the measurement."""
    digest = hashlib.sha256((heads_key() + json.dumps(asdict(BENCHMARK))).encode())
    digest.update((HEADS / "medusa_lm_head.safetensors").read_bytes())
    for package in ("torch", "transformers"):
        digest.update(metadata.version(package).encode())
    return digest.hexdigest()


def corpus_version() -> str:
    return platform.python_version()


def is_done(stage: Stage) -> bool:
    """Whether the stage finished before, from the same inputs, and its files are still there."""
    if not all(path.is_file() for path in (*stage.made, HEADS / "medusa_lm_head.safetensors")):
        return False
    return bool(_done().get(stage.name) == stage.key())


def remember(stage: Stage) -> None:
    replace_file(STAGES_FILE, json.dumps(_done() | {stage.name: stage.key()}, indent=2) + "\n")


def _done() -> dict[str, Any]:
    try:
        content = json.loads(STAGES_FILE.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def show_plan(console: Console, stages: tuple[Stage, ...], reused: list[Stage]) -> None:
    """The first screen: what is about to happen, and how long it takes."""
    console.print(
        Panel(
            "A language model writes one token per forward pass. Extra heads guess several more at "
            "once; the model checks all guesses in its next pass and keeps those it would have "
            "written itself. The text stays the same, the passes become fewer.\n\n"
            f"Everything is in this repository; results go to {FOLDER}. Times are for 2 CPU cores.",
            title="medusa-heads demo",
        )
    )
    plan = Table()
    for column in ("stage", "what it does", "takes about"):
        plan.add_column(column, no_wrap=column != "what it does")
    for number, stage in enumerate(stages, start=1):
        takes = "reused" if stage in reused else stage.duration
        plan.add_row(f"{number} {stage.name}", stage.purpose, takes)
    console.print(plan)
    if reused:
        names = " and ".join(stage.name for stage in reused)
        console.print(
            f"Nothing has changed since an earlier run: {names} reused. "
            f"To start anew, remove {FOLDER} and run the demo again."
        )


def show_result(console: Console, *, reread: bool) -> None:
    """The tables of an earlier run, then the proof in a line and where everything lies."""
    from medusa_heads.inference.benchmark_tables import tables

    report = json.loads((FOLDER / "report.json").read_text(encoding="utf-8"))
    if reread:
        console.print(f"Measured {report['created']}:")
        for table in tables(report):
            console.print(table)
    for setting in report["settings"]:
        if setting["dtype"] == "float32":
            same = round(setting["methods"][-1]["identical"] * setting["prompts"])
            console.print(
                f"fp32, {setting['name']}: with heads, {same} of {setting['prompts']} texts are "
                "token for token those of transformers' generate."
            )
    for name, path in (("heads", HEADS), ("numbers", "report.json"), ("picture", "report.png")):
        console.print(f"{name:>8}: {FOLDER / path if path != HEADS else HEADS}", highlight=False)
    console.print(
        f'Try them: .venv/bin/medusa-heads generate {HEADS} --prompt "def main():"',
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    sys.exit(main())
