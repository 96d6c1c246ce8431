"""Proof that commands killed at chosen moments lose nothing, and go on to the result of an
undisturbed run, bit for bit.

python -m scripts.prove.kills --kills 200 --out runs/kills

Each command runs as a process of its own and is killed with SIGKILL or SIGTERM: about every second
time within a save, a push, a write to a cache or a regeneration (it stands there when the signal
comes, or has left a part of its work behind), else at any moment. After each kill every file that
somebody would read must be as before, or whole and as it should be. The same command is run again,
is perhaps killed again, and in the end must leave what an undisturbed run leaves, and nothing else.
SIGTERM must end a process within seconds, with exit code 143 and a sentence.

The record is a line for each chain of kills, in OUT/kills.jsonl; run again, the proof goes on after
the last whole line. The negative control resumes training at the first rows, and must be found.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from medusa_heads.cli.flags.arguments import parse_arguments, run_command
from medusa_heads.settings import at_least, flag

RECORD_FILE = "kills.jsonl"
# Read when libraries are imported. Processes are forked: no pool of threads may stand before.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass
class KillsArguments:
    """How hard to try."""

    kills: int = flag(200, "How many there are to be.")
    out: str = flag("runs/kills", "Folder of the record.")
    seed: int = flag(0, "Of the moments.")
    only: list[str] = flag([], "Commands to kill, by name. Default: all.")


def main(argv: Sequence[str] | None = None) -> int:
    """Prove as the flags say; returns the exit code."""
    return run_command(lambda: work(argv), prog="scripts.prove.kills")


def work(argv: Sequence[str] | None) -> int:
    """Returns 1 where something was not as it should be; ValueError: a flag is none."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder).resolve()
        with mock.patch.dict(os.environ, ENVIRONMENT | {"HF_HOME": str(scratch / "hf")}):
            (arguments,) = parse_arguments(
                (KillsArguments,), argv, prog="scripts.prove.kills", description=__doc__ or ""
            )
            at_least(arguments, 1, "kills")
            out = Path(arguments.out)
            out.mkdir(parents=True, exist_ok=True)
            record = Record(out / RECORD_FILE)
            prove(record, scratch, arguments)
    print(record.summary(), flush=True)
    return 0 if record.holds() else 1


class Record:
    """Chains of kills, one JSON line each; a torn last line does not count."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.chains: list[dict[str, Any]] = []
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            file.write_text(whole, encoding="utf-8")
        self.chains = [json.loads(line) for line in whole.splitlines()]

    def add(self, chain: dict[str, Any]) -> None:
        """Write one down."""
        self.chains.append(chain)
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(chain) + "\n")

    @property
    def kills(self) -> list[dict[str, Any]]:
        """All of them."""
        return [kill for chain in self.chains for kill in chain["kills"]]

    def faults(self) -> list[str]:
        """Everything that was not as it should be."""
        found = []
        for chain in self.chains:
            parts = [chain, *chain["kills"]]
            found += [f"{chain['command']}: {fault}" for part in parts for fault in part["faults"]]
        return found

    def holds(self) -> bool:
        """Whether nothing is wrong, and a third of the kills fell within a write."""
        inside = sum(kill["inside"] is not None for kill in self.kills)
        return not self.faults() and 3 * inside >= len(self.kills)

    def summary(self) -> str:
        """Counts by command, signal and phase, and the faults."""
        counts: Counter[tuple[str, str, str]] = Counter()
        for chain in self.chains:
            for kill in chain["kills"]:
                counts[chain["command"], kill["inside"] or "anywhere", kill["signal"]] += 1
        lines = ["| command | where | SIGKILL | SIGTERM |", "|---|---|---|---|"]
        for command, where in dict.fromkeys((c, w) for c, w, _ in sorted(counts)):
            both = (str(counts[command, where, sign]) for sign in ("SIGKILL", "SIGTERM"))
            lines.append(f"| {command} | {where} | {' | '.join(both)} |")
        signals = Counter(kill["signal"] for kill in self.kills)
        inside = sum(kill["inside"] is not None for kill in self.kills)
        chains = [chain for chain in self.chains if chain["kills"]]
        equal = sum(not chain["faults"] for chain in chains)
        control = [each["differences"] for each in self.chains if each["number"] == "control"]
        refused = sum(kill.get("refused", False) for kill in self.kills)
        dying = [kill["dying"] for kill in self.kills if kill["signal"] == "SIGTERM"]
        lines += [
            "",
            f"{len(self.kills)} kills ({signals['SIGKILL']} SIGKILL, {signals['SIGTERM']} SIGTERM),"
            f" {inside} of them within a write",
            f"{equal} of {len(chains)} chains ended bit for bit as an undisturbed run",
            f"{refused} kills left heads that are refused by their checksum until the next run",
            f"the control differs in {sum(control)} things"
            if control
            else "no control was run: it comes with all commands",
            f"longest end after SIGTERM: {max(dying, default=0.0):.1f} s",
            f"faults: {len(self.faults())}",
            *self.faults(),
        ]
        return "\n".join(lines)


def prove(record: Record, scratch: Path, arguments: KillsArguments) -> None:
    """Make fixtures, run each command undisturbed, then kill until there are enough kills."""
    from medusa_heads.checkpoint.provenance import provenance
    from scripts.prove.killing.chains import Chains
    from scripts.prove.killing.commands import COMMANDS

    known = [command.name for command in COMMANDS]
    if unknown := [name for name in arguments.only if name not in known]:
        raise ValueError(f"only takes names among {known}, got {unknown[0]!r}")
    commands = [c for c in COMMANDS if c.name in arguments.only or not arguments.only]
    chains = Chains(scratch, commands)
    revision = provenance()["git_sha"]
    turns = [command for command in commands for _ in range(command.share)]
    while len(record.kills) < arguments.kills:
        number = len(record.chains)
        command = turns[number % len(turns)]
        rng = random.Random(f"{arguments.seed}/{number}")
        inside = sum(kill["inside"] is not None for kill in record.kills)
        chain = chains.kill(command, rng, len(record.kills), inside)
        record.add({"number": number, "command": command.name, "revision": revision, **chain})
        for kill in chain["kills"]:
            print(number, command.name, kill, flush=True)
        print(number, command.name, "faults:", chain["faults"] or "none", flush=True)
    if commands == list(COMMANDS) and all(chain["number"] != "control" for chain in record.chains):
        control = {"number": "control", "command": f"{commands[0].name}, at the wrong rows"}
        record.add({**control, **chains.control(commands[0])})


if __name__ == "__main__":
    raise SystemExit(main())
