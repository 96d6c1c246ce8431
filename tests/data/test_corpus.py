"""The embedded corpus and the prompts drawn from it."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from medusa_heads.data.corpus import HELD_OUT, prompt_windows, standard_library


@pytest.fixture(scope="module")
def part_of_the_library() -> None:
    """All of it."""


@pytest.fixture(scope="module")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: a window of tokens is a window of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_splits_are_apart_and_complete() -> None:
    train, held_out = standard_library("train"), standard_library("held_out")
    assert train.column_names == held_out.column_names == ["path", "text"]
    assert {path.split("/")[0] for path in held_out["path"]} == set(HELD_OUT)
    assert not {path.split("/")[0] for path in train["path"]} & set(HELD_OUT)
    assert len(train) > 100


def test_rows_are_the_interpreters_own_files_in_order() -> None:
    corpus = standard_library("held_out")
    paths = list(corpus["path"])
    assert paths == list(standard_library("held_out")["path"])
    assert len(set(paths)) == len(paths)
    assert not any("site-packages" in path for path in paths)
    root = Path(sysconfig.get_path("stdlib"))
    row = corpus[len(corpus) // 2]
    assert row["text"] == (root / row["path"]).read_text(encoding="utf-8")


def test_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 'train' or 'held_out'"):
        standard_library("test")  # type: ignore[arg-type]


def test_windows_are_deterministic_and_of_one_length(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    corpus = standard_library("held_out")
    draw = [
        prompt_windows(corpus, byte_tokenizer, num_prompts=50, prompt_length=40, seed=seed)[:]
        for seed in (0, 0, 1)
    ]
    assert draw[0] == draw[1] != draw[2]
    assert {len(ids) for ids in draw[0]["input_ids"]} == {40}


def test_windows_start_at_lines_inside_one_document(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    corpus = standard_library("held_out")
    texts = dict(zip(corpus["path"], corpus["text"], strict=True))
    for row in prompt_windows(corpus, byte_tokenizer, num_prompts=50, prompt_length=40, seed=3):
        window = str(byte_tokenizer.decode(row["input_ids"])).strip("\ufffd")
        assert "\n" + window in "\n" + texts[row["path"]]


def test_a_corpus_of_one_line_gives_windows_at_words(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    text = "one two three four five"
    corpus = Dataset.from_dict({"text": [text]})
    windows = prompt_windows(corpus, byte_tokenizer, num_prompts=3, prompt_length=10, seed=0)
    decoded = [byte_tokenizer.decode(ids) for ids in windows["input_ids"]]
    assert decoded[0] == text[:10]
    assert set(decoded[1:]) <= {"two three ", "three four", "four five"} and len(set(decoded)) == 3


@pytest.mark.parametrize(
    ("texts", "num_prompts", "prompt_length", "message"),
    [
        ([], 1, 4, "corpus is empty"),
        ([" \n", ""], 1, 4, "corpus is empty"),
        (["short", "texts"], 1, 6, "no document of the corpus is 6 tokens long"),
        (["short", "longer"], 2, 6, "holds only 1 windows of 6 tokens, 2 were asked for"),
        (["text"], 0, 4, "at least 1 prompt"),
    ],
)
def test_impossible_windows_are_refused(
    byte_tokenizer: PreTrainedTokenizerFast,
    texts: list[str],
    num_prompts: int,
    prompt_length: int,
    message: str,
) -> None:
    corpus = Dataset.from_dict({"text": texts})
    with pytest.raises(ValueError, match=message):
        prompt_windows(
            corpus, byte_tokenizer, num_prompts=num_prompts, prompt_length=prompt_length, seed=0
        )
