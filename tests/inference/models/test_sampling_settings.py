"""Same seed, same tokens as generate(), in fifty random combinations of its options."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from medusa_heads import HeadsConfig, MedusaHeads, MedusaModel
from tests.conftest import TinyLlama

CHOICES: dict[str, list[Any]] = {
    "temperature": [0.3, 0.7, 1.0, 1.7],
    "top_k": [0, 3, 20],
    "top_p": [0.6, 0.95],
    "min_p": [0.05, 0.2],
    "typical_p": [0.5, 0.9],
    "epsilon_cutoff": [0.01],
    "eta_cutoff": [0.02],
    "repetition_penalty": [0.8, 1.3],
    "no_repeat_ngram_size": [2, 3],
    "bad_words_ids": [[[5], [7, 8]]],
    "suppress_tokens": [[2, 3]],
    "begin_suppress_tokens": [[4]],
    "sequence_bias": [[[[6], 2.0], [[9, 10], -3.0]]],
    "min_new_tokens": [5],
    "eos_token_id": [[11], [11, 12]],
    "forced_eos_token_id": [13],
    "exponential_decay_length_penalty": [(10, 1.2)],
    "renormalize_logits": [True],
}


def combination(seed: int) -> dict[str, Any]:
    """Between one and five options; a decay of lengths needs an end token."""
    chooser = random.Random(seed)
    names = chooser.sample(sorted(CHOICES), chooser.randint(1, 5))
    options = {name: chooser.choice(CHOICES[name]) for name in names}
    if "exponential_decay_length_penalty" in options or "min_new_tokens" in options:
        options.setdefault("eos_token_id", [11])
    return options


@pytest.fixture(scope="module")
def medusa(tiny_llama: TinyLlama) -> MedusaModel:
    model = tiny_llama(vocab_size=24)
    model.generation_config.pad_token_id = 0
    heads = MedusaHeads.from_target(model, HeadsConfig(num_heads=3))
    return MedusaModel(model, heads, tree="cartesian:3,2,2", rng="transformers")


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, id=f"{seed}-{'+'.join(sorted(combination(seed)))}", marks=marks)
        for seed in range(50)
        for marks in [[] if seed < 6 else [pytest.mark.slow]]
    ],
)
def test_same_seed_same_tokens(medusa: MedusaModel, seed: int) -> None:
    options = combination(seed) | {"do_sample": True, "max_new_tokens": 24}
    ids = torch.randint(24, (1, 9), generator=torch.Generator().manual_seed(seed))
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    model: Any = medusa.target.model
    torch.manual_seed(seed)
    expected = model.generate(**inputs, **options)
    torch.manual_seed(seed)
    got: Any = medusa.generate(**inputs, **options)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("options", [{"top_k": 5}, {"repetition_penalty": 1.3}], ids=str)
def test_rows_in_step_draw_as_the_batch_of_generate(
    medusa: MedusaModel, options: dict[str, Any]
) -> None:
    options = options | {"do_sample": True, "temperature": 0.7, "max_new_tokens": 12}
    ids = torch.randint(24, (3, 9), generator=torch.Generator().manual_seed(0))
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    target: Any = medusa.target
    torch.manual_seed(0)
    expected = target.model.generate(**inputs, **options)
    torch.manual_seed(0)
    undrafted = MedusaModel(target, medusa.heads, tree="none", rng="transformers")
    got: Any = undrafted.generate(**inputs, **options)
    assert torch.equal(got, expected)
    torch.manual_seed(1)
    other: Any = medusa.generate(**inputs, **options)
    assert not torch.equal(other, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        {"prefix_allowed_tokens_fn": lambda row, ids: range(8 * row, 8 * row + 8)},
    ],
    ids=["of a row's own text", "of which row it is"],
)
def test_processors_see_every_row_of_a_batch_as_generate_shows_it(
    medusa: MedusaModel, options: dict[str, Any]
) -> None:
    options = options | {"do_sample": False, "max_new_tokens": 24}
    ids = torch.randint(24, (3, 9), generator=torch.Generator().manual_seed(0))
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    model: Any = medusa.target.model
    got: Any = medusa.generate(**inputs, **options)
    assert torch.equal(got, model.generate(**inputs, **options))


def test_options_were_really_combined() -> None:
    seen = {name for seed in range(50) for name in combination(seed)}
    assert seen == set(CHOICES)
