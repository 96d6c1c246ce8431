"""Tables of prompts, found and read as corpora are, and looked at before anybody is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from datasets import Dataset

from medusa_heads.data.bad_rows import BadRow
from medusa_heads.data.formats import QUESTIONS
from medusa_heads.data.messages import SYSTEM_COLUMN
from medusa_heads.data.plain_rows import PLACE_COLUMN
from medusa_heads.data.sources import load_corpus


def read_table(
    name: str | Sequence[str],
    split: str = "train",
    *,
    config: str | None = None,
    on_bad_row: Literal["error", "skip"] = "error",
) -> Dataset:
    """Find and read a table of prompts: what `load_corpus` takes, in one of the formats QUESTIONS.
    Raises ValueError: nothing stands there, it cannot be read, or it has rows that cannot be used,
    unless they are to be left out."""
    corpus = load_corpus(name, split, config=config, on_bad_row=on_bad_row, known=QUESTIONS)
    rows = corpus.rows
    assert isinstance(rows, Dataset)
    if PLACE_COLUMN in rows.column_names:  # each row of such files was looked at
        return rows.remove_columns(PLACE_COLUMN)
    read = {*corpus.format.columns, "tools", SYSTEM_COLUMN} & {*rows.column_names}
    broken, kind = set(), None
    for number, row in enumerate(rows.select_columns(sorted(read))):
        try:
            found = type(corpus.format.read(row))
            kind = kind or found
            if found is not kind:
                raise BadRow("it is of another kind than the rows before it")
        except BadRow as problem:
            broken.add(number)
            corpus.bad_rows.add(corpus.place(number), str(problem))
    corpus.bad_rows.settle()
    return rows.select([n for n in range(len(rows)) if n not in broken]) if broken else rows
