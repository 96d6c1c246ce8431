"""MedusaModel and caches: prompts read in parts, texts that go on, a cache of the caller's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CompileConfig

from medusa_heads import HeadsConfig, MedusaHeads, MedusaModel
from medusa_heads.inference.engine.rows import Row
from medusa_heads.target.cache import RowCache
from tests.conftest import TinyLlama
from tests.inference.conftest import INPUTS, plain


def test_return_dict_and_continuing_from_its_cache(medusa: MedusaModel) -> None:
    whole = plain(medusa, max_new_tokens=40, do_sample=False)
    first: Any = medusa.generate(
        **INPUTS, max_new_tokens=15, do_sample=False, return_dict_in_generate=True
    )
    assert torch.equal(first.sequences, whole[:, :27])
    assert first.past_key_values.get_seq_length() == 26
    second = medusa.generate(
        first.sequences,
        attention_mask=torch.ones_like(first.sequences),
        past_key_values=first.past_key_values,
        max_new_tokens=25,
        do_sample=False,
    )
    assert torch.equal(second, whole)  # type: ignore[arg-type]


def test_a_returned_cache_is_cropped_as_transformers_own(medusa: MedusaModel) -> None:
    options: Any = {"do_sample": False, "return_dict_in_generate": True}
    out: Any = medusa.generate(**INPUTS, max_new_tokens=20, **options)
    cache, length = out.past_key_values, out.sequences.shape[1] - 1
    # Earlier versions took a positive number for the length that is left, later ones refuse it.
    with pytest.raises(ValueError, match="crop"):
        cache.crop(4)
    assert cache.get_seq_length() == length
    cache.crop(5 - length)
    assert cache.get_seq_length() == 5
    other = torch.cat([out.sequences[:, :5], out.sequences[:, :4]], dim=1)
    expected = medusa.target.model.generate(other, max_new_tokens=9, do_sample=False)  # type: ignore[operator]
    got = medusa.generate(other, past_key_values=cache, max_new_tokens=9, do_sample=False)
    assert torch.equal(got, expected)  # type: ignore[arg-type]
    cache.crop(-99)  # more than there are
    assert cache.get_seq_length() == 0


def test_a_prompt_that_is_read_in_parts_is_not_compiled(tiny_llama: TinyLlama) -> None:
    """As transformers would do on a GPU, and with this setting does anywhere."""
    graphs: list[Any] = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    config: Any = CompileConfig(backend=count)
    config._compile_all_devices = True
    options: Any = {"compile": "steps", "compile_backend": "eager"}
    model = tiny_llama(num_layers=1, vocab_size=24)
    heads = MedusaHeads.from_target(model, HeadsConfig(num_heads=1))
    compiled = MedusaModel(model, heads, tree=2, **options)
    options = {"max_new_tokens": 9, "do_sample": False}
    expected = plain(compiled, **options)
    with compiled.target.uncompiled():  # type: ignore[attr-defined]
        got = compiled.generate(**INPUTS, prefill_chunk_size=4, compile_config=config, **options)
    assert torch.equal(torch.as_tensor(got), expected)
    assert not graphs


def test_a_cache_is_as_long_as_its_text_may_become(medusa: MedusaModel) -> None:
    options: Any = {"do_sample": False, "return_dict_in_generate": True}
    out: Any = medusa.generate(**INPUTS, max_new_tokens=150, **options)
    assert out.past_key_values._stacks.capacity == 12 + 150 + medusa.drafter.num_nodes
    cache = medusa.target.new_cache()
    for new in (20, 40):
        medusa.generate(**INPUTS, max_new_tokens=new, past_key_values=cache, **options)
        assert cache._stacks.capacity == 12 + new + medusa.drafter.num_nodes
        cache.set_length(0)


def test_transformers_goes_on_from_a_cache_that_grew_while_decoding(
    medusa: MedusaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_heads.target.stacks._INITIAL_SLACK", 16)
    options: Any = {"do_sample": False, "return_dict_in_generate": True}
    first: Any = medusa.generate(**INPUTS, max_new_tokens=100, **options)
    assert first.past_key_values._stacks.capacity == 12 + 100 + medusa.drafter.num_nodes
    model: Any = medusa.target.model
    second = model.generate(
        first.sequences,
        attention_mask=torch.ones_like(first.sequences),
        past_key_values=first.past_key_values,
        max_new_tokens=20,
        do_sample=False,
    )
    assert torch.equal(second, plain(medusa, max_new_tokens=120, do_sample=False))


def test_a_callers_own_cache_ends_with_what_was_committed(medusa: MedusaModel) -> None:
    cache = medusa.target.new_cache()
    options: Any = {"do_sample": False, "past_key_values": cache}
    first: Any = medusa.generate(**INPUTS, max_new_tokens=15, **options)
    assert cache.get_seq_length() == first.shape[1] - 1
    second: Any = medusa.generate(
        first, attention_mask=torch.ones_like(first), max_new_tokens=25, **options
    )
    assert torch.equal(second, plain(medusa, max_new_tokens=40, do_sample=False))


PHASES = (
    "drafter.propose", "drafter.observe", "drafter.learn_seconds", "target.verify",
    "target.model.model.layers[1].forward", "RowCache.move_rows", "Row.commit",
)  # fmt: skip


@pytest.mark.parametrize(
    ("phase", "call"),
    [
        # The first call of each phase, and one of two later ones.
        pytest.param(phase, call, marks=[] if call in (1, (2, 5)[i % 2]) else [pytest.mark.slow])
        for i, phase in enumerate(PHASES)
        for call in (1, 2, 5)
    ],
)
def test_a_callers_own_cache_serves_again_whatever_was_raised(
    medusa: MedusaModel, monkeypatch: pytest.MonkeyPatch, phase: str, call: int
) -> None:
    where, _, name = phase.rpartition(".")
    owner: Any = eval(where, {"RowCache": RowCache, "Row": Row} | vars(medusa))
    own, calls = getattr(owner, name), []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        calls.append(name)
        if len(calls) == call:
            raise KeyboardInterrupt
        return result

    cache = medusa.target.new_cache()
    options: Any = {"do_sample": False, "past_key_values": cache}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, interrupted)
        medusa.generate(**INPUTS, max_new_tokens=40, **options)
    text_1T = plain(medusa, max_new_tokens=50, do_sample=False)
    mask_1T = torch.ones_like(text_1T)
    whole: Any = medusa.generate(text_1T, attention_mask=mask_1T, max_new_tokens=15, **options)
    assert torch.equal(whole, plain(medusa, max_new_tokens=65, do_sample=False))


def test_chunked_prefill(medusa: MedusaModel) -> None:
    out: Any = medusa.generate(**INPUTS, max_new_tokens=20, do_sample=False, prefill_chunk_size=5)
    assert torch.equal(out, plain(medusa, max_new_tokens=20, do_sample=False))


def test_a_target_that_training_left_without_a_cache(medusa: MedusaModel) -> None:
    """As fine-tuned models are often saved: their text is the same with one."""
    own: Any = medusa.target.model.generation_config
    own.use_cache = False
    expected = plain(medusa, max_new_tokens=20, do_sample=False)
    got: Any = medusa.generate(**INPUTS, max_new_tokens=20, do_sample=False)
    assert torch.equal(got, expected) and medusa.last_stats.forwards < 20
    assert own.use_cache is False
