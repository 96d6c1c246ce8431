"""Rows that training can use, counted, and rows that it cannot."""

from collections.abc import Callable

import pytest
from datasets import Dataset, Features, List, Value, concatenate_datasets

from medusa_heads.target.target import TargetModel
from medusa_heads.training.data.row_facts import check_rows


def one_row(ids: list[int], labels: list[int] | None = None) -> Dataset:
    kinds = Features({name: List(Value("int32")) for name in ("input_ids", "labels")})
    row = {"input_ids": ids, "labels": ids if labels is None else labels}
    return Dataset.from_list([row], features=kinds)


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
        (concatenate_datasets([one_row([1, 2]), one_row([])]), "row 1 of the .* set is empty"),
        (one_row([1, 2, 3], [-100] * 3), "no supervised token"),
        (one_row([1, 2, 3], [2, 3, -100]), "labels are not shifted here"),
        (one_row([1, 2, 3], [1, 2]), "3 input_ids but 2 labels"),
        (one_row([1, 2, 3, 4], [-100, 2, -100, 4]), "no 4 supervised tokens in a row"),
        (one_row([1, 2, 3, 4]), r"in a row behind the first token of a text .at most 3.: give"),
        (concatenate_datasets([one_row([1, 2, 3])] * 2), "no 4 supervised .*at most 2"),
    ],
)
def test_rows_that_training_cannot_use(rows: Dataset, message: str, target: TargetModel) -> None:
    with pytest.raises(ValueError, match=message):
        check_rows(rows, target, name="training set", heads_reached=3)


def test_the_first_token_of_a_row_is_before_what_heads_draft(target: TargetModel) -> None:
    rows = concatenate_datasets([one_row([1, 2, 3]), one_row([1, 2, 3, 4], [-100, 2, 3, 4])])
    facts = check_rows(rows, target, name="held-out set", heads_reached=2)
    assert facts.supervised_tokens == 6


def test_little_supervised_text_is_warned_of(
    target: TargetModel, make_rows: Callable[..., Dataset]
) -> None:
    few = [*make_rows(10, length=64, prompt=64), *make_rows(1, length=64, prompt=60)]
    facts = check_rows(Dataset.from_list(few), target, name="training set", heads_reached=1)
    assert (facts.doubt("training set") or "").startswith(
        "only 0.57 % of the tokens in the training set are supervised"
    )
    facts = check_rows(make_rows(3), target, name="training set", heads_reached=1)
    assert facts.doubt("training set") is None
