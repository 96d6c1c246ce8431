"""Logits processors of every kind, made anew for every text.

Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

VOCAB = 24


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


def remembering() -> Callable[[int, Tensor], list[int]]:
    """Of tokens that a row may go on with, by what it has been asked before."""
    asked: dict[int, int] = {}

    def allowed(row: int, ids_T: Tensor) -> list[int]:
        asked[row] = asked.get(row, row) + int(ids_T[-1])
        return [token for token in range(VOCAB) if (token + asked[row]) % 3]

    return allowed


def own(processor: Any) -> dict[str, Any]:
    return {"logits_processor": LogitsProcessorList([processor])}


def kinds(device: str = "cpu") -> dict[str, Callable[[int], dict[str, Any]]]:
    """Options for generate(), by name: made for a batch of so many rows, and for one text alone,
    as what keeps a state has none at its beginning."""

    def negative_prompts(batch: int) -> Tensor:
        ids_BT = torch.randint(VOCAB, (batch, 5), generator=torch.Generator().manual_seed(2))
        return ids_BT.to(device)

    def lengths(batch: int) -> Any:
        return torch.arange(3, 3 + batch, device=device)

    def encoder_ids(batch: int) -> Any:
        return torch.arange(4 * batch, device=device).view(batch, 4)

    later = {}
    with suppress(ValueError):  # before transformers 5.23 rows share one prompt length
        RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=lengths(1))
        later["penalty with a prompt length a row"] = lambda batch: own(
            RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=lengths(batch))
        )
    return {
        "none": lambda batch: {},
        "repetition penalty": lambda batch: {"repetition_penalty": 1.3},
        **later,
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
