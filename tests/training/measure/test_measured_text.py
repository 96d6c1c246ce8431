"""Rows drawn from a corpus to measure heads on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from medusa_heads.data.sources import as_corpus
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.data import DataArguments
from medusa_heads.training.measure.measured_text import draw_rows, measurable
from tests.conftest import TinyLlama

SETTINGS = DataArguments(dataset=["given"])


@pytest.fixture(scope="module")
def target(tiny_llama: TinyLlama) -> TargetModel:
    return TargetModel(tiny_llama())


def token_rows(documents: int, length: int = 10) -> Dataset:
    """Document d is all token d."""
    ids = [[d % 199] * length for d in range(documents)]
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def drawn(target: TargetModel, rows: Dataset, tokens: int, **options: Any) -> Dataset:
    corpus = as_corpus(rows, "given")
    return draw_rows(target, corpus, None, SETTINGS, num_heads=2, tokens=tokens, **options)


def test_as_many_as_asked_from_everywhere(target: TargetModel) -> None:
    rows = drawn(target, token_rows(180), 300)
    assert len(rows) == 30
    documents = {ids[0] for ids in rows["input_ids"]}
    assert len(documents) == 30  # no row twice
    assert min(documents) < 60 and max(documents) > 120
    assert drawn(target, token_rows(180), 300)["input_ids"] == rows["input_ids"]
    assert drawn(target, token_rows(180), 300, seed=1)["input_ids"] != rows["input_ids"]
    assert len(drawn(target, token_rows(180), 301)) == 31


def test_all_of_a_small_corpus(target: TargetModel) -> None:
    assert len(drawn(target, token_rows(5), 300)) == 5
    assert len(drawn(target, token_rows(180), 10_000)) == 180  # three parts of documents


def test_only_what_is_drawn_is_read(target: TargetModel) -> None:
    """A row that cannot be used is met with the documents it is drawn with, and called by its
    place in the whole corpus."""
    rows = token_rows(1000)
    order = np.random.default_rng(0).permutation(1000)
    ids = rows["input_ids"]
    unread, read = int(order[-1]), int(order[7])
    labels: list[list[int] | None] = list(ids)
    labels[unread] = None
    assert len(drawn(target, Dataset.from_dict({"input_ids": ids, "labels": labels}), 100)) == 10
    labels[read] = None
    broken = Dataset.from_dict({"input_ids": ids, "labels": labels})
    with pytest.raises(ValueError, match=rf"1 broken row \(given row {read + 1}: "):
        drawn(target, broken, 100)


def test_text_needs_a_tokenizer_and_must_fit(target: TargetModel) -> None:
    corpus = as_corpus(Dataset.from_dict({"text": ["a b c"]}), "given")
    with pytest.raises(ValueError, match="needs the target's tokenizer"):
        draw_rows(target, corpus, None, SETTINGS, num_heads=2, tokens=10)
    longer = replace(SETTINGS, max_length=1000)
    with pytest.raises(ValueError, match="context of 512"):
        draw_rows(target, corpus, None, longer, num_heads=2, tokens=10)


def test_measurable_positions_by_hand() -> None:
    rows = Dataset.from_dict({"labels": [[1, 2, 3, 4], [-100, -100, 3, 4, 5], [1, 2]]})
    # Of tokens 0 1 2 3, two heads at 0 predict 2 and 3; token 1 is the target's own.
    assert measurable(rows, 2) == [1, 1, 0]
    assert measurable(rows, 1) == [2, 2, 0]
