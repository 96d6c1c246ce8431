"""What of a text lives on when it has ended: nothing of its caller's."""

from __future__ import annotations

import copy
import gc
from typing import Any
from weakref import ref

import pytest
import torch
from transformers import TextIteratorStreamer

from medusa_heads import DraftedModel, HeadsConfig, MedusaModel, TrainingFreeModel, new_heads
from medusa_heads.inference.drafters.base import Memory
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


@pytest.mark.parametrize("kind", ["draft", "eagle3", "medusa"])
def test_what_was_read_of_a_long_row_is_let_go(tiny_llama: TinyLlama, kind: Any) -> None:
    """Rows beside it go on, and what they join may never end."""
    model = tiny_llama(max_position_embeddings=2048)
    if kind == "draft":
        decoder: Any = DraftedModel(model, tiny_llama(num_layers=1), tree="chain:3")
    else:
        config = HeadsConfig(kind=kind, num_heads=3, prefix_attention=kind == "medusa")
        decoder = MedusaModel(model, new_heads(model, config), tree="dynamic:8")
    batch = decoder.running_batch(2)
    long, short = (torch.arange(8, 8 + n)[None] % 190 + 8 for n in (1500, 3))
    first = batch.add(long, max_new_tokens=4, min_new_tokens=4)
    batch.add(short, max_new_tokens=90, min_new_tokens=90)
    (state,) = (each.state for each in batch._batches.values())
    assert not batch.step()
    (memory,) = (each for each in state.memories.values() if isinstance(each, Memory))
    assert slots(memory) >= 1500
    while not first.done:
        assert not batch.step()
    assert not batch.step()
    assert slots(memory) < 1000


def test_a_row_takes_the_place_of_the_only_one(tiny_llama: TinyLlama) -> None:
    """Between two steps it joins and the other leaves: the draft model knows none that stays."""
    model = tiny_llama()
    batch = DraftedModel(model, tiny_llama(num_layers=1), tree="chain:3").running_batch(2)
    given: Any = {"max_new_tokens": 20, "min_new_tokens": 20}
    gone = batch.add(padded([0], 30)["input_ids"], **given)
    assert not batch.step()
    ids = padded([0], 7)["input_ids"]
    row = batch.add(ids, **given)
    batch.leave(gone)
    while not row.done:
        assert not batch.step()
    assert row.tokens == reference(model, input_ids=ids, **given)[0, 7:].tolist()


def slots(memory: Any) -> int:
    """For which a drafter keeps room of each row."""
    held = memory.held if hasattr(memory, "held") else memory.cache.row_layers[0].buffers()[0]
    return int(held.shape[-2])
