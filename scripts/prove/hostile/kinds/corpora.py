"""Corpora: data files of all kinds, and what stands in the place of one."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.prove.hostile.attempt import Attempt, Expect
from scripts.prove.hostile.commands import read_by
from scripts.prove.hostile.kinds.corpus_files import FILES
from scripts.prove.hostile.kinds.corpus_rows import (
    FORMS,
    LINES,
    STEM,
    TABLES,
    broken_line,
    broken_row,
    good_row,
    texts_of,
    write,
)
from scripts.prove.hostile.values import draw, mutated
from scripts.prove.hostile.workshop import Place, Workshop


@dataclass
class Given:
    """A corpus on disk, and what is known of it."""

    name: str
    label: str
    expect: Expect
    good: int = 0
    bad: int = 0
    skip: bool = False
    names: tuple[str, ...] = ()
    texts: Callable[[], list[str]] | None = None


class Corpora:
    """Read as a training run reads them: found, opened, tokenised, checked, partly held out."""

    def __init__(self, workshop: Workshop) -> None:
        from medusa_heads.training.arguments.target import TargetArguments
        from medusa_heads.training.hidden.meta_target import meta_target

        self._workshop = workshop
        self._target = meta_target(TargetArguments(str(workshop.target_folder)))

    def draw(self, rng: random.Random, place: Place) -> Attempt:
        """One corpus."""
        make = draw(rng, [(10, _sound), (30, _rows), (15, _lines), (30, _file), (15, _bytes)])
        given = make(rng, place)
        read: list[Any] = []

        def call() -> Any:
            from medusa_heads.training.arguments.data import DataArguments
            from medusa_heads.training.data.prepare import load_corpora, prepare_data

            settings = DataArguments(
                dataset=[given.name],
                eval_rows=1,
                max_length=128,
                chat_template=str(self._workshop.template),
                on_bad_row="skip" if given.skip else "error",
            )
            corpus, held_out = load_corpora(settings)
            tokenizer = self._workshop.tokenizer
            options: dict[str, Any] = {"num_heads": 1, "seed": 0}
            data = prepare_data(self._target, corpus, held_out, tokenizer, settings, **options)
            return data, corpus

        def right() -> bool:
            data, corpus = read[0]
            if given.texts is not None:
                return list(corpus.rows["text"]) == given.texts()
            counted = data.record()["corpora"][0]["bad_rows"]
            return (len(data.rows) + len(data.held_out), counted) == (given.good, given.bad)

        names = given.names or (STEM, "a column", "training set", "held-out set", "eval_dataset")
        return Attempt(given.label, given.expect, read_by(call, read), names, right)


def _sound(rng: random.Random, place: Place) -> Given:
    form = rng.choice(FORMS)
    suffixes = [*LINES, *TABLES, ".json", ".json.gz"]
    if form in ("text", "prompt/completion"):
        suffixes += [".csv", ".csv.gz"]
    suffix, count = rng.choice(suffixes), rng.randint(3, 8)
    path = place.inputs / f"{STEM}{suffix}"
    rows = [good_row(rng, form) for _ in range(count)]
    if form == "prompt/completion" and rng.random() < 0.1:  # far more than a row holds: cut
        rows[0]["completion"] *= 5_000
    write(path, rows)
    if suffix in (".jsonl", ".json", ".csv") and rng.random() < 0.3:  # as some editors write
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    if rng.random() < 0.2:  # a folder, and a glob
        return Given(rng.choice([str(place.inputs), f"{place.inputs}/*"]), "good", "good", count)
    return Given(str(path), f"good {form} in {suffix}", "good", count)


def _rows(rng: random.Random, place: Place) -> Given:
    """A broken row among good ones, as plain data."""
    form = rng.choice(FORMS)
    label, broken = broken_row(rng, form)
    rows = [good_row(rng, form) for _ in range(rng.randint(3, 8))]
    rows.insert(rng.randrange(1, len(rows) + 1), broken)
    suffix = rng.choice([".jsonl", ".jsonl", ".json", ".jsonl.gz", ".json.gz"])
    path = place.inputs / f"{STEM}{suffix}"
    write(path, rows)
    skip = rng.random() < 0.5
    expect: Expect = "skip" if skip else "bad"
    return Given(str(path), f"{form}: {label}", expect, len(rows) - 1, 1, skip)


def _lines(rng: random.Random, place: Place) -> Given:
    """A broken line among good ones, as bytes."""
    form = rng.choice(FORMS)
    label, broken = broken_line(rng, form)
    lines = [json.dumps(good_row(rng, form)).encode() for _ in range(rng.randint(3, 8))]
    lines.insert(rng.randrange(1, len(lines) + 1), broken.replace(b"\n", b" "))
    suffix = rng.choice(LINES)
    path, data = place.inputs / f"{STEM}{suffix}", b"\n".join(lines) + b"\n"
    path.write_bytes(gzip.compress(data, 1) if suffix.endswith(".gz") else data)
    skip = rng.random() < 0.5
    expect: Expect = "skip" if skip else "bad"
    return Given(str(path), f"line: {label}", expect, len(lines) - 1, 1, skip)


def _bytes(rng: random.Random, place: Place) -> Given:
    """A good file with some bytes changed: refused, or what is read is what stands there."""
    suffix = rng.choice([".jsonl", ".parquet", ".parquet", ".jsonl.gz", ".csv", ".txt", ".json"])
    path = place.inputs / f"{STEM}{suffix}"
    write(path, [good_row(rng, "text") for _ in range(rng.randint(3, 8))])
    path.write_bytes(mutated(path.read_bytes(), rng))
    skip = rng.random() < 0.5
    given = Given(str(path), f"bytes of {suffix}", "either", skip=skip)
    given.texts = lambda: texts_of(path)
    return given


def _file(rng: random.Random, place: Place) -> Given:
    """Something in the place of a file of rows."""
    label = rng.choice(sorted(FILES))
    suffix, make = FILES[label]
    name = f"{place.inputs / STEM}{suffix}"
    make(Path(name), rng, place)
    names = (STEM, "column", "text") if "other columns" in label else (STEM,)
    return Given(name, label, "bad", skip=rng.random() < 0.5, names=names)
