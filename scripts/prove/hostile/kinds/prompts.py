"""Prompts: files of them, one on the command line, one on standard input."""

from __future__ import annotations

import io
import json
import os
import random
from typing import Any

from scripts.prove.hostile.attempt import Attempt
from scripts.prove.hostile.commands import command, read_by
from scripts.prove.hostile.values import deep, draw, many_digits, mutated, words
from scripts.prove.hostile.workshop import Place, Workshop

STEM = "asked-of-us"
LONGEST = 120


class Prompts:
    """Read as `medusa-heads benchmark` and `generate` read them."""

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop

    def draw(self, rng: random.Random, place: Place) -> Attempt:
        """One prompt, or one file."""
        make = draw(
            rng,
            [
                (8, self._sound), (40, self._row), (20, self._file), (12, self._mutated),
                (20, self._generate),
            ],
        )  # fmt: skip
        return make(rng, place)

    def _read(self, path: str, into: list[Any]) -> Any:
        def call() -> Any:
            from medusa_heads.inference.bench.prompts import (
                choose_prompts,
                encode_questions,
                read_questions,
            )

            questions = read_questions(path)
            encoded = encode_questions(questions, self._workshop.tokenizer)
            return choose_prompts(encoded, len(encoded), LONGEST), questions

        return read_by(call, into)

    def _sound(self, rng: random.Random, place: Place) -> Attempt:
        asked = [words(rng) for _ in range(rng.randint(1, 6))]
        suffix = rng.choice([".txt", ".jsonl"])
        rows = asked if suffix == ".txt" else [json.dumps(_row(rng, text)) for text in asked]
        path = place.inputs / f"{STEM}{suffix}"
        read: list[Any] = []
        mark = rng.choice(["", "\ufeff"])
        path.write_text(mark + rng.choice(["\n", "\n\n"]).join(rows), encoding="utf-8")
        run = self._read(str(path), read)
        return Attempt("good", "good", run, right=lambda: [q.turns[0] for q in read[0][1]] == asked)

    def _row(self, rng: random.Random, place: Place) -> Attempt:
        """One line of a file that is no prompt."""
        text = words(rng)
        wrong: list[Any] = [5, None, "", [], {}, True, 2.5, [text], {"a": text}, float("nan")]
        key = rng.choice(["prompt", "text"])
        label, line = rng.choice(
            [
                ("a wrong type", json.dumps({key: rng.choice(wrong)})),
                ("turns of a wrong type",
                    json.dumps({"turns": rng.choice([5, text, [], [5], [""], [None], {},
                        [text, 5]])})),
                ("a category of a wrong type",
                    json.dumps({key: text, "category": rng.choice([5, [], {}, True])})),
                ("no prompt", json.dumps({"asked": text})),
                ("no object", rng.choice(["[]", "7", "null", '"text"', "[[]]"])),
                ("torn", json.dumps({key: text})[: rng.randrange(1, 8)]),
                ("nested too deeply", f'{{"{key}": {deep(rng.randint(2000, 50_000))}'),
                ("a number too long", f'{{"{key}": {many_digits(rng)}}}'),
                ("a number too long beside it", f'{{"{key}": "x", "n": {many_digits(rng)}}}'),
                ("half a character", json.dumps({key: f"{text}\ud800"})),
                ("half a character in a turn", json.dumps({"turns": [text, "\udfff"]})),
                ("a raw NUL", f'{{"{key}": "a\0b"}}'),
            ]
        )  # fmt: skip
        lines = [json.dumps({key: words(rng)}) for _ in range(rng.randint(0, 4))]
        lines.insert(rng.randint(0, len(lines)), line)
        path = place.inputs / f"{STEM}.jsonl"
        path.write_text("\n".join(lines))
        return Attempt(label, "bad", self._read(str(path), []), (STEM, "prompt"))

    def _file(self, rng: random.Random, place: Place) -> Attempt:
        """What stands in the place of a file."""
        path = place.inputs / f"{STEM}{rng.choice(['.txt', '.jsonl'])}"
        name = str(path)
        label = rng.choice(
            [
                "nothing", "white space", "no UTF-8", "utf-16", "a FIFO", "a folder", "no file",
                "a link",
                "a NUL in the name", "a name too long", "half a character in the name", "too long",
            ]
        )  # fmt: skip
        match label:
            case "nothing":
                path.write_bytes(b"")
            case "white space":
                path.write_bytes(b" \n\t\n\n" * rng.randint(1, 9))
            case "no UTF-8":
                path.write_bytes(b"\xff" + rng.randbytes(rng.randint(0, 60)))
            case "utf-16":
                path.write_bytes(words(rng).encode("utf-16"))
            case "a FIFO":
                os.mkfifo(path)
            case "a folder":
                path.mkdir()
            case "a link":
                path.symlink_to(rng.choice([path.name, "none"]))
            case "a NUL in the name":
                name = f"{STEM}\0{path}"
            case "a name too long":
                name = f"{place.inputs / STEM}{'x' * rng.randint(300, 600)}"
            case "half a character in the name":
                name = f"{place.inputs / STEM}\udcff"
            case "too long":
                path = path.with_suffix(".txt")
                path.write_text(words(rng, 300, 400))
                name = str(path)
        return Attempt(f"file: {label}", "bad", self._read(name, []), (STEM, "prompts have more"))

    def _mutated(self, rng: random.Random, place: Place) -> Attempt:
        """Bytes changed: refused, or the questions are those of the lines."""
        suffix = rng.choice([".txt", ".jsonl"])
        texts = [words(rng) for _ in range(4)]
        path = place.inputs / f"{STEM}{suffix}"
        read: list[Any] = []
        lines = texts if suffix == ".txt" else [json.dumps({"prompt": text}) for text in texts]
        path.write_bytes(mutated("\n".join(lines).encode(), rng))

        def right() -> bool:
            kept = [
                line for line in path.read_bytes().decode("utf-8-sig").split("\n") if line.strip()
            ]
            said = kept if suffix == ".txt" else [_asked(json.loads(line)) for line in kept]
            return [question.turns[0] for question in read[0][1]] == said

        return Attempt(
            f"bytes of {suffix}", "either", self._read(str(path), read), (STEM, "prompt"), right
        )

    def _generate(self, rng: random.Random, place: Place) -> Attempt:
        """A prompt of a command; what is refused before a model is loaded is cheap to try often."""
        start = [str(self._workshop.heads()), "--target", str(self._workshop.target_folder)]
        start += ["--device", "cpu", "--max_new_tokens", "2"]
        label = draw(
            rng,
            [
                (4, "empty"),
                (3, "no UTF-8"),
                (3, "half a character"),
                (2, "not decodable"),
                (1, "too long"),
                (1, "good"),
            ],
        )
        stdin: Any = None
        prompt: str | None = ""
        if label == "half a character":
            prompt = words(rng) + rng.choice(["\udcff", "\ud800", "\udfff\ud800"]) + words(rng)
        elif label == "no UTF-8":
            prompt, stdin = None, io.StringIO(words(rng) + "\udcff" * rng.randint(1, 9))
        elif label == "not decodable":
            data = io.BytesIO(words(rng).encode() + b"\xff\xfe" + rng.randbytes(9))
            prompt, stdin = None, io.TextIOWrapper(data, encoding="utf-8")
        elif label == "too long":
            prompt = words(rng, 300, 900)
        elif label == "good":
            prompt = words(rng) + rng.choice(
                ["", "\0", "\x07", "\N{SNOWMAN}", "\u202e", "<|endoftext|>"]
            )
        elif rng.random() < 0.5:
            prompt, stdin = None, io.StringIO(rng.choice(["", "\ufeff"]))
        argv = [*start, "--prompt", prompt] if prompt is not None else start
        if label == "good":
            return Attempt("good prompt", "good", command("generate", argv))
        return Attempt(
            f"generate: {label}", "bad", command("generate", argv), ("prompt",), stdin=stdin
        )


def _row(rng: random.Random, text: str) -> dict[str, Any]:
    return rng.choice(
        [{"prompt": text}, {"text": text, "category": "code"}, {"turns": [text, "and"]}]
    )


def _asked(row: Any) -> Any:
    """The question of a row, by the order in which its names are looked for."""
    for name in ("turns", "prompt", "text"):
        if name in row:
            return row[name][0] if name == "turns" else row[name]
    raise AssertionError(f"no prompt: {row}")
