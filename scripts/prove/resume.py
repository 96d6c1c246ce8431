"""Proof that a run killed at random points ends, bit for bit, where the uninterrupted one does.

python -m scripts.prove.resume --kills 20 --report runs/resume.json

`train-heads` runs as a process of its own, on the embedded target and a few dozen pieces of Python
sources, with a checkpoint after every step. It gets SIGKILL at a random moment (every `term_every`
times SIGTERM) and is started again with `--resume_from_checkpoint auto`, until it comes to its end.
Compared with a run that nobody touched: the written heads, the weights and the optimiser's state of
the last checkpoint, and every line of the loss curve. The negative control resumes at the first
rows instead of the next ones, and must differ.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import HfArgumentParser

from medusa_heads.checkpoint.stored_heads import WEIGHTS_FILE
from medusa_heads.data.corpus import standard_library
from medusa_heads.training.runs.resumable import STATE_FILE, checkpoints, is_whole

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "from medusa_heads.cli.train_heads import main; raise SystemExit(main())"
STEP = re.compile(r"step (\d+)/(\d+)  loss")


@dataclass
class ProofArguments:
    """How hard to try."""

    kills: int = field(default=20, metadata={"help": "Interruptions, at random moments."})
    term_every: int = field(default=4, metadata={"help": "So often SIGTERM in place of SIGKILL."})
    steps: int = field(default=60, metadata={"help": "Optimiser steps of the run."})
    seed: int = field(default=0, metadata={"help": "Of the moments."})
    report: str | None = field(default=None, metadata={"help": "JSON file to write."})


@dataclass
class Outcome:
    """What became of the interrupted run."""

    interruptions: list[dict[str, Any]]
    half_written: int
    differences: list[str]
    control_differences: list[str]


def main() -> int:
    """Prove as the flags say; returns the exit code."""
    parser = HfArgumentParser(ProofArguments)  # type: ignore[arg-type]
    (arguments,) = parser.parse_args_into_dataclasses()
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        outcome = prove(Path(folder), arguments, console)
    if arguments.report:
        Path(arguments.report).parent.mkdir(parents=True, exist_ok=True)
        content = {"settings": asdict(arguments), **asdict(outcome)}
        Path(arguments.report).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    console.print(
        f"{len(outcome.interruptions)} interruptions, {outcome.half_written} of them in the middle "
        f"of a checkpoint; differences: {outcome.differences or 'none'}; negative control: "
        f"{len(outcome.control_differences)} differences"
    )
    return 0 if verdict(outcome) else 1


def verdict(outcome: Outcome) -> bool:
    """Whether nothing differs, and the control does."""
    return not outcome.differences and bool(outcome.control_differences)


def prove(folder: Path, arguments: ProofArguments, console: Console) -> Outcome:
    """Run, interrupt, compare; everything is kept in `folder`."""
    corpus = write_corpus(folder / "corpus.jsonl")
    whole, interrupted, control = (folder / n for n in ("whole", "interrupted", "control"))

    console.print("one run without interruption")
    run = Run(corpus, whole, arguments.steps)
    run.finish()
    # As long as the steps take: most interruptions then find the run somewhere in its middle.
    window = 2 * run.seconds_of_steps / (arguments.kills + 1)

    draw = random.Random(arguments.seed)
    interruptions: list[dict[str, Any]] = []
    half_written = 0
    while len(interruptions) < arguments.kills:
        run = Run(corpus, interrupted, arguments.steps)
        run.started.wait()
        time.sleep(draw.uniform(0, window))
        number = len(interruptions) + 1
        kind = signal.SIGKILL if number % arguments.term_every else signal.SIGTERM
        code = run.stop(kind)
        if code == 0:  # it came to its end first: once more from the start
            shutil.rmtree(interrupted)
            continue
        # After the last step SIGTERM is not waited for.
        expected = (-kind,) if kind is signal.SIGKILL else (-kind, 128 + kind)
        assert code in expected, f"exit code {code}\n{run.output()}"
        found = checkpoints(interrupted)
        broken = [checkpoint.name for checkpoint in found if not is_whole(checkpoint)]
        half_written += bool(broken)
        newest = found[0].name if found else None
        interruptions.append({"signal": kind.name, "newest": newest, "half_written": broken})
        console.print(f"{number}: {kind.name}, newest {newest}, half-written {broken or 'none'}")
    Run(corpus, interrupted, arguments.steps).finish()
    differences = compare(whole, interrupted)

    console.print("the negative control")
    run = Run(corpus, control, arguments.steps)
    run.started.wait()
    assert run.stop(signal.SIGTERM) == 128 + signal.SIGTERM, run.output()
    Run(corpus, control, arguments.steps, ignore_data_skip=True).finish()
    return Outcome(interruptions, half_written, differences, compare(whole, control))


def write_corpus(file: Path) -> Path:
    """A few dozen pieces of Python sources, one document a line."""
    texts = standard_library("train")["text"][:8]
    pieces = [text[start : start + 300] for text in texts for start in range(0, 3600, 300)]
    lines = [json.dumps({"text": piece}) for piece in pieces if piece.strip()]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


class Run:
    """A `train-heads` process; `started` is set with its first loss line."""

    def __init__(self, corpus: Path, output: Path, steps: int, **training_args: Any) -> None:
        flags = {
            "model_name_or_path": ROOT / "assets/demo-target",
            "dataset": corpus,
            "output_dir": output,
            "max_length": 64,
            "num_heads": 2,
            "max_steps": steps,
            "per_device_train_batch_size": 4,
            "save_steps": 2,
            "save_total_limit": 2,
            "eval_rows": 4,
            "logging_steps": 1,
            "resume_from_checkpoint": "auto",
            "training_args": json.dumps({"use_cpu": True, **training_args}),
        }
        given = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", COMMAND, *given],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
        self.started = threading.Event()
        self._times: list[float] = []
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)
            if STEP.search(line):
                self._times.append(time.monotonic())
                self.started.set()
        self.started.set()  # nobody waits for a run that has ended

    @property
    def seconds_of_steps(self) -> float:
        """From the first loss line to the last."""
        return self._times[-1] - self._times[0]

    def stop(self, kind: signal.Signals) -> int:
        """Send the signal, unless the process has ended; returns the exit code."""
        self.process.send_signal(kind)
        return self.wait()

    def wait(self) -> int:
        """Wait for the end; returns the exit code."""
        code = self.process.wait()
        self._reader.join()
        return code

    def finish(self) -> None:
        """Wait for the end, which must be a good one."""
        code = self.wait()
        assert code == 0, f"exit code {code}\n{self.output()}"

    def output(self) -> str:
        """What it has printed."""
        return "".join(self._lines)


def compare(whole: Path, other: Path) -> list[str]:
    """What differs between two finished runs, named."""
    last = [checkpoints(run)[0] for run in (whole, other)]
    pairs = {
        "heads": [load_file(run / WEIGHTS_FILE) for run in (whole, other)],
        "last weights": [load_file(path / "model.safetensors") for path in last],
    }
    states = [torch.load(path / "optimizer.pt", weights_only=True)["state"] for path in last]
    pairs |= {f"optimiser state {key}": [state[key] for state in states] for key in states[0]}
    differences = [name for name, (a, b) in pairs.items() if not equal(a, b)]
    expected, found = (loss_curve(path) for path in last)
    return differences + [f"loss {step}" for step in expected if found.get(step) != expected[step]]


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether tensors of the same names are bitwise equal."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def loss_curve(checkpoint: Path) -> dict[int, float]:
    """Loss by step."""
    history = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))["log_history"]
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}


if __name__ == "__main__":
    raise SystemExit(main())
