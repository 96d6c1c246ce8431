"""Processes of this machine that train together (gloo), forked from one that has imported all."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

# Imported once; a process that imports torch for itself takes four seconds.
_IMPORTED = ["pytest", "tests.training.processes", "medusa_heads.training.runs.heads", "peft"]

_LONGEST = 90.0  # seconds without an end, of processes that are sound


class Failed(Exception):
    """Some process ended otherwise than well; what it printed."""


def forked() -> ForkServerContext:
    """What starts processes that need import nothing: all of a worker's tests share what they are
    forked from."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


def run_together(
    count: int,
    folder: Path,
    runs: Sequence[Sequence[str]],
    *,
    environ: Mapping[str, str] | None = None,
    kill_in_step: int | None = None,
    ends_alone: bool = False,
) -> None:
    """`train-heads` with each of these flags, one run after the other, in so many processes at
    once and in the environment of a launch; perhaps they die in a step. Each says what it finds in
    the folder of a run that has ended. Where one ends badly, the others are killed, unless they
    must end by themselves. Raises Failed."""
    context = forked()
    folder.mkdir()
    given = folder, runs, environ or {}, kill_in_step
    processes = [
        context.Process(target=_train, args=(rank, count, *given)) for rank in range(count)
    ]
    for process in processes:
        process.start()
    running: dict[Any, Any] = {process.sentinel: process for process in processes}
    while running:
        ended = wait(list(running), timeout=_LONGEST if ends_alone else None)
        if not ended:
            for other in running.values():
                other.kill()
            raise AssertionError("some processes wait for ever for others")
        for sentinel in ended:
            process = running.pop(sentinel)
            process.join()
            if process.exitcode and not ends_alone:
                for other in running.values():  # which would wait for it for ever
                    other.kill()
    for rank, process in enumerate(processes):
        if process.exitcode not in (0, -9):
            raise Failed((folder / f"{rank}.txt").read_text())
    if any(process.exitcode for process in processes):
        raise Failed("killed")


def join(rank: int, count: int, folder: Path) -> None:
    """Make this process one of so many that work together, and print into the folder."""
    import torch.distributed as dist

    printed = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ.update(zip(names, map(str, (rank, rank, count, count)), strict=True))
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count)


def _train(
    rank: int, count: int, folder: Path, runs: Any, environ: Any, kill_in_step: int | None
) -> None:
    import torch.distributed as dist

    from medusa_heads.cli.train_heads import main
    from medusa_heads.training.measure import report

    os.environ.update(environ)
    join(rank, count, folder)
    report.draw_plots = lambda *_: []  # as in the process that compares
    if kill_in_step is not None:
        die_in_step(kill_in_step)
    for flags in runs:
        if code := main(list(flags)):
            sys.exit(code)
        print("left:", *sorted(os.listdir(flags[flags.index("--output_dir") + 1])), flush=True)
    dist.destroy_process_group()


def die_in_step(step: int) -> None:
    """From now on a run is killed when it has made so many steps."""
    from medusa_heads.training.runs.callbacks import Interruptions

    on_step_end = Interruptions.on_step_end

    def dying(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        on_step_end(self, args, state, control, **kwargs)
        if state.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    Interruptions.on_step_end = dying  # type: ignore[method-assign]
