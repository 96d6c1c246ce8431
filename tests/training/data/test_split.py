"""What is held out, by document: of equal documents none is learnt from."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.data import DataArguments
from medusa_heads.training.data.columns import learnt_whole, write_table
from medusa_heads.training.data.prepare import load_corpora, prepare_data
from medusa_heads.training.data.prepared import table_fingerprint
from medusa_heads.training.data.split import distinct_documents, hold_out
from tests.conftest import TinyLlama


@pytest.fixture(scope="module")
def target(tiny_llama: TinyLlama) -> TargetModel:
    return TargetModel(tiny_llama(vocab_size=64))


def prepared(target: TargetModel, ids: list[list[int]], **settings: Any) -> tuple[Any, Any]:
    """The tokens of the rows that are learnt from, and of those held out."""
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
    given = DataArguments(**settings)
    data = prepare_data(target, *load_corpora(given, rows), None, given, num_heads=2, seed=0)
    return data.rows["input_ids"][:], data.held_out["input_ids"][:]


def test_copies_of_a_held_out_row_are_not_learnt(target: TargetModel) -> None:
    once = [[5, 6, 7, number] for number in range(40)]
    learnt, held = prepared(target, once * 3, eval_rows=10)
    assert len(held) == 30 and len(learnt) == 90
    assert {*map(tuple, learnt)}.isdisjoint(map(tuple, held))


def test_without_copies_the_draw_is_as_it_always_was(target: TargetModel) -> None:
    """Else the caches of hidden states would be of other rows, and runs could not be resumed."""
    ids = [[5, 6, 7, number] for number in range(40)]
    _, held = prepared(target, ids, eval_rows=5)
    assert [row[3] for row in held] == [4, 11, 23, 24, 27]
    documents = Dataset.from_dict({"input_ids": ids, "document": [n // 3 for n in range(40)]})
    assert [row[3] for row in hold_out(documents, 0.2, seed=1)[1]["input_ids"]] == [
        *(3, 4, 5, 21, 22, 23, 30, 31, 32)
    ]


@pytest.mark.parametrize("column", ["input_ids", "text"])
def test_documents_are_equal_where_all_their_rows_are(column: str) -> None:
    """Whatever their order in the table; a row that many share, such as a last line, makes none."""
    parts = [[1, 2], [3], [1, 2], [4], [1, 2], [3], [3], [1, 2], [1, 2], [1, 2, 3]]
    names = [7, 7, 5, 5, 3, 3, 2, 2, 1, 0]
    given: Any = parts if column == "input_ids" else [f"{part}" for part in parts]
    rows = Dataset.from_dict({column: given})
    found = distinct_documents(np.array(names), rows).tolist()
    assert found == [3, 3, 5, 5, 3, 3, 2, 2, 1, 0]
    order = [*range(0, 10, 2), *range(1, 10, 2)]
    moved = distinct_documents(np.array(names)[order], rows.select(order))
    assert moved.tolist() == [found[row] for row in order]
    alone = np.arange(4)
    assert distinct_documents(alone, rows.select([0, 1, 3, 9])) is alone


def test_equal_texts_are_held_out_together() -> None:
    rows = Dataset.from_dict({"text": [f"{number % 20}" for number in range(60)]})
    kept, held = hold_out(rows, 0.2, seed=0)
    assert len(held) == 12 and {*kept["text"]}.isdisjoint(held["text"])
    same = Dataset.from_dict({"text": ["a"] * 20})  # there is nothing else to be had
    assert [len(part) for part in hold_out(same, 0.2, seed=0)] == [16, 4]


@pytest.mark.parametrize("seed", range(8))
def test_most_of_the_text_is_not_held_out_as_one_document(seed: int) -> None:
    """Of a book beside a page the page is held out, and not all but a page."""
    book = [f"{number}" for number in range(30)]
    rows = Dataset.from_dict({"text": [*book, "a page"], "document": [7] * 30 + [3]})
    kept, held = hold_out(rows, None, seed)
    assert kept["text"][:] == book and held["text"][:] == ["a page"]
    alone = rows.select(range(30))
    assert [len(part) for part in hold_out(alone, 0.1, seed)] == [27, 3]


@pytest.mark.parametrize(
    ("mask", "label", "problem"),
    [
        ([1, 1, 1, 0], -100, None),
        ([0, 1, 1, 1], -100, "row 3: attention_mask begins with 0, and padding on the left"),
        ([1, 1, 1, 0], 9, "row 3: attention_mask is 0 where labels tell what to learn"),
    ],
)
def test_padding_is_no_text(
    target: TargetModel, mask: list[int], label: int, problem: str | None
) -> None:
    ids = [[5, 6, 7, 9], [5, 6, 7], [5, 6, 7, 9], [6, 7, 9, 5]] * 2
    labels = [[*row] for row in ids]
    labels[2][3] = label
    masks = [[1] * len(row) for row in ids]
    masks[2] = mask
    columns = {"input_ids": ids, "labels": labels, "attention_mask": masks}
    given = DataArguments(eval_rows=1)
    corpora = load_corpora(given, Dataset.from_dict(columns))
    if problem is None:
        prepare_data(target, *corpora, None, given, num_heads=2, seed=0)
        return
    with pytest.raises(ValueError, match=problem):
        prepare_data(target, *corpora, None, given, num_heads=2, seed=0)
    labels[0].pop()  # a broken row, of which others tell, hides no padding
    given = DataArguments(eval_rows=1, on_bad_row="skip")
    corpora = load_corpora(given, Dataset.from_dict(columns))
    with pytest.raises(ValueError, match=problem):
        prepare_data(target, *corpora, None, given, num_heads=2, seed=0)


@pytest.mark.parametrize("column", ["attention_mask", "labels"])
def test_a_column_of_numbers_tells_of_no_padding(target: TargetModel, column: str) -> None:
    """Labels of that kind are refused as such."""
    columns = {name: [[5, 6, 7, 9]] * 8 for name in ("input_ids", "labels", "attention_mask")}
    given = DataArguments(eval_rows=1)
    corpora = load_corpora(given, Dataset.from_dict(columns | {column: [1] * 8}))
    refused = pytest.raises(ValueError, match="'labels' is of type int")
    with refused if column == "labels" else nullcontext():
        prepare_data(target, *corpora, None, given, num_heads=2, seed=0)


def test_rows_that_are_learnt_whole_are_found_again_and_leave_no_file(tmp_path: Path) -> None:
    """Also where the file that they are read from is written anew by each run, as it is."""
    made = Dataset.from_dict(
        {"input_ids": [[5, 6, 7], [8, 9]], "labels": [[-100, 6, 7], [-100, 9]]}
    )
    found = set()
    for time in (1, 2):
        write_table(tmp_path / "rows.arrow", made.data.table)
        os.utime(tmp_path / "rows.arrow", (time, time))
        rows = learnt_whole(Dataset.from_file(str(tmp_path / "rows.arrow")))
        assert rows["labels"][:] == rows["input_ids"][:] == [[5, 6, 7], [8, 9]]
        assert [row["labels"] for row in learnt_whole(rows.select([1]))] == [[8, 9]]
        found.add(table_fingerprint(rows))
    assert len(found) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["rows.arrow"]
