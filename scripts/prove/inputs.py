"""Proof that bad inputs are refused in one sentence, and do nothing else.

python -m scripts.prove.inputs --out runs/prove/inputs.jsonl

Inputs of eight kinds are drawn from a seed and given to the program's own commands and readers:
nine in ten are bad by construction or changed at random, one in ten is good. Counted are
tracebacks, bad inputs taken, good ones refused, files written elsewhere, and code run. Each input
becomes a line of the record; a run that finds lines there goes on behind them.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, asdict, dataclass
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_heads.cli.flags.arguments import command
from medusa_heads.settings import flag
from medusa_heads.tables import in_markdown
from scripts.prove.hostile.attempt import FAULTS

if TYPE_CHECKING:
    from scripts.prove.hostile.attempt import Outcome
    from scripts.prove.hostile.workshop import Workshop

KINDS = {
    "corpora": "Corpora",
    "configurations": "Configurations",
    "records": "Records",
    "tensors": "Tensors",
    "adapters": "Adapters",
    "caches": "Caches",
    "prompts": "Prompts",
    "hub": "Hub",
}
MEMORY = 16 << 30  # bytes that the process may take: a size beyond reason is an error then


@dataclass
class ProofArguments:
    """What to try, and how often."""

    out: str = flag(MISSING, "Record to write or to go on with: a JSON line an input.")
    inputs: int = flag(10_400, "Inputs of all kinds together.")
    seed: int = flag(0, "Of what is drawn.")
    kinds: list[str] = flag(list(KINDS), f"Among {', '.join(KINDS)}.")


def work(arguments: ProofArguments) -> int:
    """Prove as the flags say; exit code 1 where something was found."""
    return int(not verdict(prove(arguments)))


def _settle(root: Path) -> None:
    """No network, and no cache but one of its own; of no use where the libraries that read this
    when they are imported are there already."""
    if "huggingface_hub" not in sys.modules:
        os.environ["HF_HOME"] = str(root / "hf")
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def prove(arguments: ProofArguments) -> list[dict[str, Any]]:
    """Try what is missing in the record, print the table, return the record's lines."""
    import resource

    from rich.console import Console

    from medusa_heads.checkpoint.provenance import provenance

    if unknown := [kind for kind in arguments.kinds if kind not in KINDS]:
        raise ValueError(f"expected kinds among {', '.join(KINDS)}, got {unknown[0]!r}")
    record = Path(arguments.out)
    record.parent.mkdir(parents=True, exist_ok=True)
    lines = read_record(record, arguments.seed)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    each = -(-arguments.inputs // len(arguments.kinds))
    console = Console()
    with tempfile.TemporaryDirectory() as root, record.open("a", encoding="utf-8") as file:
        _settle(Path(root))
        from medusa_heads.machine.facts import describe_machine  # imports libraries

        facts = {"provenance": provenance(), "machine": describe_machine(), "seed": arguments.seed}
        lines.append(facts | {"started": datetime.now(timezone.utc).isoformat(timespec="seconds")})
        file.write(json.dumps(lines[-1]) + "\n")
        done = {(line["kind"], line["number"]) for line in lines if "kind" in line}
        for line in tried(Path(root) / "workshop", arguments.kinds, each, arguments.seed, done):
            lines.append(line)
            file.write(json.dumps(line) + "\n")
            file.flush()
            if line["faults"]:
                console.print(f"{line['kind']} {line['number']}: {line['faults']} {line['label']}")
    console.print(table(lines), soft_wrap=True, highlight=False)
    return lines


def read_record(record: Path, seed: int) -> list[dict[str, Any]]:
    """The lines of an earlier run; a last one that was torn is cut off.

    Raises:
        ValueError: they are of another seed, or no record.
    """
    if not record.exists():
        return []
    whole = record.read_bytes().rpartition(b"\n")[0]
    record.write_bytes(whole + b"\n" * bool(whole))
    try:
        lines: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]
        seeds = {line["seed"] for line in lines if "seed" in line}
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{str(record)!r} is no record of this proof: name another file"
        ) from error
    if seeds - {seed}:
        raise ValueError(f"{str(record)!r} was made with the seed {seeds.pop()}: name another file")
    return lines


def tried(
    root: Path, kinds: Iterable[str], each: int, seed: int, done: set[tuple[str, int]]
) -> Iterator[dict[str, Any]]:
    """Try inputs, of all kinds in turns; those that are done are left out."""
    from scripts.prove.hostile.attempt import attempt
    from scripts.prove.hostile.workshop import Workshop

    workshop = Workshop(root)
    with workshop.entered():
        makers = {kind: _maker(kind, workshop) for kind in kinds}
        for number in range(each):
            for kind, maker in makers.items():
                if (kind, number) in done:
                    continue
                rng = random.Random(f"{seed} {kind} {number}")
                with workshop.place(f"{kind}-{number}") as place:
                    outcome: Outcome = attempt(maker(rng, place), workshop, place)
                yield {"kind": kind, "number": number, **asdict(outcome)}


def _maker(kind: str, workshop: Workshop) -> Callable[..., Any]:
    module = import_module(f"scripts.prove.hostile.kinds.{kind}")
    maker: Callable[..., Any] = getattr(module, KINDS[kind])(workshop).draw
    return maker


def table(lines: Iterable[dict[str, Any]]) -> str:
    """What became of the inputs, by kind, in Markdown."""
    tried_ones = [line for line in lines if "kind" in line]
    rows = []
    for kind in [*KINDS, "all"]:
        of_kind = [line for line in tried_ones if kind in (line["kind"], "all")]
        if not of_kind:
            continue
        became = Counter(
            "either" if line["expect"] == "either" else line["became"]
            for line in of_kind
            if not line["faults"]
        )
        faults = Counter(fault for line in of_kind for fault in line["faults"])
        counts = [
            len(of_kind),
            *(became[name] for name in ("refused", "skipped", "mended", "accepted", "either")),
            *(faults[name] for name in FAULTS),
        ]
        rows.append([kind, *(f"{count:,}" for count in counts)])
    became_of = ("refused", "skipped", "measured anew", "good, accepted", "either")
    found = ("tracebacks", "unclear sentences", "silent acceptance", "good, refused")
    titles = ("kind", "inputs", *became_of, *found, "files outside", "code run")
    return in_markdown((titles, rows))


def verdict(lines: Iterable[dict[str, Any]]) -> bool:
    """Whether there was something to try, good inputs among it, and nothing was found."""
    tried_ones = [line for line in lines if "kind" in line]
    good = [line for line in tried_ones if line["expect"] == "good"]
    return bool(good) and not any(line["faults"] for line in tried_ones)


main = command("scripts.prove.inputs", work, __doc__)

if __name__ == "__main__":
    sys.exit(main())
