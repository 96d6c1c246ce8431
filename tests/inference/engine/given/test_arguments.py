"""What cannot be honoured is refused by name, and a text's mask and positions are its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from medusa_heads import MedusaModel
from tests.inference.conftest import INPUTS
from tests.inference.reference import reference

IDS = INPUTS["input_ids"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"use_cache": False}, "use_cache=False"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"cache_implementation": "paged"}, "cache_implementation='paged'"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"custom_generate": "user/repository"}, "leave custom_generate out"),
        ({"synced_gpus": True}, "sharded processes"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    medusa: MedusaModel, options: Any, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        medusa.generate(**INPUTS, max_new_tokens=4, **options)


def test_what_the_targets_own_settings_ask_for_is_told_to_be_theirs(
    medusa: MedusaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever gave no such option cannot leave it out."""
    own = "leave it out of the target's generation_config, or"
    monkeypatch.setattr(medusa.target.model.generation_config, "num_beams", 4)
    with pytest.raises(ValueError, match=f"num_beams > 1: {own}"):
        medusa.generate(**INPUTS, max_new_tokens=4)
    with pytest.raises(ValueError, match="output_attentions=True: leave it out, or"):
        medusa.generate(**INPUTS, max_new_tokens=4, output_attentions=True)
    medusa.generate(**INPUTS, max_new_tokens=4, num_beams=1)


@pytest.mark.parametrize("name", ["force_words_ids", "constraints"])
def test_words_that_must_come_are_refused(medusa: MedusaModel, name: str) -> None:
    options: dict[str, Any] = {name: [[5]]}
    with pytest.raises(ValueError, match=f"tree decoding does not support {name}"):
        medusa.generate(**INPUTS, max_new_tokens=4, **options)


def test_assistant_and_right_padding_are_refused(medusa: MedusaModel) -> None:
    with pytest.raises(ValueError, match="assistant_model"):
        medusa.generate(**INPUTS, assistant_model=medusa.target.model)
    ids = torch.arange(1, 9).view(2, 4)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    with pytest.raises(ValueError, match="padding_side='left'"):
        medusa.generate(ids, attention_mask=mask, max_new_tokens=4)


@pytest.mark.parametrize("padded", [0, 2])
@pytest.mark.parametrize("width", [10, 13, 17])
def test_a_mask_of_another_text_is_refused(medusa: MedusaModel, padded: int, width: int) -> None:
    """As where the text is cut and its old mask is kept, which wrote another text in silence."""
    mask = torch.ones(1, width, dtype=torch.long)
    mask[:, :padded] = 0
    sentence = rf"attention_mask must have the shape of input_ids, \[1, 12\], got \[1, {width}\]"
    with pytest.raises(ValueError, match=sentence):
        medusa.generate(IDS, attention_mask=mask, max_new_tokens=4)


def test_a_mask_of_other_rows_is_refused(medusa: MedusaModel) -> None:
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[:, 0] = 0
    with pytest.raises(ValueError, match=r"\[2, 12\], got \[3, 12\]"):
        medusa.generate(IDS.repeat(2, 1), attention_mask=mask, max_new_tokens=4)
    with pytest.raises(ValueError, match=r"\[2, 12\], got \[3, 12\]"):
        medusa.generate(IDS.repeat(2, 1), attention_mask=torch.ones(3, 12), max_new_tokens=4)


@pytest.mark.parametrize("padded", [0, 3])
def test_a_mask_of_one_row_is_that_of_all(medusa: MedusaModel, padded: int) -> None:
    mask = torch.ones(1, 12, dtype=torch.long)
    mask[:, :padded] = 0
    two, masks = torch.cat([IDS, IDS.flip(1)]), mask.repeat(2, 1)
    given: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    expected = reference(medusa.target.model, inputs=two, attention_mask=masks, **given)
    got = medusa.generate(two, attention_mask=mask, **given)
    assert torch.equal(torch.as_tensor(got), expected)


def test_sequences_of_one_prompt_have_its_mask_each(medusa: MedusaModel) -> None:
    mask = torch.ones(1, 12, dtype=torch.long)
    mask[:, :3] = 0
    given: dict[str, Any] = {"max_new_tokens": 4, "do_sample": True, "num_return_sequences": 3}
    got: Any = medusa.generate(IDS, attention_mask=mask, prefill_chunk_size=5, **given)
    assert got.shape == (3, 16)


@pytest.mark.parametrize("positions", [torch.arange(15)[None], torch.arange(12).repeat(3, 1)])
def test_positions_of_another_text_are_refused(medusa: MedusaModel, positions: Any) -> None:
    with pytest.raises(ValueError, match=r"position_ids must have the shape of input_ids, \[1, 12"):
        medusa.generate(**INPUTS, position_ids=positions, max_new_tokens=4)


@pytest.mark.parametrize("shape", [(0, 5), (1, 0)])
def test_no_row_and_no_token_at_all_are_refused(
    medusa: MedusaModel, shape: tuple[int, int]
) -> None:
    none = torch.zeros(shape, dtype=torch.long)
    with pytest.raises(ValueError, match=rf"a row for each text, .* got none: \{[*shape]}"):
        medusa.generate(none, max_new_tokens=4)


@pytest.mark.parametrize("token", [-1, 10**6])
def test_tokens_that_the_target_cannot_read_are_refused(medusa: MedusaModel, token: int) -> None:
    """As those of a tokenizer that was given more of them, and the target not."""
    readable = medusa.target.readable
    ids = torch.tensor([[5, 6, readable - 1, token]])
    sentence = f"the target has {readable} tokens, and the text has token ids from .*{token}"
    with pytest.raises(ValueError, match=sentence):
        medusa.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4)
    medusa.generate(ids[:, :3], attention_mask=torch.ones_like(ids[:, :3]), max_new_tokens=4)


def test_only_the_new_tokens_beside_a_cache_are_refused(medusa: MedusaModel) -> None:
    cache = DynamicCache(config=medusa.target.model.config)
    text: Any = medusa.generate(**INPUTS, max_new_tokens=15, past_key_values=cache)
    for mask in (torch.ones_like(text), torch.ones(1, 1)):
        with pytest.raises(ValueError, match="pass the whole text, not only what is new"):
            medusa.generate(
                text[:, -1:], attention_mask=mask, past_key_values=cache, max_new_tokens=5
            )
