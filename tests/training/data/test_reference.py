"""Prepared rows are those of a slow plain reference, token for token."""

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medusa_heads.config import IGNORED
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.data import EVAL_ROWS, EVAL_SHARE
from medusa_heads.training.data.pack import best_fit
from tests.training import templates
from tests.training.packing import SIZE, prepare, table

Rows = list[tuple[list[int], list[int]]]


def talk(draw: random.Random, turns: int) -> list[dict[str, str]]:
    def text() -> str:
        return " ".join(
            draw.choice(["x", "yes", "return", "def f"]) for _ in range(draw.randint(1, 6))
        )

    roles = ("user", "assistant")
    return [{"role": role, "content": text()} for _ in range(turns) for role in roles]


def corpus(kind: str, tokenizer: Any) -> list[dict[str, Any]]:
    """Sixty rows, among them broken ones and some that are too long."""
    draw = random.Random(kind)
    rows: list[dict[str, Any]] = []
    for number in range(60):
        words = " ".join(
            draw.choice(["x", "yes", "def f(x):\n"]) for _ in range(draw.randint(1, 40))
        )
        ids = [draw.randrange(9, 90) for _ in range(draw.randint(1, 60))]
        labels = [IGNORED] * draw.randint(0, len(ids) // 2) + ids
        kinds: dict[str, dict[str, Any]] = {
            "text": {"text": " " if number == 7 else words},
            "completion": {
                "prompt": f"{words[:30]}\n",
                "completion": " " if number == 9 else "x" + words,
            },
            "messages": {"messages": talk(draw, draw.randint(1, 3))[number % 9 == 5 :]},
            "tokens": {"input_ids": ids, "labels": labels[-len(ids) :]},
        }
        rows.append(kinds[kind])
    if kind == "tokens":
        rows[3], rows[4] = {"input_ids": [], "labels": []}, {"input_ids": [5, 6], "labels": [5]}
        rows[5], rows[6] = [{"input_ids": [5, 1], "labels": [5, last]} for last in (2, 1)]
        rows[8] = {"input_ids": [99_999], "labels": [99_999]}
    return rows


def reference(kind: str, row: dict[str, Any], tokenizer: Any, template: str | None) -> Rows:
    """What becomes of one row, by itself; nothing where it is broken."""

    def encode(text: str) -> list[int]:
        return list(tokenizer(text)["input_ids"])

    def blocks(ids: list[int]) -> Rows:
        return [(ids[i : i + SIZE], ids[i : i + SIZE]) for i in range(0, len(ids), SIZE)]

    if kind == "text":
        return blocks([*encode(row["text"]), tokenizer.eos_token_id]) if row["text"].strip() else []
    if kind == "completion" and not row["completion"].strip():
        return []
    if kind == "completion":
        prompt = encode(row["prompt"])
        ids = [*encode(row["prompt"] + row["completion"]), tokenizer.eos_token_id]
        assert ids[: len(prompt)] == prompt, "the texts are chosen so"
        rows = [(ids, [IGNORED] * len(prompt) + ids[len(prompt) :])]
    elif kind == "tokens":
        ids, labels = row["input_ids"], row["labels"]
        fit = len(ids) == len(labels) and all(0 <= token < len(tokenizer) for token in ids)
        if (
            not ids
            or not fit
            or any(b not in (a, IGNORED) for a, b in zip(ids, labels, strict=True))
        ):
            return []
        if len(ids) <= SIZE:
            return [(ids, labels)]
        if ids == labels:
            return blocks(ids)
        rows = [(ids, labels)]
    else:
        rows = conversation(row["messages"], tokenizer, str(template))
    return [
        (ids[:SIZE], labels[:SIZE])
        for ids, labels in rows
        if any(label != IGNORED for label in labels[:SIZE])
    ]


def conversation(messages: list[Any], tokenizer: Any, template: str) -> Rows:
    if messages[0]["role"] == "assistant":
        return []

    def render(count: int, ask: bool) -> list[int]:
        text = tokenizer.apply_chat_template(
            messages[:count], chat_template=template, add_generation_prompt=ask, tokenize=False
        )
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    turns = []
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    for count in range(2, len(messages) + 1, 2):
        before, ids = render(count - 1, ask=True), render(count, ask=False)
        assert ids[: len(before)] == before, "the texts are chosen so"
        end = next(t for t in range(len(before), len(ids)) if ids[t] in special)
        turns.append((ids[: end + 1], len(before)))
    rows: Rows = []
    while turns:
        last = turns[-1][0]
        held = [(ids, start) for ids, start in turns if last[: len(ids)] == ids]
        labels = [IGNORED] * len(last)
        for ids, start in held:
            labels[start : len(ids)] = ids[start:]
        turns = [turn for turn in turns if turn not in held]
        rows.insert(0, (last, labels))
    return rows


def plain_split(documents: Sequence[int], seed: int) -> tuple[list[int], list[int]]:
    known = sorted(set(documents))
    count = min(max(round(EVAL_SHARE * len(known)), 1), len(known) - 1, EVAL_ROWS)
    drawn = set(np.random.default_rng(seed).permutation(known)[:count].tolist())
    held = [row for row, document in enumerate(documents) if document in drawn]
    return [row for row in range(len(documents)) if row not in held], held


def plain_best_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Item after item; of bins with the same room, the last one that got it."""
    bins: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(size + 1)]
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = min(lengths[item], size)
        room = next((room for room in range(length, size + 1) if with_room[room]), None)
        if room is None:
            bins.append([])
        chosen = len(bins) - 1 if room is None else with_room[room].pop()
        bins[chosen].append(item)
        with_room[(size if room is None else room) - length].append(chosen)
    return sorted(map(sorted, bins))


def plain_hash(rows: Rows) -> str:
    digest = hashlib.sha256()
    for ids, labels in rows:
        for part in (len(ids), ids, labels):
            digest.update(np.asarray(part, np.int64).tobytes())
    return digest.hexdigest()


ALIKE = ("completion", "LLAMA3", "MISTRAL", "GEMMA")
KINDS = ["text", "completion", "tokens", "CHATML", "LLAMA3", "MISTRAL", "GEMMA", "THINKING"]


@pytest.mark.parametrize(
    ("kind", "packing"),
    [
        # Rows that are packed are compared before that as well; some are not packed.
        pytest.param(kind, packing, marks=marks)
        for i, kind in enumerate(KINDS)
        for packing in (False, True)
        for quick in [packing != (i % 4 == 0) and kind not in ALIKE]
        for marks in [[] if quick else [pytest.mark.slow]]
    ],
)
def test_rows_are_those_of_the_plain_reference(
    kind: str, packing: bool, wide: TargetModel, tokenizer: Any, tmp_path: Path
) -> None:
    template = getattr(templates, kind, None)
    given: dict[str, Any] = {"on_bad_row": "skip", "packing": packing}
    if template is not None:
        (tmp_path / "chat.jinja").write_text(template)
        given["chat_template"] = str(tmp_path / "chat.jinja")
    kind = kind if template is None else "messages"
    rows = corpus(kind, tokenizer)
    made = [reference(kind, row, tokenizer, template) for row in rows]
    flat = [part for parts in made for part in parts]
    firsts: dict[str, int] = {}  # of equal documents
    names = [firsts.setdefault(str([ids for ids, _ in made[d]]), d) for d in range(len(made))]
    known, held = plain_split([names[d] for d, parts in enumerate(made) for _ in parts], seed=3)
    assert len(held) > 0 and sum(not parts for parts in made) > 0
    for _ in range(2):  # made, and found again
        data = prepare(wide, tokenizer, rows, tmp_path / "kept", **given)
        assert table(data.known_rows) == [flat[row] for row in known]
        assert table(data.held_out) == [flat[row] for row in held]
        assert data.facts.sha256 == plain_hash([flat[row] for row in known])
        assert data.corpora[0].bad_rows.count == sum(not parts for parts in made)
        if not packing:
            assert table(data.rows) == table(data.known_rows)
            continue
        bins = plain_best_fit([len(flat[row][0]) for row in known], SIZE)
        packed = [[flat[known[item]] for item in items] for items in bins]
        assert table(data.rows) == [
            tuple([token for part in parts for token in part[column]] for column in (0, 1))
            for parts in packed
        ]
        positions = [[t for ids, _ in parts for t in range(len(ids))] for parts in packed]
        assert [list(row["position_ids"]) for row in data.rows] == positions


@pytest.mark.parametrize("size", [1, 7, 64, 300])
def test_items_are_packed_as_one_by_one(size: int) -> None:
    draw = random.Random(size)
    for _ in range(60):
        longest = draw.choice([3, size, 2 * size])
        lengths = [draw.randint(1, longest) for _ in range(draw.randint(0, 150))]
        assert best_fit(lengths, size).to_pylist() == plain_best_fit(lengths, size)
