"""Whether heads on a large target decode as fast as they should, by what gpu_bench.sh has measured.

python -m scripts.measure.goals --folder runs/gpu_bench

The goal of `heads:auto` is 2.5 times the speed of compiled plain decoding one text at a time, and
never to be slower in larger batches. The exit code is 1 where it is missed, or not measured.
"""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from medusa_heads.cli.flags.arguments import command
from medusa_heads.inference.bench.methods import COMPILED
from medusa_heads.settings import flag

_DEFAULT = "heads:auto"
_ALONE, _TOGETHER = 2.5, 1.0  # of one row, and of more


@dataclass
class Arguments:
    """Where it was measured."""

    folder: str = flag(MISSING, "of gpu_bench.sh, with its usual-N/report.json")


class Result(NamedTuple):
    rows: int
    method: str
    speedup: float

    @property
    def goal(self) -> float:
        return _ALONE if self.rows == 1 else _TOGETHER


def results(folder: str) -> list[Result]:
    """Of `heads:auto` in its forms, over compiled plain decoding. Raises ValueError: there are
    none."""
    found: list[Result] = []
    for path in sorted(Path(folder).glob("usual-*/report.json")):
        settings: list[dict[str, Any]] = json.loads(path.read_text())["settings"]
        for setting in settings:
            if setting["reference"] == COMPILED:
                found += [
                    Result(setting["batch_size"], method["name"], method["speedup"])
                    for method in setting["methods"]
                    if method["name"].partition("+")[0] == _DEFAULT
                ]
    if not any(result.method == _DEFAULT for result in found):
        raise ValueError(
            f"{folder} holds no {_DEFAULT} beside {COMPILED}: run scripts/gpu_bench.sh"
        )
    return sorted(found)


def show(arguments: Arguments) -> int:
    """Show the results beside the goals; returns the exit code."""
    missed = False
    table = Table("rows", "method", f"over {COMPILED}", "goal", "reached")
    for result in results(arguments.folder):
        reached = result.speedup >= result.goal
        missed |= not reached and result.method == _DEFAULT
        numbers = f"{result.speedup:.2f}", f"{result.goal:.1f}"
        table.add_row(str(result.rows), result.method, *numbers, "yes" if reached else "no")
    Console().print(table)
    return int(missed)


main = command("scripts.measure.goals", show, __doc__)

if __name__ == "__main__":
    sys.exit(main())
