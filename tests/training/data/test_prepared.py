"""Prepared rows: those of a slow plain reference, made once, whole, and found again."""

import hashlib
import json
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from medusa_heads.config import IGNORED
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.data import EVAL_ROWS, EVAL_SHARE, DataArguments
from medusa_heads.training.data import tokenise
from medusa_heads.training.data.pack import best_fit
from medusa_heads.training.data.prepare import TrainingData, load_corpora, prepare_data
from medusa_heads.training.data.prepared import INDEX_FILE, prepared
from medusa_heads.training.data.tokeniser import Tokeniser
from tests.conftest import TinyLlama
from tests.training import templates

Rows = list[tuple[list[int], list[int]]]
SIZE = 24


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return templates.chat_tokenizer()


@pytest.fixture
def wide(tokenizer: Any, tiny_llama: TinyLlama) -> TargetModel:
    """A target that knows all tokens."""
    return TargetModel(tiny_llama(vocab_size=len(tokenizer), max_position_embeddings=64))


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
        rows.append(
            {
                "text": {"text": " " if number == 7 else words},
                "completion": {
                    "prompt": f"{words[:30]}\n",
                    "completion": " " if number == 9 else "x" + words,
                },
                "messages": {"messages": talk(draw, draw.randint(1, 3))[number % 9 == 5 :]},
                "tokens": {"input_ids": ids, "labels": labels[-len(ids) :]},
            }[kind]
        )
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


def prepare(target: TargetModel, tokenizer: Any, rows: Any, folder: Path, **given: Any) -> Any:
    settings = DataArguments(prepared_dir=str(folder), **{"max_length": SIZE, **given})
    corpora = load_corpora(settings, rows if isinstance(rows, Dataset) else Dataset.from_list(rows))
    return prepare_data(target, *corpora, tokenizer, settings, num_heads=2, seed=3)


KINDS = ["text", "completion", "tokens", "CHATML", "LLAMA3", "MISTRAL", "GEMMA", "THINKING"]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
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
    known, held = plain_split([d for d, parts in enumerate(made) for _ in parts], seed=3)
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


def table(rows: Dataset) -> list[Any]:
    return [(list(row["input_ids"]), list(row["labels"])) for row in rows]


@pytest.mark.parametrize("size", [1, 7, 64, 300])
def test_items_are_packed_as_one_by_one(size: int) -> None:
    draw = random.Random(size)
    for _ in range(60):
        longest = draw.choice([3, size, 2 * size])
        lengths = [draw.randint(1, longest) for _ in range(draw.randint(0, 150))]
        assert best_fit(lengths, size).to_pylist() == plain_best_fit(lengths, size)


def texts(count: int = 30) -> list[dict[str, str]]:
    return [{"text": "x " * (number % 7 + 2)} for number in range(count)]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many batches were tokenised since it was last asked."""
    calls: list[int] = []
    tokenising = Tokeniser.__call__

    def call(self: Any, batch: Any, documents: Any) -> Any:
        calls.append(len(documents))
        return tokenising(self, batch, documents)

    monkeypatch.setattr(Tokeniser, "__call__", call)

    def since() -> int:
        count = sum(calls)
        calls.clear()
        return count

    return since


def test_the_second_start_tokenises_nothing_and_reads_from_disk(
    wide: TargetModel, tokenizer: Any, tmp_path: Path, counted: Callable[[], int]
) -> None:
    first: TrainingData = prepare(wide, tokenizer, texts(), tmp_path, packing=True)
    assert counted() == 30
    again = prepare(wide, tokenizer, texts(), tmp_path, packing=True)
    assert counted() == 0 and table(again.rows) == table(first.rows)
    assert again.record() == first.record()
    for rows in (again.rows, again.known_rows, again.held_out):
        files = [Path(file["filename"]) for file in rows.cache_files]
        assert files and all(tmp_path in file.parents for file in files)


def test_what_rows_hang_on_is_prepared_anew(
    wide: TargetModel, tokenizer: Any, tmp_path: Path, counted: Callable[[], int]
) -> None:
    def count(tokenizer: Any = tokenizer, rows: Any = None, **given: Any) -> int:
        data = prepare(wide, tokenizer, rows or texts(), tmp_path, **given)
        assert len(data.rows) + len(data.held_out) > 0
        return counted()

    assert count() == 30
    assert count(max_length=16) == 30 and count(rows=[*texts(), {"text": "x"}]) == 31
    (tmp_path / "chat.jinja").write_text(templates.CHATML)
    assert count(chat_template=str(tmp_path / "chat.jinja")) == 30
    other = templates.chat_tokenizer()
    other.eos_token = "<|im_end|>"
    assert count(other) == 30
    # The same tokens, in another split.
    assert count(eval_rows=3) == 0 and count(packing=True) == 0 and count() == 0


def test_an_interrupted_preparation_goes_on(
    wide: TargetModel,
    tokenizer: Any,
    tmp_path: Path,
    counted: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenise, "_ROWS_OF_A_PART", 8)
    whole = prepare(wide, tokenizer, texts(), tmp_path / "whole")
    counted()
    write, done = tokenise.write_whole, []

    def interrupted(path: Path, make: Callable[[Path], object]) -> None:
        if len(done) == 2:
            raise KeyboardInterrupt
        write(path, make)
        done.append(path)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(tokenise, "write_whole", interrupted)
        prepare(wide, tokenizer, texts(), tmp_path / "parts")
    assert counted() == 16
    again = prepare(wide, tokenizer, texts(), tmp_path / "parts")
    assert counted() == 14 and table(again.rows) == table(whole.rows)
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize(
    "name", ["part.arrow", "known.arrow", "facts.json", "bins.arrow", INDEX_FILE]
)
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_damaged_files_are_noticed_and_made_anew(
    name: str,
    damage: str,
    wide: TargetModel,
    tokenizer: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = prepare(wide, tokenizer, texts(), tmp_path, packing=True)
    for file in tmp_path.rglob(name):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 255
        file.unlink()
        if damage != "gone":
            file.write_bytes(content if damage == "flipped" else content[: len(content) // 2])
    again = prepare(wide, tokenizer, texts(), tmp_path, packing=True)
    assert table(again.rows) == table(whole.rows) and again.record() == whole.record()
    warned = [line for line in caplog.messages if "is damaged: what lies beside it" in line]
    assert len(warned) == (
        0 if (name, damage) == (INDEX_FILE, "gone") else 1 + (name == INDEX_FILE)
    )
    caplog.clear()
    prepare(wide, tokenizer, texts(), tmp_path, packing=True)
    assert not caplog.messages


def test_what_is_refused_leaves_nothing(wide: TargetModel, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 broken row"):
        prepare(wide, tokenizer, [*texts(), {"text": ""}], tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_one_process_makes_and_the_others_wait(tmp_path: Path) -> None:
    """Each holds the lock by a file of its own, as processes do."""
    told: list[bool] = []

    def ask() -> None:
        with prepared(tmp_path / "rows") as found:
            told.append(found)

    other = threading.Thread(target=ask)
    with prepared(tmp_path / "rows") as found:
        other.start()
        other.join(0.2)
        assert not found and not told
        (tmp_path / "rows" / "file").write_text("made")
    other.join()
    assert told == [True]
    assert list(json.loads((tmp_path / "rows" / INDEX_FILE).read_text())["files"]) == ["file"]
