"""Logits processors of every kind, in batches of 1, 2 and 4: each row as
generate() writes it, or a refusal by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

from medusa_heads.inference.engine.decoding import decode
from medusa_heads.inference.engine.stats import GenerationStats
from medusa_heads.target.target import TargetModel
from tests.conftest import DEVICE, TinyLlama
from tests.inference.planted import PlantedDrafter
from tests.inference.processor_kinds import VOCAB, EverySecondCall, Matcher, kinds, own
from tests.pairs import alternately

PROMPT = 12
NEW = 16
BATCHES = [1, 2, 4]
KINDS = kinds(DEVICE)


@pytest.fixture(scope="module")
def model(tiny_llama: TinyLlama) -> Any:
    made = tiny_llama(vocab_size=VOCAB)
    made.generation_config.pad_token_id = 0
    return made.to(DEVICE)


class Closed(LogitsProcessor):
    """Keeps its state where no copy reaches it."""

    def __init__(self) -> None:
        seen: list[int] = []
        self.count: Callable[[], int] = lambda: seen.append(0) or len(seen)  # type: ignore[func-returns-value]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, self.count() % 2 :: 2] -= 3.0
        return scores


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


@pytest.mark.parametrize(
    ("kind", "batch"),
    [
        *alternately(KINDS, (1, 4)),
        *(pytest.param(kind, 2, marks=pytest.mark.slow) for kind in KINDS),
    ],
)
def test_each_row_is_that_of_generate(model: Any, kind: str, batch: int) -> None:
    expected_BT, got_BT, stats = both(model, batch, KINDS[kind])
    assert torch.equal(got_BT, expected_BT)
    assert stats.tokens_per_step > 1.3


def test_allowed_tokens_go_by_the_prompt_of_several_texts(model: Any) -> None:
    def texts(**custom: Any) -> Tensor:
        made: Tensor = model.generate(
            **prompts(2),
            max_new_tokens=NEW,
            do_sample=True,
            num_return_sequences=2,
            prefix_allowed_tokens_fn=lambda prompt, ids_T: range(6 * prompt, 6 * prompt + 6),
            **custom,
        )
        return made[:, PROMPT:] // 6  # whose tokens they are

    expected = texts()
    got = texts(custom_generate=decoding(PlantedDrafter([[1] * NEW] * 4, VOCAB)))
    assert torch.equal(got, expected)


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


class Guided(LogitsProcessor):
    """Follows the gradient of what is wanted of the scores, and keeps what it has seen."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.kept += [input_ids, scores]
        with torch.enable_grad():
            at = scores.clone().requires_grad_()
            wanted = torch.linspace(-1.0, 1.0, VOCAB, device=at.device)
            ((at.softmax(-1) * wanted).sum(-1) ** 2).sum().backward()
        assert at.grad is not None
        return scores + 20.0 * at.grad


@pytest.mark.parametrize("batch", BATCHES)
def test_a_processor_may_take_gradients_as_in_generate(model: Any, batch: int) -> None:
    guided = Guided()
    expected_BT, got_BT, _ = both(model, batch, lambda batch: own(guided))
    assert torch.equal(got_BT, expected_BT)
    for kept in guided.kept:
        kept += 1  # no inference tensors, which only inference mode may write to
