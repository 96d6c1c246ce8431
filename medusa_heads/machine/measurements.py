"""What was measured on this machine, kept on disk for the processes that come later."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_heads.files import read_json, remove_leftovers, replace_json
from medusa_heads.machine.facts import load_averages, machine_facts, usable_cores

CACHE_VARIABLE = "MEDUSA_HEADS_CACHE"
_VERSION = 2
_MOST = 256  # measurements of a kind: the oldest ones go
MOMENT, AGE = 1e-12, 1e9  # what no clock tells apart, and what nobody has waited for
# Of the time, that threads may wait for a processor: the least times show none of it.
_WAITING = 0.1


def measurement_folder() -> Path:
    """Where measurements are kept, a folder for each kind."""
    if base := os.environ.get(CACHE_VARIABLE):
        return Path(os.path.expanduser(base))
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a user without a home
        home = tempfile.gettempdir()
    return Path(os.path.expanduser(home)) / "medusa_heads"


def as_seconds(stored: Any, *, least: float = MOMENT) -> float:
    """What a measurement holds as seconds, or as a share of them. Raises ValueError: it is no
    number, or none that a clock could have shown."""
    if isinstance(stored, bool) or not isinstance(stored, int | float):
        raise ValueError(f"expected seconds, got {stored!r}")
    if not least <= stored <= AGE:
        raise ValueError(f"expected seconds from {least} to {AGE}, got {stored!r}")
    return float(stored)


class Contention:
    """Whether other programs had the processors that this one wanted, since this was made. Steps on
    a GPU are judged alike: this host starts them one by one, and its clock times them."""

    def __init__(self) -> None:
        self._began, self._waited = time.perf_counter(), _waited()

    def seen(self) -> bool:
        now, seconds = _waited(), time.perf_counter() - self._began
        if now is None or self._waited is None:  # the load over a minute says less
            loads = load_averages()
            return loads is not None and loads[0] > usable_cores()
        return now - self._waited > _WAITING * seconds


def _waited() -> float | None:
    """Seconds that the threads of this process have waited for a processor, all in all; None where
    the system does not say."""
    try:
        tasks = [task.read_text() for task in Path("/proc/self/task").glob("*/schedstat")]
        return sum(int(task.split()[1]) for task in tasks) / 1e9 if tasks else None
    except (OSError, ValueError, IndexError):
        return None


@dataclass(frozen=True)
class Measurements:
    """Values by kind and by the facts they depend on, this machine's own always among them; in
    `folder`, by default `measurement_folder()`.

    Nothing here ever fails: a file that is damaged, foreign or of another version is no
    measurement; where nothing can be written, nothing is kept; of two processes that write at
    once, the last one's values stay. Of each kind the latest ones are kept.
    """

    folder: Path | None = None

    def read(self, kind: str, facts: Mapping[str, Any]) -> dict[str, Any] | None:
        """What `write` kept last under the same kind, facts and machine; None where nothing was."""
        path, stamp = self._place(kind, facts)
        try:
            remove_leftovers(path.parent)
            stored = read_json(path) if path.is_file() else {}
        except (OSError, ValueError):
            return None
        values = stored.get("values") if stored.get("of") == stamp else None
        return values if isinstance(values, dict) else None

    def write(self, kind: str, facts: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Keep plain values; in place of earlier ones."""
        path, stamp = self._place(kind, facts)
        with suppress(OSError):  # a read-only home: measured again next time
            path.parent.mkdir(parents=True, exist_ok=True)
            # Written between two steps of decoding, which nothing here is worth waiting for.
            replace_json(path, {"of": stamp, "values": dict(values)}, durable=False)
            kept = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
            for oldest in kept[:-_MOST]:
                oldest.unlink(missing_ok=True)

    def _place(self, kind: str, facts: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
        """A measurement's file, and what it is of, as JSON would give it back."""
        of = {"version": _VERSION, "kind": kind, "machine": machine_facts(), "facts": dict(facts)}
        text = json.dumps(_in_words(of), sort_keys=True, default=str)
        key = hashlib.sha256(text.encode()).hexdigest()[:24]
        return (self.folder or measurement_folder()) / kind / f"{key}.json", json.loads(text)


def _in_words(told: Any) -> Any:
    """The same with words for all keys, as JSON has them: a configuration may have tuples for keys,
    or numbers among words, which nothing sorts."""
    if isinstance(told, Mapping):
        return {str(key): _in_words(value) for key, value in told.items()}
    return [*map(_in_words, told)] if isinstance(told, list | tuple) else told
