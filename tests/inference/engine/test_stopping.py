"""Stopping criteria in batches of 1, 2 and 4: each row ends as in generate(), or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

from medusa_heads import HeadsConfig, MedusaHeads, MedusaModel
from medusa_heads.inference.models.training_free import TrainingFreeModel
from tests.conftest import DEVICE, TinyLlama
from tests.inference.engine import test_processors
from tests.inference.engine.test_processors import (
    BATCHES,
    NEW,
    PROMPT,
    VOCAB,
    both,
    decoding,
    prompts,
)
from tests.inference.joining import LONG, of_one_kind
from tests.inference.planted import PlantedDrafter

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


@pytest.mark.parametrize("longest", [3, 13, 40])
def test_a_length_of_the_callers_own_goes_before_what_is_announced(
    model: Any, longest: int
) -> None:
    """As in generate(), which takes a given criterion in place of its own: a text may come to be
    longer than `max_new_tokens` says."""
    for batch in BATCHES:
        limit = stopping(lambda batch: MaxLengthCriteria(PROMPT + longest))
        expected_BT, got_BT, _ = both(model, batch, limit)
        assert torch.equal(got_BT, expected_BT)
        assert got_BT.shape[1] == PROMPT + longest


def test_such_a_text_has_its_room_in_a_cache_of_fixed_size(
    model: Any, untraced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_heads.target.graphs.compiled._CAPACITY_STEP", 64)
    heads = MedusaHeads.from_target(model, HeadsConfig(num_heads=2))
    medusa: Any = MedusaModel(model, heads, tree="chain", compile=True)
    options: dict[str, Any] = {**prompts(1), "max_new_tokens": 4, "do_sample": False}
    options["stopping_criteria"] = StoppingCriteriaList([MaxLengthCriteria(80)])
    options["eos_token_id"] = None
    assert torch.equal(medusa.generate(**options), model.generate(**options))


def test_one_answer_for_all_rows_is_refused_by_name(model: Any) -> None:
    make = stopping(lambda batch: StopsTogether())
    expected_BT, got_BT, _ = both(model, 1, make)
    assert torch.equal(got_BT, expected_BT)
    with pytest.raises(ValueError, match=r"StopsTogether .* one answer a row"):
        both(model, 2, make)


@pytest.mark.parametrize("asked", [("scores",), ("logits",), ("scores", "logits"), ()])
def test_criteria_are_shown_what_generate_shows_them(model: Any, asked: tuple[str, ...]) -> None:
    """The scores, where they are returned; and the last token too."""

    class Looks(StoppingCriteria):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            self.seen.append(None if scores is None else torch.stack(scores))
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    options: dict[str, Any] = {**prompts(1), "max_new_tokens": NEW, "do_sample": False}
    wanted = dict.fromkeys((f"output_{each}" for each in asked), True)
    options |= {"return_dict_in_generate": True, **wanted}
    expected, got = Looks(), Looks()
    text_1T = model.generate(**options, stopping_criteria=StoppingCriteriaList([expected]))[0]
    drafted = decoding(PlantedDrafter(text_1T[:, PROMPT:].tolist(), VOCAB))
    criteria = StoppingCriteriaList([got])
    model.generate(**options, stopping_criteria=criteria, custom_generate=drafted)
    assert len(got.seen) == len(expected.seen) == NEW
    for mine, theirs in zip(got.seen, expected.seen, strict=True):
        if "scores" in asked:
            torch.testing.assert_close(mine, theirs)
        else:
            assert mine is theirs is None


class OftenEnough(StoppingCriteria):
    """Ends a text with a token that is in it for the fourth time, which a gradient counts."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        with torch.enable_grad():
            at_BTV = torch.nn.functional.one_hot(input_ids, VOCAB).double().requires_grad_()
            (at_BTV.sum(dim=1) ** 2).sum().backward()
        assert at_BTV.grad is not None
        return at_BTV.grad[:, -1].gather(1, input_ids[:, -1:])[:, 0] == 2 * 4


@pytest.mark.parametrize("batch", [1, 2])
def test_a_criterion_may_take_gradients_as_in_generate(model: Any, batch: int) -> None:
    expected_BT, got_BT, _ = both(model, batch, stopping(lambda batch: OftenEnough()))
    assert torch.equal(got_BT, expected_BT)
    assert got_BT.shape[1] < PROMPT + NEW


class SeventhCall(StoppingCriteria):
    """Ends a text when it is asked for the seventh time."""

    asked = 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.asked += 1
        return torch.full((len(input_ids),), self.asked >= 7, device=input_ids.device)


def test_a_criterion_knows_its_row_wherever_it_stands(tiny_llama: TinyLlama) -> None:
    model: Any = tiny_llama(eos_token_id=7, pad_token_id=0).to(DEVICE)
    batch = TrainingFreeModel(model, "suffix").running_batch(3)
    rows = [
        batch.add(guest.inputs(), stopping_criteria=StoppingCriteriaList([SeventhCall()]), **LONG)
        for guest in of_one_kind(3)
    ]
    while batch.rows:
        assert not batch.step()
    assert [len(row.tokens) for row in rows] == [7, 7, 7]
