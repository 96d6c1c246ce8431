"""Caches of the caller's own: read on from, filled at the end, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, QuantizedCache, StaticCache

from medusa_heads import HeadsConfig, MedusaHeads, MedusaModel
from medusa_heads.target.target import TargetModel
from tests.conftest import TinyLlama
from tests.inference.conftest import INPUTS, plain
from tests.inference.recurrent import prompt, short_target, tiny_target, written
from tests.pairs import alternately


def whole_text(ids_1T: Tensor) -> dict[str, Any]:
    return {"input_ids": ids_1T, "attention_mask": torch.ones_like(ids_1T), "do_sample": False}


@pytest.mark.parametrize(
    ("with_config", "through_the_door"), alternately((True, False), (True, False))
)
def test_it_is_filled_as_transformers_fills_it(
    medusa: MedusaModel, with_config: bool, through_the_door: bool
) -> None:
    target: Any = medusa.target.model
    config = target.config if with_config else None
    mine: Any = DynamicCache(config=config)
    theirs: Any = DynamicCache(config=config)
    text_1T = INPUTS["input_ids"]
    for new in (15, 9):  # two turns
        given = {**whole_text(text_1T), "max_new_tokens": new}
        expected_1T = target.generate(**given, past_key_values=theirs)
        if through_the_door:
            own = {"custom_generate": medusa.decode}
            text_1T = target.generate(**given, past_key_values=mine, **own)
        else:
            text_1T = torch.as_tensor(medusa.generate(**given, past_key_values=mine))
        assert torch.equal(text_1T, expected_1T)
        assert mine.get_seq_length() == theirs.get_seq_length() == text_1T.shape[1] - 1
    for layer, other in zip(mine.layers, theirs.layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys)
        torch.testing.assert_close(layer.values, other.values)
    # The target's own text goes on from it.
    given = {**whole_text(text_1T), "max_new_tokens": 9}
    got_1T = target.generate(**given, past_key_values=mine)
    assert torch.equal(got_1T, target.generate(**given, past_key_values=theirs))


def test_a_padded_text_fills_it_too(medusa: MedusaModel) -> None:
    target: Any = medusa.target.model
    text_1T = INPUTS["input_ids"].clone()
    mask_1T = torch.ones_like(text_1T)
    mask_1T[:, :3] = 0
    caches: list[Any] = [DynamicCache(config=target.config) for _ in range(2)]
    given: dict[str, Any] = {"attention_mask": mask_1T, "do_sample": False, "max_new_tokens": 9}
    for model, cache in zip((medusa, target), caches, strict=True):
        model.generate(text_1T, past_key_values=cache, **given)
    mine, theirs = (cache.layers[0].keys for cache in caches)
    torch.testing.assert_close(mine[:, :, 3:], theirs[:, :, 3:])


def test_windows_keep_what_transformers_keeps() -> None:
    target, inputs = tiny_target("mistral"), prompt()
    medusa = MedusaModel(target, MedusaHeads.from_target(target, HeadsConfig(num_heads=2)), tree=4)
    caches: list[Any] = [DynamicCache(config=target.model.config) for _ in range(2)]
    mine, theirs = caches
    expected = written(target.model, inputs, past_key_values=theirs)
    assert torch.equal(written(medusa, inputs, past_key_values=mine), expected)
    assert mine.get_seq_length() == theirs.get_seq_length()
    for layer, other in zip(mine.layers, theirs.layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [None, "lfm2"])
def test_one_that_was_returned_goes_on_with_a_compiled_target(
    kind: str | None, tiny_llama: TinyLlama
) -> None:
    """Which reads on in a cache of fixed size, and fills the caller's."""
    target = TargetModel(tiny_llama(vocab_size=24)) if kind is None else short_target(kind)
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
    options: dict[str, Any] = {"tree": "chain"}
    medusa = MedusaModel(target, heads, **options)
    compiled = MedusaModel(target, heads, compile=True, compile_backend="eager", **options)
    first: Any = medusa.generate(
        **{**INPUTS, "do_sample": False, "max_new_tokens": 9}, return_dict_in_generate=True
    )
    cache = first.past_key_values
    text_1T = first.sequences
    for decoder in (compiled, medusa, compiled):
        before = cache.get_seq_length()
        given = {**whole_text(text_1T), "max_new_tokens": 7}
        expected_1T = torch.as_tensor(decoder.generate(**given))
        text_1T = torch.as_tensor(decoder.generate(**given, past_key_values=cache))
        assert torch.equal(text_1T, expected_1T)
        # States may stand in front of accepted tokens, which the next text reads again.
        assert before < cache.get_seq_length() < text_1T.shape[1]


def offloaded(target: Any) -> DynamicCache:
    cache = DynamicCache(config=target.config)
    cache.offloading = True  # to be told so, it needs a device to come back from
    return cache


def caches_of(target: Any) -> dict[str, Any]:
    return {
        "StaticCache": lambda: StaticCache(config=target.config, max_cache_len=64),
        "DynamicCache that is offloaded": lambda: offloaded(target),
        "QuantizedCache": lambda: QuantizedCache.__new__(QuantizedCache),
    }


@pytest.mark.parametrize(
    "kind", ["StaticCache", "DynamicCache that is offloaded", "QuantizedCache"]
)
def test_kinds_that_are_not_filled_are_refused_by_name(medusa: MedusaModel, kind: str) -> None:
    cache = caches_of(medusa.target.model)[kind]()
    if kind == "QuantizedCache":  # needs a package of its own to be made
        cache.layers, cache.offloading = [], False
        cache.layer_class_to_replicate = None
    with pytest.raises(ValueError, match=f"does not support a given {kind}: pass a DynamicCache"):
        medusa.generate(**INPUTS, max_new_tokens=4, past_key_values=cache)


def test_states_and_batches_are_refused(medusa: MedusaModel) -> None:
    target = tiny_target("lfm2")
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
    cache: Any = DynamicCache(config=target.model.config)
    with pytest.raises(ValueError, match="a given DynamicCache with a LinearAttentionLayer"):
        written(MedusaModel(target, heads, tree="chain"), prompt(), past_key_values=cache)
    two: dict[str, Any] = {name: value.repeat(2, 1) for name, value in INPUTS.items()}
    for cache in (DynamicCache(config=medusa.target.model.config), medusa.target.new_cache()):
        with pytest.raises(ValueError, match="a given cache is filled by a batch of 1 alone"):
            medusa.generate(**two, max_new_tokens=4, past_key_values=cache)
    with pytest.raises(ValueError, match="a row that joins shares its cache"):
        medusa.running_batch().add(INPUTS["input_ids"], past_key_values=cache, max_new_tokens=4)


@pytest.mark.parametrize("own", [False, True])
def test_what_the_rows_of_a_batch_begin_with_is_read_and_stays(
    medusa: MedusaModel, own: bool
) -> None:
    target: Any = medusa.target.model
    two_BT = torch.cat([INPUTS["input_ids"], INPUTS["input_ids"].flip(0) + 1])
    cache: Any = medusa.target.new_cache(2) if own else DynamicCache()
    target(two_BT[:, :5], past_key_values=cache)
    before = cache.layers[0].keys.clone()
    given = {**whole_text(two_BT), "max_new_tokens": 9}
    expected_BT = target.generate(**given)
    got_BT = medusa.generate(**given, past_key_values=cache)
    assert torch.equal(torch.as_tensor(got_BT), expected_BT)
    assert cache.get_seq_length() == 5 and torch.equal(cache.layers[0].keys, before)


@pytest.mark.parametrize("compile", [False, True, "steps"])
def test_one_of_other_rows_or_precision_is_refused_and_leaves_no_trace(
    tiny_llama: TinyLlama, compile: Any
) -> None:
    """Buffers that were made like it would have served all later texts."""
    model: Any = tiny_llama(vocab_size=24)
    heads = MedusaHeads.from_target(model, HeadsConfig(num_heads=2))
    medusa = MedusaModel(model, heads, tree=4, compile=compile, compile_backend="eager")
    one_1T = INPUTS["input_ids"]

    def read(ids_BT: Tensor, halved: bool = False) -> DynamicCache:
        cache: Any = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids_BT, past_key_values=cache)
        for layer in cache.layers if halved else ():  # as within autocast
            layer.values = layer.values.bfloat16()
        return cache

    wrong = (
        (one_1T, read(one_1T[:, :5].repeat(2, 1)), "rows of 2 texts and there are 1: give one"),
        (one_1T.repeat(2, 1), read(one_1T[:, :5]), "rows of 1 texts and there are 2: give one"),
        (one_1T, read(one_1T[:, :5], halved=True), "of torch.bfloat16 and the target of torch.f"),
    )
    for ids_BT, cache, message in wrong:
        with pytest.raises(ValueError, match=f"the given cache (has|is) {message}"):
            medusa.generate(**whole_text(ids_BT), max_new_tokens=4, past_key_values=cache)
    got_1T: Any = medusa.generate(**whole_text(one_1T), max_new_tokens=9)
    assert torch.equal(got_1T, model.generate(**whole_text(one_1T), max_new_tokens=9))


@pytest.mark.parametrize("returned", [True, False])
def test_a_forward_with_autocast_of_its_own_goes_on(tiny_llama: TinyLlama, returned: bool) -> None:
    """As accelerate wraps the forward of a model that it trains in bf16."""
    model: Any = tiny_llama(vocab_size=24)
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    medusa = MedusaModel(model, MedusaHeads.from_target(model, HeadsConfig(num_heads=2)), tree=4)
    cache = medusa.target.new_cache() if returned else DynamicCache(config=model.config)
    given: dict[str, Any] = {"max_new_tokens": 8, "past_key_values": cache}
    text_1T: Any = medusa.generate(**whole_text(INPUTS["input_ids"]), **given)
    text_1T = torch.cat([text_1T, INPUTS["input_ids"]], dim=1)
    got_1T: Any = medusa.generate(**whole_text(text_1T), **given)
    assert torch.equal(got_1T, model.generate(**whole_text(text_1T), max_new_tokens=8))


@pytest.mark.parametrize(("tokens", "said"), [(20, "all of the 20"), (18, "20 tokens, more than")])
def test_one_that_holds_the_text_already_is_refused_and_stays(
    medusa: MedusaModel, tokens: int, said: str
) -> None:
    text_1T = plain(medusa, max_new_tokens=30, do_sample=False)
    cache = medusa.target.new_cache()
    medusa.generate(**INPUTS, max_new_tokens=9, do_sample=False, past_key_values=cache)
    assert cache.get_seq_length() == 20
    given: dict[str, Any] = {"max_new_tokens": 4, "past_key_values": cache}
    with pytest.raises(ValueError, match=f"the given cache already holds {said}"):
        medusa.generate(**whole_text(text_1T[:, :tokens]), **given)
    got_1T = medusa.generate(**whole_text(text_1T[:, :38]), **given)
    assert torch.equal(torch.as_tensor(got_1T), text_1T)
