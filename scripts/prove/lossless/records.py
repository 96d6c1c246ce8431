"""The record of a proof: a line of JSON for every case, so that it can go on where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from functools import cache, cached_property
from pathlib import Path

from scripts.prove.lossless.cases import Record

ROOT = Path(__file__).resolve().parents[3]


class Records:
    """Those of one version of the sources; of another version they lie in another file.

    Args:
        folder: holds them.
        settings: that other records must not be mixed with.
    """

    def __init__(self, folder: Path, settings: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / f"tokens-{sources_digest()}-{settings}.jsonl"
        self.file.touch()
        whole, _, cut_off = self.file.read_text(encoding="utf-8").rpartition("\n")
        if cut_off:  # a run ended in the middle of a line
            self.file.write_text(whole + "\n" * bool(whole), encoding="utf-8")

    def add(self, record: Record) -> None:
        """Write a line, at once."""
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(asdict(record)) + "\n")

    def read(self) -> Summary:
        """All that is known; of a case that was tried again, the last try."""
        lines = self.file.read_text(encoding="utf-8").splitlines()
        latest = {(record := Record(**json.loads(line))).case: record for line in lines}
        return Summary(latest.values())


@cache
def sources_digest() -> str:
    """Of all code that decodes, and that proves, as it is when this process first asks: what it has
    imported does not change with a file."""
    digest = hashlib.sha256()
    for folder in ("medusa_heads", "inference", "training", "scripts", "tests"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(file.relative_to(ROOT).as_posix().encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


class Summary:
    """What the records say together."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = list(records)
        self.compared = [r for r in self.records if r.way and r.fault is None and not r.failed]
        self.broken = [r for r in self.records if r.fault is not None and not r.failed]
        self.failed = [r for r in self.records if r.failed]

    @cached_property
    def known(self) -> frozenset[str]:
        """Cases that need not be run again."""
        return frozenset(r.case for r in self.records if not r.failed)

    @property
    def tokens(self) -> int:
        """Compared."""
        return sum(r.tokens for r in self.compared)

    @property
    def mismatches(self) -> int:
        """Tokens that differ."""
        return sum(r.mismatches for r in self.compared)

    @property
    def gaps(self) -> list[float]:
        """Of the ties."""
        return [gap for r in self.compared for gap in r.gaps]

    @property
    def unnoticed(self) -> list[Record]:
        """Faults that nothing showed."""
        return [r for r in self.broken if not r.caught]

    @property
    def left_out(self) -> Counter[str]:
        """Targets without a text, by the first word of the reason."""
        return Counter(r.note.partition(":")[0] for r in self.records if _is_left_out(r))

    @property
    def targets(self) -> int:
        """Targets with texts."""
        return len({r.target for r in self.compared})

    def holds(self, tokens: int) -> bool:
        """Whether so many tokens were compared, none differs, and every fault was noticed."""
        wrong = self.mismatches or self.failed or self.unnoticed or not self.broken
        return self.tokens >= tokens and not wrong


def _is_left_out(record: Record) -> bool:
    return record.note.startswith(("refused:", "not buildable:"))
