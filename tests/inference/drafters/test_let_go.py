"""What of a text lives on when it has ended: nothing of its caller's."""

from __future__ import annotations

import copy
import gc
from typing import Any
from weakref import ref

import pytest
import torch
from transformers import TextIteratorStreamer

from medusa_heads import HeadsConfig, MedusaModel, TrainingFreeModel, new_heads
from tests.conftest import TinyLlama
from tests.inference.padded import padded
from tests.inference.reference import reference
from tests.pairs import with_slow

INPUTS = padded([0], 12)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}


class Streamer:
    def put(self, _: torch.Tensor) -> None: ...

    def end(self) -> None: ...


@pytest.mark.parametrize(
    "words", with_slow(["auto", "heads"], ["suffix", "recycling", "lookahead+suffix"])
)
def test_a_text_lives_no_longer_than_its_call(tiny_llama: TinyLlama, words: str) -> None:
    """Neither its streamer, nor the scores of all its tokens."""
    model = tiny_llama()
    if words == "heads":
        heads = new_heads(model, HeadsConfig(num_heads=3))
        decoder: Any = MedusaModel(model, heads, compile=False)
    else:
        decoder = TrainingFreeModel(model, words, compile=False)
    streamer, before = Streamer(), scores()
    shown: dict[str, Any] = {"output_scores": True, "return_dict_in_generate": True}
    made = decoder.generate(**INPUTS, **GREEDY, **shown, streamer=streamer)
    assert len(made.scores) == 12
    gone = ref(streamer)
    del made, streamer
    assert scores() == before and gone() is None


def scores() -> int:
    """How many there are of a token."""
    gc.collect()
    return sum(
        isinstance(each, torch.Tensor) and each.shape == (1, 199) for each in gc.get_objects()
    )


def test_a_decoder_is_copied_after_a_streamed_text(tiny_llama: TinyLlama) -> None:
    """Streamers have locks, which cannot be copied."""
    model = tiny_llama()
    decoder: Any = TrainingFreeModel(model, compile=False)
    nothing: Any = SaysNothing()
    streamer = TextIteratorStreamer(nothing)
    decoder.generate(**INPUTS, **GREEDY, streamer=streamer)
    made = copy.deepcopy(decoder).generate(**INPUTS, **GREEDY)
    assert torch.equal(made, reference(model, **INPUTS, **GREEDY))


class SaysNothing:
    def decode(self, *_: Any, **__: Any) -> str:
        return ""
