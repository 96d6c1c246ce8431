"""Stopping criteria in batches of 1, 2 and 4: each row ends as in generate(), or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from tests.inference.engine import test_processors
from tests.inference.engine.test_processors import BATCHES, NEW, PROMPT, both, prompts

model = test_processors.model  # the same fixture


class StopsAt(StoppingCriteria):
    """Ends each row at a token of its own, or once it was asked often enough."""

    def __init__(self, stops: list[int], patience: int) -> None:
        self.stops, self.patience = stops, patience
        self.asked = [0] * len(stops)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.asked = [asked + 1 for asked in self.asked]
        last = input_ids[:, -1].tolist()
        return torch.tensor(
            [
                token == stop or asked > self.patience + row
                for row, (token, stop, asked) in enumerate(
                    zip(last, self.stops, self.asked, strict=True)
                )
            ],
            device=input_ids.device,
        )


class StopsTogether(StoppingCriteria):
    """One answer for all rows, by the first one's text."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        return bool(input_ids[0, -1] == 5)


def stopping(make: Callable[[int], Any]) -> Callable[[int], dict[str, Any]]:
    # With an end token generate() pads rows that have ended; without one it writes on.
    return lambda batch: {
        "stopping_criteria": StoppingCriteriaList([make(batch)]),
        "eos_token_id": 0,
    }


@pytest.mark.parametrize("batch", BATCHES)
def test_criteria_are_asked_of_each_row_as_in_generate(model: Any, batch: int) -> None:
    # A token of each row's own text, so that rows end apart.
    plain_BT = model.generate(**prompts(batch), max_new_tokens=NEW, do_sample=False)[:, PROMPT:]
    stops = [int(tokens_T[3 * row + 2]) for row, tokens_T in enumerate(plain_BT)]
    for patience in (6, NEW):
        make = stopping(
            partial(lambda batch, patience: StopsAt(stops, patience), patience=patience)
        )
        expected_BT, got_BT, _ = both(model, batch, make)
        assert torch.equal(got_BT, expected_BT)
        assert got_BT.shape[1] < PROMPT + NEW


def test_one_answer_for_all_rows_is_refused_by_name(model: Any) -> None:
    make = stopping(lambda batch: StopsTogether())
    expected_BT, got_BT, _ = both(model, 1, make)
    assert torch.equal(got_BT, expected_BT)
    with pytest.raises(ValueError, match=r"StopsTogether .* one answer a row"):
        both(model, 2, make)
