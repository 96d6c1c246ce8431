"""What is kept on disk: answers, so that nothing is asked twice, and the dataset made of them.

Answers are a folder of parts, each an Arrow file of finished answers under their prompts' keys. A
part is written beside its place and then renamed: it is whole, or it is not there. Which answers
share a part has no meaning, so a run may go on with other batches than the one that was
interrupted.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset

from medusa_heads.checkpoint.provenance import provenance
from medusa_heads.files import check_folder, move_in, remove_leftovers, replace_file, staging
from medusa_heads.inference.regeneration.answers import PASSING, Accounting, Answer
from medusa_heads.inference.regeneration.prompts import Prompt
from medusa_heads.masking import masked

SETTINGS_FILE = "settings.json"
RECORD_FILE = "regeneration.json"
_STATE_FILE = "state.json"  # what datasets looks for: without it, there is no dataset
_PART_ANSWERS = 64  # fewer are kept back, but never for longer than
_PART_SECONDS = 5.0
_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("failure", pa.string()),
        ("detail", pa.string()),
        ("remarks", pa.list_(pa.string())),
    ]
)


class AnswerStore:
    """The answers that were made with one backend and one set of settings, in a folder of `root`
    that is named by `described`: everything but the prompt that decides an answer. Raises
    ValueError where a part of it is not what this class wrote."""

    def __init__(self, root: Path, described: dict[str, Any]) -> None:
        # The address of a server may hold a password.
        text = json.dumps(masked(described), indent=2, sort_keys=True, default=str)
        self.folder = root / hashlib.sha256(text.encode()).hexdigest()[:16]
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.folder)
        if not (self.folder / SETTINGS_FILE).exists():
            replace_file(self.folder / SETTINGS_FILE, text + "\n")
        self._answers: dict[str, Answer] = {}
        for part in sorted(self.folder.glob("part-*.arrow")):
            self._read(part)
        self._waiting: list[tuple[str, Answer]] = []
        self._written_at = time.monotonic()

    def get(self, prompt: Prompt) -> Answer | None:
        """The answer, if there is one."""
        return self._answers.get(prompt.key)

    def add(self, answers: Sequence[tuple[Prompt, Answer]]) -> None:
        """Keep answers; they are on disk a few seconds later at the latest, or after `flush`."""
        for prompt, answer in answers:
            self._answers[prompt.key] = answer
            if answer.failure not in PASSING:
                self._waiting.append((prompt.key, answer))
        late = time.monotonic() - self._written_at > _PART_SECONDS
        if late or len(self._waiting) >= _PART_ANSWERS:
            self.flush()

    def flush(self) -> None:
        """Write what is still waiting."""
        self._written_at = time.monotonic()
        if not self._waiting:
            return
        rows = [{"key": key, **vars(answer)} for key, answer in self._waiting]
        name = hashlib.sha256("".join(key for key, _ in self._waiting).encode()).hexdigest()[:16]
        buffer = pa.BufferOutputStream()
        with pa.ipc.new_stream(buffer, _SCHEMA) as writer:
            writer.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA))
        replace_file(self.folder / f"part-{name}.arrow", buffer.getvalue().to_pybytes())
        self._waiting = []

    def _read(self, part: Path) -> None:
        try:
            with pa.memory_map(str(part)) as source:
                table = pa.ipc.open_stream(source).read_all().cast(_SCHEMA)
        except (pa.ArrowInvalid, ValueError) as error:
            raise ValueError(f"{part} is damaged ({error}): remove it, and run again") from error
        columns = [table[name].to_pylist() for name in ("key", "failure", "detail", "remarks")]
        tokens = table["tokens"].combine_chunks()
        ends, values = tokens.offsets.to_numpy(), tokens.values.to_numpy().astype(np.int32)
        spans = pairwise(ends)
        for (start, end), key, failure, detail, remarks in zip(spans, *columns, strict=True):
            self._answers[key] = Answer(values[start:end], failure, detail, tuple(remarks))


def check_output(folder: Path) -> None:
    """Raises ValueError where a dataset of other origin stands in the folder, or nothing can be
    written to it."""
    check_folder(folder)
    if (folder / _STATE_FILE).exists() and not (folder / RECORD_FILE).exists():
        raise ValueError(
            f"{str(folder)!r} holds a dataset that was not made by regenerate: give another "
            "output_dir"
        )


def write_output(
    rows: Dataset, accounting: Accounting, folder: Path, record: dict[str, Any]
) -> Path:
    """Write rows, and beside them their record with counts and provenance, so that whoever reads
    meanwhile finds the old dataset, the new one or none. Returns where the record lies."""
    folder.mkdir(parents=True, exist_ok=True)
    with staging(folder) as staged:
        rows.save_to_disk(str(staged))
        counted = {"accounting": accounting.to_dict(), "rows": len(rows)}
        content = masked(record) | counted | provenance()
        text = json.dumps(content, indent=2, ensure_ascii=False, default=str)
        (staged / RECORD_FILE).write_text(text + "\n", encoding="utf-8")
        # The record says whose the folder is, and so comes first; the state says that the others
        # are there: it goes first, and comes last.
        (folder / _STATE_FILE).unlink(missing_ok=True)
        for old in folder.glob("data-*.arrow"):
            old.unlink()
        order = (RECORD_FILE, "", _STATE_FILE)
        names = [path.name for path in staged.iterdir()]
        move_in(staged, folder, sorted(names, key=lambda n: order.index(n if n in order else "")))
    return folder / RECORD_FILE
