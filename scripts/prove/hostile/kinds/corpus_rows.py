"""Rows of corpora, good and broken, and the files that they stand in."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from pathlib import Path
from typing import Any

from scripts.prove.hostile.values import deep, many_digits, words

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
            ("labels shifted", [*ids[1:], 7]),
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
    line = json.dumps(good_row(rng, form)).encode()
    column = _column(form)
    return rng.choice(
        [
            ("torn", line[: rng.randrange(1, len(line) - 1)]),
            ("not UTF-8", line.replace(b'": ', b'": ', 1)[:-1] + b', "z": "\xff\xfe"}'),
            ("a raw NUL", line.replace(b'"', b'"\0', 1)),
            ("no object", rng.choice([b"[]", b"7", b'"text"', b"null", b"[[1]]", b"true"])),
            ("nested too deeply",
                b'{"%s": %s' % (column.encode(), deep(6000, rng.choice("[{")).encode())),
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
        data = json.dumps(rows).encode()
    else:
        data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)


def texts_of(path: Path) -> list[str]:
    """The usable rows of a file of texts, read without the program."""
    data = path.read_bytes()
    if path.suffix == ".parquet":
        import pyarrow.parquet

        found: list[str] = pyarrow.parquet.read_table(path)["text"].to_pylist()
        return found
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    if path.suffix == ".txt":
        text = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        return [text] if text.strip() else []
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
