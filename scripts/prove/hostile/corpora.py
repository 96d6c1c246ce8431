"""Corpora: data files of all kinds, and what stands in the place of one."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.prove.hostile.attempt import Attempt, Expect
from scripts.prove.hostile.commands import read_by
from scripts.prove.hostile.values import as_json, deep, draw, many_digits, mutated, words
from scripts.prove.hostile.workshop import Place, Workshop

Row = dict[str, Any]
FORMS = ("text", "messages", "conversations", "prompt/completion", "tokens")
STEM = "rows-of-words"  # so that a sentence either names the file or does not
LINES, TABLES = (".jsonl", ".jsonl.gz"), (".parquet",)


def good_row(rng: random.Random, form: str) -> Row:
    """A row that can be learnt."""
    if form == "text":
        return {"text": words(rng, 8)}
    if form == "prompt/completion":
        return {"prompt": words(rng) + "\n", "completion": words(rng, 8)}
    if form == "tokens":
        ids = [rng.randrange(1, 4000) for _ in range(rng.randint(8, 30))]
        return {"input_ids": ids, "labels": ids}
    asked, said = words(rng), words(rng, 8)
    if form == "messages":
        return {
            "messages": [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": said},
            ]
        }
    return {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": said}]}


def _column(form: str) -> str:
    return {"prompt/completion": "completion", "tokens": "input_ids"}.get(form, form)


def broken_row(rng: random.Random, form: str) -> tuple[str, Row]:
    """A row that cannot be used, as plain data, and what is wrong with it."""
    row, column = good_row(rng, form), _column(form)
    wrong: list[Any] = [5, None, "", {}, [], True, 2.5, {"a": [1]}, float("nan"), -(10**18)]
    changes: list[tuple[str, Any]] = [("a wrong type", rng.choice(wrong))]
    if form == "text":
        changes += [("white space", " \n\t"), ("half a character", "x\ud800" + words(rng))]
    elif form == "tokens":
        ids = row["input_ids"]
        changes += [
            ("a token beyond the vocabulary", [*ids, 4096 + rng.randrange(10**5)]),
            ("a negative token", [*ids, -rng.randint(1, 99)]),
            ("a token beyond 32 bits", [*ids, 2**40 + rng.randrange(99)]),
            ("a fraction", [*ids, 2.5]),
            ("a truth value", [*ids, True]),
            ("nested lists", [ids]),
            ("another length", ids[:-1]),
            ("labels shifted", ids[1:] + [7]),
        ]
    elif form == "prompt/completion":
        changes += [("messages beside text", [{"role": "assistant", "content": "x"}])]
    else:
        said, role, text = (
            row[column],
            *(("role", "content") if form == "messages" else ("from", "value")),
        )
        changes += [
            (
                "an unknown role",
                [*said, {role: rng.choice(["me", "", 3, None, ["user"]]), text: "x"}],
            ),
            ("no role", [{text: "x"}, *said]),
            (
                "content of a wrong type",
                [{role: said[0][role], text: rng.choice([5, True, {"a": 1}])}],
            ),
            (
                "an empty turn",
                [{role: said[0][role], text: rng.choice(["", "  ", None])}, *said[1:]],
            ),
            ("no mappings", [words(rng), said]),
            ("a text that is no JSON", words(rng)),
            ("a text nested too deeply", deep(rng.randint(2_000, 9_000))),
            ("a text with a number too long", f"[{many_digits(rng)}]"),
        ]
        if rng.random() < 0.2:
            return "tools of a wrong type", row | {
                "tools": rng.choice([5, "x", {"a": 1}, deep(5000)])
            }
    if rng.random() < 0.1:
        return "a missing field", {"other": 1, **{k: v for k, v in row.items() if k != column}}
    label, value = rng.choice(changes)
    if form == "tokens" and label == "labels shifted":
        return label, row | {"labels": value}
    same = {"labels": value} if form == "tokens" and label != "another length" else {}
    return label, row | {column: value} | same


def broken_line(rng: random.Random, form: str) -> tuple[str, bytes]:
    """A line of a JSONL file that is no row."""
    line = as_json(good_row(rng, form)).encode()
    column = _column(form)
    return rng.choice(
        [
            ("torn", line[: rng.randrange(1, len(line) - 1)]),
            ("not UTF-8", line.replace(b'": ', b'": ', 1)[:-1] + b', "z": "\xff\xfe"}'),
            ("a raw NUL", line.replace(b'"', b'"\0', 1)),
            ("no object", rng.choice([b"[]", b"7", b'"text"', b"null", b"[[1]]", b"true"])),
            ("nested too deeply", b'{"%s": %s' % (column.encode(), deep(6000, rng.choice("[{")).encode())),
            ("a number too long", b'{"%s": %s}' % (column.encode(), many_digits(rng).encode())),
            ("two objects", line + line),
            ("a trailing comma", line[:-1] + b",}"),
            ("single quotes", line.replace(b'"', b"'")),
            ("another encoding", line.decode().encode("utf-16-le")),
        ]
    )  # fmt: skip


def write(path: Path, rows: list[Row]) -> None:
    """Rows in the container that the suffix names."""
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return
    if name.endswith(".csv"):
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        data = text.getvalue().encode()
    elif name.endswith(".txt"):
        data = "\n\n".join(row["text"] for row in rows).encode()
    elif name.endswith(".json"):
        data = as_json(rows).encode()
    else:
        data = b"".join(as_json(row).encode() + b"\n" for row in rows)
    path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)


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

    name = "corpora"

    def __init__(self, workshop: Workshop) -> None:
        from medusa_heads.training.meta_target import meta_target
        from medusa_heads.training.target_arguments import TargetArguments

        self._workshop = workshop
        self._target = meta_target(TargetArguments(str(workshop.target_folder)))

    def draw(self, rng: random.Random, place: Place) -> Attempt:
        """One corpus."""
        make = draw(rng, [(10, _sound), (30, _rows), (15, _lines), (30, _file), (15, _bytes)])
        given = make(rng, place)
        read: list[Any] = []

        def call() -> Any:
            from medusa_heads.training.data import load_corpora, prepare_data
            from medusa_heads.training.data_arguments import DataArguments

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

        names = given.names or (STEM, "training set", "held-out set")
        return Attempt(given.label, given.expect, read_by(call, read), names, right)


def _sound(rng: random.Random, place: Place) -> Given:
    form = rng.choice(FORMS)
    suffixes = [*LINES, *TABLES, ".json", ".json.gz"]
    if form in ("text", "prompt/completion"):
        suffixes += [".csv", ".csv.gz"]
    suffix, count = rng.choice(suffixes), rng.randint(3, 8)
    path = place.inputs / f"{STEM}{suffix}"
    write(path, [good_row(rng, form) for _ in range(count)])
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
    lines = [as_json(good_row(rng, form)).encode() for _ in range(rng.randint(3, 8))]
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


def texts_of(path: Path) -> list[str]:
    """The usable rows of a file of texts, read without the program."""
    data = path.read_bytes()
    if path.suffix == ".parquet":
        import pyarrow.parquet

        found: list[str] = pyarrow.parquet.read_table(path)["text"].to_pylist()
        return found
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    if path.suffix == ".csv":
        lines = list(csv.reader(io.StringIO(data.decode("utf-8-sig"), newline="")))
        header = lines[0]
        rows: list[Any] = [
            dict(zip(header, fields, strict=True))
            for fields in lines[1:]
            if len(fields) == len(header)
        ]
    elif path.suffix == ".json":
        rows = json.loads(data.decode("utf-8-sig"))
    else:
        rows = [_parsed(line) for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n")]
    texts = [row.get("text") for row in rows if isinstance(row, dict)]
    return [text for text in texts if isinstance(text, str) and text.strip() and _is_text(text)]


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode())
    except ValueError:
        return None


def _is_text(text: str) -> bool:
    return text.encode("utf-8", "replace").decode() == text


Write = Callable[[Path, random.Random, Place], Any]


def _sub(folder: Path, name: str, data: bytes) -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(data)
    return str(folder)


def _link(path: Path, to: Path) -> None:
    path.symlink_to(to)


def _text_rows(rng: random.Random, count: int = 4) -> list[Row]:
    return [good_row(rng, "text") for _ in range(count)]


def _parquet(path: Path, columns: dict[str, Any]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def _late_damage(path: Path, rng: random.Random) -> None:
    """The first rows can be read, some group behind them cannot."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(_text_rows(rng, 40))
    pyarrow.parquet.write_table(table, path, row_group_size=10, compression="snappy")
    data, start = bytearray(path.read_bytes()), 0
    group = pyarrow.parquet.ParquetFile(path).metadata.row_group(rng.randrange(1, 4))
    column = group.column(0)
    start = column.dictionary_page_offset or column.data_page_offset
    for place in range(start, start + 24):
        data[place] ^= 0xFF
    path.write_bytes(data)


# What stands in a file's place: suffix, and what writes it. Each is refused, whatever the policy.
FILES: dict[str, tuple[str, Write]] = {
    "empty": (".jsonl", lambda path, rng, place: path.write_bytes(b"")),
    "empty parquet": (".parquet", lambda path, rng, place: path.write_bytes(b"")),
    "white space": (".jsonl", lambda path, rng, place: path.write_bytes(b" \n\t\n" * 3)),
    "no rows": (".json", lambda path, rng, place: path.write_bytes(b"[]")),
    "a header alone": (".csv", lambda path, rng, place: path.write_bytes(b"text,other\n")),
    "no parquet": (".parquet", lambda path, rng, place: path.write_bytes(rng.randbytes(400))),
    "a torn parquet": (
        ".parquet",
        lambda path, rng, place: (
            write(path, _text_rows(rng)),
            path.write_bytes(path.read_bytes()[: -rng.randint(1, 200)]),
        ),
    ),
    "a parquet damaged further on": (".parquet", lambda path, rng, place: _late_damage(path, rng)),
    "a parquet of numbers": (
        ".parquet",
        lambda path, rng, place: _parquet(path, {"text": [rng.randrange(99) for _ in range(5)]}),
    ),
    "a parquet of lists": (
        ".parquet",
        lambda path, rng, place: _parquet(path, {"text": [[words(rng)], [words(rng)]]}),
    ),
    "a parquet of other columns": (
        ".parquet",
        lambda path, rng, place: _parquet(path, {words(rng): ["a", "b", "c"]}),
    ),
    "a parquet without rows": (".parquet", lambda path, rng, place: _parquet(path, {"text": []})),
    "no gzip": (".jsonl.gz", lambda path, rng, place: path.write_bytes(rng.randbytes(99))),
    "a torn gzip": (
        ".jsonl.gz",
        lambda path, rng, place: (
            write(path, _text_rows(rng, 40)),
            path.write_bytes(path.read_bytes()[: -rng.randint(9, 60)]),
        ),
    ),
    "a torn array": (
        ".json",
        lambda path, rng, place: path.write_text(as_json(_text_rows(rng))[: -rng.randint(1, 40)]),
    ),
    "an array nested too deeply": (
        ".json",
        lambda path, rng, place: path.write_text(deep(rng.randint(3_000, 90_000))),
    ),
    "an array with a number too long": (
        ".json",
        lambda path, rng, place: path.write_text(f'[{{"text": {many_digits(rng)}}}]'),
    ),
    "utf-16": (
        ".json",
        lambda path, rng, place: path.write_text(as_json(_text_rows(rng)), encoding="utf-16"),
    ),
    "utf-16 text": (".txt", lambda path, rng, place: path.write_text(words(rng), "utf-16")),
    "latin-1 text": (".txt", lambda path, rng, place: path.write_bytes(b"na\xefve " * 9)),
    "a csv with NULs": (
        ".csv",
        lambda path, rng, place: path.write_bytes(b"text\n" + b"a\xff\0b\n" * rng.randint(1, 5)),
    ),
    "a csv with two columns of one name": (
        ".csv",
        lambda path, rng, place: path.write_text(f"text,text\n{words(rng)},b\n"),
    ),
    "a csv of other columns": (
        ".csv",
        lambda path, rng, place: path.write_text(f"{words(rng, 1, 2)},b\n1,2\n3,4\n"),
    ),
    "a FIFO": (".jsonl", lambda path, rng, place: os.mkfifo(path)),
    "a link to nothing": (".jsonl", lambda path, rng, place: _link(path, path.parent / "none")),
    "a link to itself": (".jsonl", lambda path, rng, place: _link(path, path)),
    "a folder": (".jsonl", lambda path, rng, place: path.mkdir()),
    "a folder of other files": (
        "",
        lambda path, rng, place: _sub(path, f"{words(rng, 1, 1)}.py", b"open('ran', 'w')"),
    ),
    "a folder with a loading script": (
        "",
        lambda path, rng, place: _sub(
            path, f"{STEM}.py", f"open({str(place.marker)!r}, 'w').close()".encode()
        ),
    ),
    "a folder with a FIFO": (
        "",
        lambda path, rng, place: (path.mkdir(), os.mkfifo(path / "a.jsonl")),
    ),
    "a saved dataset that is none": (
        "",
        lambda path, rng, place: _sub(
            path, "dataset_info.json", rng.choice([b"{}", b"[]", b"{", b"null", rng.randbytes(9)])
        ),
    ),
    "splits that are none": (
        "",
        lambda path, rng, place: _sub(
            path,
            "dataset_dict.json",
            rng.choice([b"{}", b"[]", b"{", b'{"splits": 5}', b'{"splits": ["../x"]}', b"\xff"]),
        ),
    ),
    "another kind of file": (".exe", lambda path, rng, place: path.write_bytes(rng.randbytes(99))),
    "a pickle": (".pkl", lambda path, rng, place: path.write_bytes(b"cos\nsystem\n(S'x'\ntR.")),
    "no file": (".jsonl", lambda path, rng, place: None),
    "a glob without files": ("/*.jsonl", lambda path, rng, place: None),
    "a glob of brackets": ("[!a-/*.json", lambda path, rng, place: None),
    "a NUL in the name": ("\0.jsonl", lambda path, rng, place: None),
    "a name beyond what a system takes": ("x" * 300 + ".jsonl", lambda path, rng, place: None),
    "half a character in the name": ("\udcff.jsonl", lambda path, rng, place: None),
    "a name that leads out": ("/../../none.jsonl", lambda path, rng, place: None),
}


def _file(rng: random.Random, place: Place) -> Given:
    """Something in the place of a file of rows."""
    label = rng.choice(sorted(FILES))
    suffix, make = FILES[label]
    name = f"{place.inputs / STEM}{suffix}"
    make(Path(name), rng, place)
    names = (STEM, "column", "text") if "other columns" in label else (STEM,)
    return Given(name, label, "bad", skip=rng.random() < 0.5, names=names)
