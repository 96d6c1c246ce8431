"""Which tokens heads draft: by held-out text, and all where that tells of no fewer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from datasets import Dataset, Features, IterableDataset, List, Value

from medusa_heads.config import IGNORED, HeadsConfig
from medusa_heads.training.data.draft_vocabulary import LEAST, choose_vocabulary
from medusa_heads.training.data.prepare import TrainingData
from medusa_heads.training.data.row_facts import RowFacts

V = 20_000
KINDS = Features({name: List(Value("int32")) for name in ("input_ids", "labels")})


def rows(labels: list[int]) -> Dataset:
    """One row, behind a prompt of a token that is not learnt."""
    row = {"input_ids": [V - 1] * 9000 + labels, "labels": [IGNORED] * 9000 + labels}
    return Dataset.from_list([row], features=KINDS)


def text(learnt: list[int], held_out: list[int], stream: Any = None) -> TrainingData:
    known, held = rows(learnt), rows(held_out)
    facts = RowFacts(1, len(learnt), len(learnt), "")
    return TrainingData(known, held, known, facts, facts, [], one_pass=stream)


def falling(count: int) -> list[int]:
    """Each of the first tokens, the lower the more often."""
    return [token for times in (1, 2, 4) for token in range(count // times)]


def test_as_few_as_held_out_text_is_nearly_made_of() -> None:
    """4,950 tokens are 99 % of 5,000; the next multiple of 128 are taken."""
    chosen = choose_vocabulary(text(falling(7000), list(range(5000))), V, HeadsConfig(), "auto")
    assert chosen.tokens_C is not None and chosen.tokens_C.tolist() == list(range(4992))
    assert chosen.covered == pytest.approx(4992 / 5000)
    assert chosen.record() == {
        "tokens": 4992,
        "of": V,
        "held_out_share": chosen.covered,
        "why_all": None,
    }
    assert "draft 4,992 of the target's 20,000 tokens" in (chosen.sentence() or "")
    assert "99.84 % of the held-out text" in (chosen.sentence() or "")


def test_never_fewer_than_are_cheap() -> None:
    chosen = choose_vocabulary(text([7, 9, 7], [7] * 2500), V, HeadsConfig(), "auto")
    assert chosen.size == LEAST and chosen.covered == 1
    assert chosen.tokens_C is not None and {7, 9} <= set(chosen.tokens_C.tolist())


@pytest.mark.parametrize(
    ("learnt", "held_out", "why"),
    [
        (falling(7000), list(range(1999)), "held-out text has 1,999 tokens that are learnt"),
        (
            falling(5000),
            [*range(4940), *range(9000, 9060)],
            "holds 5,000 of them, which make up 98.80 % of the held-out text",
        ),
        # Of the training text they would be all.
        (falling(12000), list(range(11000)), "takes 10,890, and more than half"),
    ],
    ids=["little held out", "tokens never seen", "no saving"],
)
def test_text_that_tells_of_no_fewer_keeps_all(
    learnt: list[int], held_out: list[int], why: str
) -> None:
    chosen = choose_vocabulary(text(learnt, held_out), V, HeadsConfig(), "auto")
    assert chosen.tokens_C is None and chosen.size is None and why in (chosen.why or "")
    assert (chosen.sentence() or "").startswith("heads draft all of the target's 20,000 tokens")
    assert chosen.record()["why_all"] == chosen.why and chosen.record()["tokens"] == V


OWN = {"vocab_matrix": "own"}


@pytest.mark.parametrize(
    ("config", "whole_matrix", "cut"),
    [
        ({}, False, True),
        ({}, True, False),
        (OWN, False, False),
        (OWN | {"prefix_attention": True}, False, True),
        (OWN | {"kind": "eagle3"}, False, True),
        (OWN | {"kind": "block", "features": [1]}, False, True),
        ({"kind": "hydra"}, False, True),
    ],
)
def test_heads_that_other_engines_hold_only_whole_stay_whole(
    config: Any, whole_matrix: bool, cut: bool
) -> None:
    data, shape = text(falling(7000), list(range(5000))), HeadsConfig(**config)
    chosen = choose_vocabulary(data, V, shape, "auto", whole_matrix=whole_matrix)
    assert (chosen.size is not None) == cut == (chosen.why is None)


@pytest.mark.parametrize(("size", "asked"), [(V, "all"), (2 * LEAST - 1, "auto")])
def test_nothing_is_said_where_nothing_is_chosen(size: int, asked: Any) -> None:
    chosen = choose_vocabulary(text([1] * 9, [1] * 2500), size, HeadsConfig(), asked)
    assert chosen.size is None and chosen.sentence() is None


def test_a_number_is_taken_and_its_share_told() -> None:
    data = text([3, 3, 5, 5, 5, 8], [3, 5, 8, 9])
    chosen = choose_vocabulary(data, V, HeadsConfig(draft_vocab_size=2), "all")
    assert chosen.tokens_C is not None and chosen.tokens_C.tolist() == [3, 5]
    assert chosen.covered == 0.5 and "50.00 %" in (chosen.sentence() or "")


def test_what_was_chosen_before_stays() -> None:
    data = text([3, 3, 5, 5, 5, 8], [3, 5, 8, 9])
    before = choose_vocabulary(data, V, HeadsConfig(draft_vocab_size=2), "auto")
    other = text([8, 9], [9])
    again = choose_vocabulary(other, V, HeadsConfig(), "auto", known_C=before.tokens_C)
    assert again.tokens_C is before.tokens_C and again.covered == 0


def test_a_stream_is_counted_from_all_over_its_files() -> None:
    """The first rows alone hold none of the other file's tokens."""

    def read(files: list[int]) -> Iterator[dict[str, list[int]]]:
        for file in files:
            labels = list(range(3000 * file, 3000 * (file + 1)))
            yield {"input_ids": labels, "labels": labels}

    told: Any = {"features": KINDS, "gen_kwargs": {"files": [0, 1]}}
    stream = IterableDataset.from_generator(read, **told)
    data = text([1], list(range(6000)), stream)
    chosen = choose_vocabulary(data, V, HeadsConfig(), "auto")
    assert chosen.size == 6016 and chosen.covered == 1
