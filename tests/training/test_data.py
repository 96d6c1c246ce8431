"""From corpora to rows, and the corpora and rows that are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerFast

from medusa_heads.corpus import HELD_OUT
from medusa_heads.target import TargetModel
from medusa_heads.training.data import (
    check_length,
    check_rows,
    collate,
    find_tokenizer,
    hold_out,
    load_corpus,
    prepare_rows,
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, w0 .. w59."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(60)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def one_row(ids: list[int], labels: list[int] | None = None) -> Dataset:
    return Dataset.from_list([{"input_ids": ids, "labels": ids if labels is None else labels}])


def test_documents_are_cut_into_blocks_and_never_joined(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    corpus = Dataset.from_list([{"text": "w1 w2 w3 w4 w5"}, {"text": ""}, {"text": "w6 w7"}])
    rows = prepare_rows(corpus, tokenizer, max_length=3)
    assert rows["input_ids"][:] == [[1, 2, 3], [4, 5], [6, 7]]
    assert rows["labels"][:] == rows["input_ids"][:]
    assert rows["document"][:] == [0, 0, 2]


def test_rows_that_are_ready_are_taken_as_they_are() -> None:
    rows = prepare_rows(one_row([1, 2, 3], [-100, 2, 3]), None, max_length=2)
    assert rows[0] == {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "document": 0}


def test_the_batch_is_padded_on_the_right() -> None:
    batch = collate(
        [
            {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
            {"input_ids": [8], "labels": [8]},
        ]
    )
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [8, -100, -100]]


def test_padding_does_not_change_hidden_states(target: TargetModel) -> None:
    short = {"input_ids": [5, 6, 7], "labels": [5, 6, 7]}
    batch = collate([short, {"input_ids": [1] * 9, "labels": [1] * 9}])
    alone = collate([short])
    together_BTD = target.hidden(batch["input_ids"], batch["attention_mask"])
    alone_BTD = target.hidden(alone["input_ids"], alone["attention_mask"])
    torch.testing.assert_close(together_BTD[:1, :3], alone_BTD)


def test_whole_documents_are_held_out_and_the_draw_is_seeded() -> None:
    rows = Dataset.from_list(
        [{"input_ids": [i], "labels": [i], "document": i // 3} for i in range(60)]
    )
    kept, held = hold_out(rows, 0.2, seed=1)
    assert len(set(held["document"])) == 4 and len(held) == 12
    assert not set(kept["document"]) & set(held["document"])
    assert hold_out(rows, 0.2, seed=1)[1]["input_ids"][:] == held["input_ids"][:]
    assert hold_out(rows, 0.2, seed=2)[1]["input_ids"][:] != held["input_ids"][:]


def test_a_single_document_is_held_out_in_part() -> None:
    rows = Dataset.from_list([{"input_ids": [i], "document": 0} for i in range(10)])
    assert [len(part) for part in hold_out(rows, 0.05, seed=0)] == [9, 1]
    with pytest.raises(ValueError, match="single row"):
        hold_out(rows.select([0]), 0.05, seed=0)


def test_rows_are_counted_and_fingerprinted(
    target: TargetModel, make_rows: Callable[..., Dataset]
) -> None:
    rows = make_rows(3, length=10, prompt=4)
    facts = check_rows(rows, target, name="training set", heads_reached=1)
    assert (facts.rows, facts.tokens, facts.supervised_tokens) == (3, 30, 18)
    again = check_rows(rows, target, name="training set", heads_reached=1)
    other = check_rows(
        make_rows(3, length=10, prompt=5), target, name="training set", heads_reached=1
    )
    assert facts == again and facts.sha256 != other.sha256


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (one_row([1, 2, 61]), "token ids from 1 to 61, the target's vocabulary has 61"),
        (one_row([1, -2, 3]), "token ids from -2 to 3"),
        (one_row([1] * 65), "row 0 of the training set has 65 tokens, more than the target's"),
        (one_row([1, 2, 3], [-100] * 3), "no supervised token"),
        (one_row([1, 2, 3], [2, 3, -100]), "labels are not shifted here"),
        (one_row([1, 2, 3], [1, 2]), "3 input_ids but 2 labels"),
        (one_row([1, 2, 3, 4], [-100, 2, -100, 4]), "no 4 supervised tokens in a row"),
    ],
)
def test_rows_that_training_cannot_use(rows: Dataset, message: str, target: TargetModel) -> None:
    with pytest.raises(ValueError, match=message):
        check_rows(rows, target, name="training set", heads_reached=3)


def test_a_length_beyond_the_targets_context(target: TargetModel) -> None:
    check_length(64, target)
    with pytest.raises(ValueError, match="65 tokens are longer than the target's context of 64"):
        check_length(65, target)


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        (Dataset.from_list([]), "the corpus is empty"),
        (Dataset.from_list([{"text": ""}]), "the corpus is empty"),
        (Dataset.from_list([{"words": "a"}]), "expected a corpus with a column 'text'"),
    ],
)
def test_corpora_without_text(
    corpus: Dataset, message: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(ValueError, match=message):
        prepare_rows(corpus, tokenizer, max_length=8)


def test_text_without_a_tokenizer() -> None:
    assert find_tokenizer("") is None
    with pytest.raises(ValueError, match="text needs the target's tokenizer"):
        prepare_rows(Dataset.from_list([{"text": "a"}]), None, max_length=8)


def _as_jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("a b", "c")))


def _as_split(path: Path) -> None:
    DatasetDict({"train": Dataset.from_list([{"text": "a b"}, {"text": "c"}])}).save_to_disk(path)


@pytest.mark.parametrize(
    ("name", "write", "texts"),
    [
        ("a.jsonl", _as_jsonl, ["a b", "c"]),
        ("a.txt", lambda path: path.write_text("a b\n\nc"), ["a b\n\nc"]),
        ("folder", _as_split, ["a b", "c"]),
    ],
)
def test_corpora_are_read_from_files(
    name: str, write: Callable[[Path], Any], texts: list[str], tmp_path: Path
) -> None:
    write(tmp_path / name)
    assert load_corpus(str(tmp_path / name))["text"][:] == texts


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "found none"),
        ("empty.txt", "", "is empty"),
        ("table.csv", "a,b", "expected a .jsonl or .txt file"),
        ("broken.jsonl", '{"text": "a"}\n{"text": ', "not valid JSON lines"),
    ],
)
def test_files_that_are_no_corpus(
    name: str, content: str | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_corpus(str(tmp_path / name))


def test_the_embedded_corpus_keeps_its_held_out_packages_apart() -> None:
    train, held_out = load_corpus("stdlib"), load_corpus("stdlib", "held_out")
    assert {path.split("/")[0] for path in held_out["path"]} == set(HELD_OUT)
    assert not {path.split("/")[0] for path in train["path"]} & set(HELD_OUT)
