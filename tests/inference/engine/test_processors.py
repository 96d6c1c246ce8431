"""Logits processors and stopping criteria of every kind, in batches of 1, 2 and 4: each row as
generate() writes it, or a refusal by name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

from medusa_heads.inference.engine.decoding import decode
from medusa_heads.inference.engine.stats import GenerationStats
from medusa_heads.target.target import TargetModel
from tests.conftest import DEVICE, TinyLlama
from tests.inference.planted import PlantedDrafter

VOCAB = 24
PROMPT = 12
NEW = 24
BATCHES = [1, 2, 4]


@pytest.fixture(scope="module")
def model(tiny_llama: TinyLlama) -> Any:
    made = tiny_llama(vocab_size=VOCAB)
    made.generation_config.pad_token_id = 0
    return made.to(DEVICE)


class Matcher(LogitsProcessor):
    """As grammar matchers do: a state for each row, fed with each new token."""

    def __init__(self) -> None:
        self.states: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.states:
            self.states = [0] * len(input_ids)
        else:
            for row, token in enumerate(input_ids[:, -1].tolist()):
                self.states[row] = (7 * self.states[row] + token + row) % 11
        scores = scores.clone()
        for row, state in enumerate(self.states):
            scores[row, state::11] -= 5.0
        return scores


class EverySecondCall(LogitsProcessor):
    """Counts its calls, and writes into the scores it is given."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        scores[:, self.calls % 2 :: 2] -= 3.0
        return scores


class OfItsRow(LogitsProcessor):
    """No state, but a setting for each row."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        shifts = torch.arange(len(scores), device=scores.device)[:, None]
        return scores + ((torch.arange(VOCAB, device=scores.device) + shifts) % 4)


class Closed(LogitsProcessor):
    """Keeps its state where no copy reaches it."""

    def __init__(self) -> None:
        seen: list[int] = []
        self.count: Callable[[], int] = lambda: seen.append(0) or len(seen)  # type: ignore[func-returns-value]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, self.count() % 2 :: 2] -= 3.0
        return scores


def remembering() -> Callable[[int, Tensor], list[int]]:
    """Of tokens that a row may go on with, by what it has been asked before."""
    asked: dict[int, int] = {}

    def allowed(row: int, ids_T: Tensor) -> list[int]:
        asked[row] = asked.get(row, row) + int(ids_T[-1])
        return [token for token in range(VOCAB) if (token + asked[row]) % 3]

    return allowed


def negative_prompts(batch: int) -> Tensor:
    return torch.randint(VOCAB, (batch, 5), generator=torch.Generator().manual_seed(2)).to(DEVICE)


def own(processor: Any) -> dict[str, Any]:
    return {"logits_processor": LogitsProcessorList([processor])}


def lengths(batch: int) -> Any:
    return torch.arange(3, 3 + batch, device=DEVICE)


def encoder_ids(batch: int) -> Any:
    return torch.arange(4 * batch, device=DEVICE).view(batch, 4)


# Made anew for every text: what keeps a state has none at its beginning.
KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "none": lambda batch: {},
    "repetition penalty": lambda batch: {"repetition_penalty": 1.3},
    "penalty with a prompt length a row": lambda batch: own(
        RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=lengths(batch))
    ),
    "penalty of a text a row": lambda batch: own(
        EncoderRepetitionPenaltyLogitsProcessor(2.0, encoder_ids(batch))
    ),
    "n-grams of a text a row": lambda batch: own(
        EncoderNoRepeatNGramLogitsProcessor(2, encoder_ids(batch))
    ),
    "no n-gram twice": lambda batch: {"no_repeat_ngram_size": 2},
    "bias": lambda batch: {"sequence_bias": [[[6], 2.0], [[9, 10], -3.0]]},
    "guidance": lambda batch: {"guidance_scale": 1.5},
    "guidance against a prompt a row": lambda batch: {
        "guidance_scale": 1.5,
        "negative_prompt_ids": negative_prompts(batch),
    },
    "allowed tokens": lambda batch: {
        "prefix_allowed_tokens_fn": lambda row, ids_T: range(4 * row, 4 * row + 8)
    },
    "allowed tokens, remembered": lambda batch: {"prefix_allowed_tokens_fn": remembering()},
    "watermark": lambda batch: {"watermarking_config": WatermarkingConfig(bias=2.5)},
    "SynthID": lambda batch: {
        "watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3, 4, 5], ngram_len=3)
    },
    "matcher": lambda batch: own(Matcher()),
    "calls counted, in place": lambda batch: own(EverySecondCall()),
    "by place in the batch": lambda batch: own(OfItsRow()),
    "several": lambda batch: {
        **own(Matcher()),
        "guidance_scale": 1.2,
        "repetition_penalty": 1.2,
        "prefix_allowed_tokens_fn": remembering(),
    },
}


def prompts(batch: int) -> dict[str, Tensor]:
    ids_BT = torch.randint(1, VOCAB, (batch, PROMPT), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids_BT.to(DEVICE), "attention_mask": torch.ones_like(ids_BT).to(DEVICE)}


def both(
    model: Any, batch: int, make: Callable[[int], dict[str, Any]]
) -> tuple[Tensor, Tensor, GenerationStats]:
    """What generate() writes, and what decoding writes with that planted in its drafts."""
    inputs: dict[str, Any] = {**prompts(batch), "max_new_tokens": NEW, "do_sample": False}
    expected_BT = model.generate(**inputs, **make(batch))
    drafter = PlantedDrafter(expected_BT[:, PROMPT:].tolist(), VOCAB)
    stats = GenerationStats()
    custom = decoding(drafter, stats)
    return expected_BT, model.generate(**inputs, custom_generate=custom, **make(batch)), stats


def decoding(drafter: PlantedDrafter, stats: GenerationStats | None = None) -> Callable[..., Any]:
    """As generate() takes a decoding method."""

    def custom(model: Any, input_ids: Tensor, synced_gpus: bool = False, **kwargs: Any) -> Any:
        return decode(TargetModel(model), drafter, input_ids, stats=stats, **kwargs)

    return custom


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_each_row_is_that_of_generate(model: Any, kind: str, batch: int) -> None:
    expected_BT, got_BT, stats = both(model, batch, KINDS[kind])
    assert torch.equal(got_BT, expected_BT)
    assert stats.tokens_per_step > 1.3


def test_logits_are_handed_out_as_they_were_before_processors_wrote_over_them(model: Any) -> None:
    def texts(**custom: Any) -> Any:
        return model.generate(
            **prompts(1),
            max_new_tokens=NEW,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            output_scores=True,
            **own(EverySecondCall()),
            **custom,
        )

    expected = texts()
    drafter = PlantedDrafter(expected.sequences[:, PROMPT:].tolist(), VOCAB)
    got = texts(custom_generate=decoding(drafter))
    torch.testing.assert_close(got.scores, expected.scores)
    # generate() itself hands out what the processor wrote.
    with torch.no_grad():
        plain_TV = model(got.sequences[:, :-1]).logits[0, PROMPT - 1 :]
    torch.testing.assert_close(torch.cat(got.logits), plain_TV)


def test_a_users_processor_stays_as_it_was(model: Any) -> None:
    """The rows of a batch advance copies of it."""
    matcher = Matcher()
    inputs: dict[str, Any] = prompts(2)
    custom = decoding(PlantedDrafter([[1] * NEW] * 2, VOCAB))
    model.generate(**inputs, max_new_tokens=4, custom_generate=custom, **own(matcher))
    assert matcher.states == []


def test_a_state_that_cannot_be_copied_is_refused_by_name(model: Any) -> None:
    expected_BT, got_BT, _ = both(model, 1, lambda batch: own(Closed()))
    assert torch.equal(got_BT, expected_BT)
    with pytest.raises(ValueError, match=r"Closed .* one row at a time"):
        both(model, 2, lambda batch: own(Closed()))


class ForEachRow(Closed):
    """The same, and says what stands for it in a row."""

    def of_row(self, row: int) -> ForEachRow:
        return ForEachRow()


@pytest.mark.parametrize("batch", BATCHES)
def test_an_object_may_say_what_stands_for_it_in_a_row(model: Any, batch: int) -> None:
    expected_BT, got_BT, _ = both(model, batch, lambda batch: own(ForEachRow()))
    assert torch.equal(got_BT, expected_BT)


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
