"""Answers on disk, so that nothing is asked twice.

A folder of parts, each an Arrow file of finished answers under their prompts' keys. A part is
written beside its place and then renamed: it is whole, or it is not there. Which answers share a
part has no meaning, so a run may go on with other batches than the one that was interrupted.
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

from medusa_heads.files import remove_leftovers, replace_file
from medusa_heads.inference.regeneration.answers import PASSING, Answer
from medusa_heads.inference.regeneration.prompts import Prompt
from medusa_heads.masking import masked

SETTINGS_FILE = "settings.json"
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
    """The answers that were made with one backend and one set of settings.

    Args:
        root: folder of all stores.
        described: everything but the prompt that decides an answer, as plain values.

    Raises:
        ValueError: a part is not what this class wrote.
    """

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
        """The answer to a prompt, where there is one."""
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
        rows = [
            {
                "key": key,
                "tokens": answer.tokens,
                "failure": answer.failure,
                "detail": answer.detail,
                "remarks": list(answer.remarks),
            }
            for key, answer in self._waiting
        ]
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
