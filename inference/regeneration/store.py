"""What is kept on disk: answers, so that nothing is asked twice, and the dataset made of them.

Answers are lines of JSON in the order in which they came: key, failure, detail, remarks, tokens.
Every run appends to a file of its own, so that several may write to a folder. A line that a killed
run left half written, or that was damaged, is no answer: its prompt is asked again, and of the
lines of a key the last one counts. What is held in memory is where that line begins.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice, pairwise, starmap
from operator import eq
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import pyarrow as pa
from datasets import Dataset

from medusa_heads.checkpoint.provenance import provenance
from medusa_heads.contents import foreign_model, trained_in
from medusa_heads.files import (
    check_folder,
    expanded,
    lock_folder,
    move_in,
    read_json,
    remove_leftovers,
    replace_file,
    staging,
)
from medusa_heads.inference.regeneration.answers import PASSING, Accounting, Answer
from medusa_heads.inference.regeneration.dialogues import Row
from medusa_heads.inference.regeneration.places import Places
from medusa_heads.inference.regeneration.prompts import Prompt
from medusa_heads.masking import masked

SETTINGS_FILE = "settings.json"
RECORD_FILE = "regeneration.json"
_STATE_FILE = "state.json"  # what datasets looks for: without it, there is no dataset
_SYNC_SECONDS = 5.0  # a machine that loses its power loses no more
_MOST_OPEN = 64  # files that are read from
_OFFSET_BITS = 40  # of a line's place; the number of its file stands above
_ROWS_AT_ONCE = 1000
_TOKENS = pa.list_(pa.int32())
_SCHEMA = pa.schema([("input_ids", _TOKENS), ("labels", _TOKENS), ("document", pa.int64())])


class AnswerStore:
    """The answers that were made with one backend and one set of settings, in a folder of `root`
    that is named by `described`: everything but the prompt that decides an answer. To be closed."""

    def __init__(self, root: Path, described: dict[str, Any]) -> None:
        plain, text = (
            json.dumps(each, indent=2, sort_keys=True, default=str)
            for each in (described, masked(described))
        )
        # What is masked decides too: two targets may have names with the shape of a secret.
        self.folder = root / hashlib.sha256(plain.encode()).hexdigest()[:16]
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.folder)
        if not (self.folder / SETTINGS_FILE).exists():
            replace_file(self.folder / SETTINGS_FILE, text + "\n")
        self._files = sorted(self.folder.glob("answers-*.jsonl"))
        self._old = len(self._files)
        self._places = Places()
        for number, path in enumerate(self._files):
            self._scan(number, path)
        self._passing: dict[str, Answer] = {}  # failures that the next run is to try again
        self._reading: dict[int, IO[bytes]] = {}
        self._own: IO[bytes] | None = None
        self._synced_at = time.monotonic()

    def get(self, prompt: Prompt) -> Answer | None:
        at = self._places.get(_short(prompt.key))
        answer = None if at is None else _read_line(self._line(at), prompt.key)
        return answer or self._passing.get(prompt.key)

    def is_old(self, prompt: Prompt) -> bool:
        """Whether an earlier run has answered."""
        at = self._places.get(_short(prompt.key))
        return at is not None and at >> _OFFSET_BITS < self._old

    def add(self, answers: Sequence[tuple[Prompt, Answer]]) -> None:
        """Keep answers; no death of this process loses them."""
        if self._own is None:
            name = f"answers-{len(self._files):06}-{os.urandom(4).hex()}.jsonl"
            self._files.append(self.folder / name)
            self._own = self._files[-1].open("xb")
        begins = []
        for prompt, answer in answers:
            if answer.failure in PASSING:
                self._passing[prompt.key] = answer
                continue
            begins.append((prompt.key, self._own.tell()))
            self._own.write(_line_of(prompt.key, answer))
        self._own.flush()
        for key, begin in begins:
            self._places.put(_short(key), (len(self._files) - 1) << _OFFSET_BITS | begin)
        if time.monotonic() - self._synced_at > _SYNC_SECONDS:
            os.fsync(self._own.fileno())
            self._synced_at = time.monotonic()

    def close(self) -> None:
        """Bring everything to the disk."""
        if self._own is not None:
            os.fsync(self._own.fileno())
            self._own.close()
        self._stop_reading()

    def _scan(self, number: int, path: Path) -> None:
        begin = 0
        with path.open("rb") as lines:
            for line in lines:
                if line.startswith(b'["') and line.endswith(b"]\n"):
                    with suppress(ValueError):
                        self._places.put(int(line[2:18], 16), number << _OFFSET_BITS | begin)
                begin += len(line)

    def _line(self, at: int) -> bytes:
        number = at >> _OFFSET_BITS
        if number not in self._reading:
            if len(self._reading) >= _MOST_OPEN:
                self._stop_reading()
            self._reading[number] = self._files[number].open("rb")
        self._reading[number].seek(at & ((1 << _OFFSET_BITS) - 1))
        return self._reading[number].readline()

    def _stop_reading(self) -> None:
        for file in self._reading.values():
            file.close()
        self._reading.clear()


def _short(key: str) -> int:
    """The key's first half: the other half tells whether a line is the one that is looked for."""
    return int(key[:16], 16)


def _line_of(key: str, answer: Answer) -> bytes:
    """A line, its checksum last."""
    parts = [key, answer.failure, answer.detail, answer.remarks, list(answer.tokens)]
    text = json.dumps(parts, separators=(",", ":"), default=int).encode()
    return b"%s,%d]\n" % (text[:-1], zlib.crc32(text))


def _read_line(line: bytes, key: str) -> Answer | None:
    """The answer of a line; None where it is of another key, or damaged."""
    text, _, checksum = line.rpartition(b",")
    text += b"]"
    if checksum != b"%d]\n" % zlib.crc32(text):
        return None
    found, failure, detail, remarks, tokens = json.loads(text)
    return Answer(array("q", tokens), failure, detail, tuple(remarks)) if found == key else None


def write_rows(rows: Iterable[tuple[int, Row]], folder: Path) -> Dataset:
    """Rows, each with the number of its document, as a dataset that is mapped from a file in the
    folder. Where a document has several, a column says which are whose, so that they are held out
    together."""
    rows, several, last = iter(rows), False, -1
    named = hashlib.blake2b(digest_size=8)
    with staging(folder) as staged:
        made = staged / "rows"
        with pa.OSFile(str(made), "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as writer:
            while some := list(islice(rows, _ROWS_AT_ONCE)):
                documents = [last, *(document for document, _ in some)]
                several, last = several or any(starmap(eq, pairwise(documents))), documents[-1]
                columns: list[Any] = [
                    pa.array([np.asarray(row[name]) for _, row in some], _TOKENS)
                    for name in ("input_ids", "labels")
                ]
                columns.append(pa.array(documents[1:], pa.int64()))
                writer.write_batch(pa.record_batch(columns, _SCHEMA))
                named.update(columns[0].values.to_numpy().tobytes() + str(documents).encode())
        made = made.rename(staged / f"rows-{named.hexdigest()}.arrow")
        move_in(staged, folder, [made.name])
    written = Dataset.from_file(str(folder / made.name))
    return written if several else written.remove_columns("document")


def check_output(folder: Path, shard: tuple[int, int]) -> None:
    """Raises ValueError where a dataset of other origin stands in the folder, or another shard's
    (index, shards), or a model or what was trained for one, or nothing can be written to it."""
    check_folder(folder)
    if (found := foreign_model(folder)) is not None:
        found = f"a model ({found})"
    found = found or trained_in(folder)
    if found is None and (folder / _STATE_FILE).exists():
        found = "a dataset that was not made by regenerate"
        if (folder / RECORD_FILE).exists():
            there = _shard_of(read_json(folder / RECORD_FILE))
            if there == shard:
                return
            found = "all rows" if there[1] == 1 else "shard {} of {}".format(*there)
    if found is not None:
        raise ValueError(f"{str(folder)!r} holds {found}: give another output_dir")


def _shard_of(record: dict[str, Any]) -> tuple[int, int]:
    """Whose rows a record is of: (index, shards)."""
    made = record.get("settings")
    made = made if isinstance(made, dict) else {}
    return made.get("shard_index", 0), made.get("num_shards", 1)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A block in which no other run replaces the dataset of a folder, where its file system has
    locks. Raises ValueError: another run is at it."""
    try:
        lock = lock_folder(folder)
    except BlockingIOError:
        raise ValueError(
            f"another run is writing its dataset into {str(folder)!r}: give another output_dir"
        ) from None
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def rows_there(folder: Path) -> int:
    """How many rows the dataset in a folder has by its record, 0 without any."""
    record = read_json(folder / RECORD_FILE) if (folder / _STATE_FILE).exists() else {}
    rows = record.get("rows")
    return rows if isinstance(rows, int) else 0


def own_words(target: str, folder: str) -> Literal["plain", "chat"] | None:
    """How a dataset's record says that the target of this name was asked for the answers in it: by
    prompts that no chat template rendered, or by its own template; None where it does not say that
    this target answered. Raises ValueError: a record that is damaged."""
    path = expanded(folder) / RECORD_FILE
    record = read_json(path) if path.is_file() else {}
    talks, named = record.get("talks"), record.get("target")
    if not isinstance(talks, bool):
        return None
    name = named.get("name_or_path") if isinstance(named, dict) else None
    if not isinstance(name, str):
        raise ValueError(f"{path} names no target: the file is damaged")
    # A folder has several spellings, such as one with a slash behind it.
    if expanded(name).resolve() != expanded(target).resolve():
        return None
    return "chat" if talks else "plain"


def write_output(
    rows: Dataset, accounting: Accounting, folder: Path, record: dict[str, Any]
) -> Path:
    """Write rows, and beside them their record with counts and provenance, so that whoever reads
    meanwhile finds the old dataset, the new one or none. Returns where the record lies. Raises
    ValueError: another run has put something else there since `check_output`."""
    folder.mkdir(parents=True, exist_ok=True)
    with staging(folder) as staged:
        rows.save_to_disk(str(staged))
        counted = {"accounting": accounting.to_dict(), "rows": len(rows)}
        content = masked(record) | counted | provenance()
        text = json.dumps(content, indent=2, ensure_ascii=False, default=str)
        (staged / RECORD_FILE).write_text(text + "\n", "utf-8", "backslashreplace")
        order = (RECORD_FILE, "", _STATE_FILE)
        names = [path.name for path in staged.iterdir()]
        with _alone(folder):
            check_output(folder, _shard_of(record))
            # The record says whose the folder is, and so comes first; the state says that the
            # others are there: it goes first, and comes last.
            (folder / _STATE_FILE).unlink(missing_ok=True)
            for old in folder.glob("data-*.arrow"):
                old.unlink()
            names.sort(key=lambda name: order.index(name if name in order else ""))
            move_in(staged, folder, names)
    return folder / RECORD_FILE
