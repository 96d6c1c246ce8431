"""Proof that fp32 text equals `generate()`, token by token: a million tokens, and broken engines.

    python -m scripts.prove.tokens
    python -m scripts.prove.tokens --targets demo llama --tokens 20000 --out runs/some

Every target is decoded in a process of its own; every case leaves a line of JSON, and a run that
was stopped goes on behind the last one. Once all targets had their turn, they have another with
other prompts, until so many tokens are compared. Exit code 1 if a token differs, if a fault of a
broken engine goes unnoticed, or if a case fails.
"""

from __future__ import annotations

import multiprocessing
import sys
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from medusa_heads.cli.flags.arguments import parse_arguments, run_command
from medusa_heads.settings import at_least, flag
from scripts.prove.architecture_check import one_line
from scripts.prove.lossless.cases import Record, run
from scripts.prove.lossless.page import TITLE, section, write_section
from scripts.prove.lossless.records import Records, Summary
from scripts.prove.lossless.targets import all_targets


@dataclass
class TokensArguments:
    """What is compared, and where the record goes."""

    tokens: int = flag(1_000_000, "Compared at least, of all targets.")
    out: Path = flag(Path("runs/tokens"), "Folder of the record, a line a case.")
    seed: int = flag(0, "Of prompts and draws; then one up each turn.")
    workers: int = flag(1, "Targets at a time.")
    new_tokens: int = flag(96, "Of each row at most; of the demo's target a third more.")
    targets: list[str] = flag(
        [], "demo, processors, architectures or variants of them; empty for all."
    )
    report: Path | None = flag(None, "Markdown page that gets the figures as a section.")


class Unit(NamedTuple):
    """A target's turn."""

    target: str
    turn: int
    seed: int

    @property
    def case(self) -> str:
        """Its record says whether all of it was run."""
        return f"{self.target} / {self.seed} / run"


def main(argv: list[str] | None = None) -> int:
    """Prove as the flags say; returns the exit code."""
    return run_command(lambda: work(argv), prog="scripts.prove.tokens")


def work(argv: list[str] | None) -> int:
    """Returns 1 where the proof fails; ValueError: a flag is none."""
    (arguments,) = parse_arguments(
        (TokensArguments,), argv, prog="scripts.prove.tokens", description=__doc__ or ""
    )
    at_least(arguments, 1, "tokens", "workers", "new_tokens")
    known = all_targets()
    if unknown := [name for name in arguments.targets if name not in known]:
        near = get_close_matches(unknown[0], known)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known[:3])}, .."
        raise ValueError(f"targets knows no {unknown[0]!r}: {hint}")
    records = Records(arguments.out, f"{arguments.new_tokens}")
    _work(arguments, records)
    summary = records.read()
    if arguments.report is not None:
        given = sys.argv[1:] if argv is None else argv
        command = " ".join(["python -m scripts.prove.tokens", *given])
        text = section(summary, command, arguments.tokens)
        write_section(arguments.report, TITLE, text)
    print(_line(summary))
    return 0 if summary.holds(arguments.tokens) else 1


def _work(arguments: TokensArguments, records: Records) -> None:
    """Let processes work until enough is compared."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["scripts.prove.lossless.cases"])  # importing takes seconds
    running: dict[Any, tuple[Any, Unit]] = {}
    units = _units(arguments, records)
    more = True
    while more or running:
        while more and len(running) < arguments.workers:
            unit = next(units, None)
            more = unit is not None
            if unit is not None:
                process = context.Process(
                    target=_unit, args=(unit, arguments.new_tokens, records), daemon=True
                )
                process.start()
                running[process.sentinel] = process, unit
        for sentinel in wait(list(running)) if running else ():
            process, unit = running.pop(sentinel)
            process.join()
            if process.exitcode:
                failed = f"its process ended with {process.exitcode}"
                records.add(Record(unit.case, unit.target, failed=failed))
            print(f"{unit.target}: {_line(records.read())}", flush=True)


def _units(arguments: TokensArguments, records: Records) -> Iterator[Unit]:
    """Every target once, and then in turn as long as tokens are missing."""
    names = arguments.targets or all_targets()
    for turn in count():
        before = records.read().tokens
        for place, name in enumerate(names):
            if turn and records.read().tokens >= arguments.tokens:
                return
            yield Unit(name, place + turn, arguments.seed + turn)
        if turn and records.read().tokens == before:
            return  # nothing here has a text


def _unit(unit: Unit, new_tokens: int, records: Records) -> None:
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")  # of tiny models, about what they are not
    known, failed = records.read().known, ""
    if unit.case in known:
        return
    try:
        for record in run(unit.target, unit.turn, unit.seed, new_tokens, known):
            records.add(record)
    except Exception as error:  # the other targets go on
        traceback.print_exc()
        failed = one_line(error)
    records.add(Record(unit.case, unit.target, failed=failed))


def _line(summary: Summary) -> str:
    noticed = len(summary.broken) - len(summary.unnoticed)
    return (
        f"{summary.tokens:,} tokens, {summary.mismatches:,} mismatches, {len(summary.gaps)} ties; "
        f"{noticed:,} of {len(summary.broken):,} faults noticed; {len(summary.failed)} failed"
    )


if __name__ == "__main__":
    raise SystemExit(main())
