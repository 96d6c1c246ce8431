"""Compiled verification: the same tokens, from one graph however long the text grows."""

from __future__ import annotations

import gc
import weakref
from inspect import signature
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Llama4TextConfig,
    LlamaConfig,
    StoppingCriteriaList,
)
from transformers.masking_utils import create_chunked_causal_mask

from medusa_heads import HeadsConfig, MedusaHeads, MedusaModel, new_heads
from medusa_heads.inference.engine.rows import Row, StopCheck
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.machine import attention
from medusa_heads.target.graphs.compiled import CompiledTarget
from medusa_heads.target.graphs.static_cache import StaticRowCache
from medusa_heads.trees.tree import TokenTree
from tests.allocations import Allocations
from tests.conftest import TinyLlama

pytestmark = pytest.mark.usefixtures("small_caches")

SMALL: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def build(config: Any) -> Any:
    model: Any = AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.generation_config.pad_token_id = 0
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL),
        Gemma2Config(**SMALL, sliding_window=16, query_pre_attn_scalar=16),
        pytest.param(
            Llama4TextConfig(
                **SMALL,
                intermediate_size_mlp=48,
                moe_layers=[],
                attention_chunk_size=16,
                no_rope_layers=[1, 0],
            ),
            marks=pytest.mark.skipif(
                "block_sequence_ids" not in signature(create_chunked_causal_mask).parameters,
                reason="transformers before 5.20 makes no static cache's masks of chunks",
            ),
        ),
    ],
    ids=["llama", "gemma2", "llama4"],
)
def test_equal_to_generate_from_one_graph(config: Any) -> None:
    model = build(config)
    torch._dynamo.reset()
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    medusa = MedusaModel(
        model,
        MedusaHeads.from_target(model, HeadsConfig(num_heads=3)),
        tree="dynamic:7",
        compile=True,
        compile_backend=count,
    )
    random = torch.Generator().manual_seed(1)
    # Texts of several lengths, and a ragged batch whose rows end at different steps.
    for batch, length, new in ((1, 20, 30), (1, 9, 50), (1, 60, 20)):
        ids = torch.randint(1, 24, (batch, length), generator=random)
        check(model, medusa, ids, torch.ones_like(ids), new)
    assert len(graphs) == 1
    ids = torch.randint(1, 24, (3, 21), generator=random)
    mask = torch.ones_like(ids)
    mask[1, :4] = mask[2, :9] = 0
    check(model, medusa, ids * mask, mask, 30)
    check(model, medusa, ids * mask, mask, 40, eos_token_id=5)
    assert len(graphs) == 2


def check(model: Any, medusa: MedusaModel, ids: Any, mask: Any, new: int, **options: Any) -> None:
    inputs = {"attention_mask": mask, "max_new_tokens": new, "do_sample": False, **options}
    assert torch.equal(medusa.generate(ids, **inputs), model.generate(ids, **inputs))  # type: ignore[arg-type]


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(
    "kind",
    [{"prefix_attention": True}, {"induction": True}, {"kind": "block"}, {"kind": "eagle3"}],
)
def test_rows_that_end_stay_beside_heads_that_read_the_prompt(kind: dict[str, Any]) -> None:
    model = build(LlamaConfig(**SMALL))
    heads = new_heads(model, HeadsConfig(num_heads=3, **kind))
    medusa = MedusaModel(model, heads, tree=7, compile=True, compile_backend="eager")
    ids = torch.randint(1, 24, (3, 21), generator=torch.Generator().manual_seed(1))
    check(model, medusa, ids, torch.ones_like(ids), 60, eos_token_id=5)


def test_hidden_states_outlive_the_next_step(tiny_llama: TinyLlama) -> None:
    """A CUDA graph that is replayed writes to where it wrote before; so does this backend."""

    def replayed(graph: Any, _: Any) -> Any:
        places: list[torch.Tensor] = []

        def run(*inputs: Any) -> list[torch.Tensor]:
            outputs = graph.forward(*inputs)
            if not places:
                places.extend(output.clone() for output in outputs)
            for place, output in zip(places, outputs, strict=True):
                place.copy_(output)
            return places

        return run

    target = CompiledTarget(tiny_llama(num_layers=1), replayed)
    prompt = torch.arange(1, 13)[None]
    rows = [Row(0, 1, prompt[0], StopCheck(StoppingCriteriaList()))]
    state = DecodingState(rows, target.new_cache(1, 20), [0])
    kept = []
    with torch.no_grad(), target.capture_hidden() as last_hidden:
        target.model(prompt[:, :-1], use_cache=True, **{target.cache_argument: state.cache})
        state.lengths = [11]
        for token in (12, 13):
            tree = TokenTree.root_only(torch.tensor([token]))
            target.verify(tree, state.cache, state.tree_mask(tree))
            kept.append((last_hidden(), last_hidden().clone()))
    assert not torch.equal(kept[0][1], kept[1][1])
    assert all(torch.equal(given, then) for given, then in kept)


@pytest.mark.usefixtures("untraced")
def test_its_cache_is_handed_out_as_a_copy(tiny_llama: TinyLlama) -> None:
    model = tiny_llama(vocab_size=24, num_layers=1)
    medusa = MedusaModel(
        model,
        MedusaHeads.from_target(model, HeadsConfig(num_heads=2)),
        tree="chain",
        compile=True,
        compile_backend="eager",
    )
    ids = torch.arange(1, 13)[None]
    options: Any = {"do_sample": False, "attention_mask": torch.ones_like(ids)}
    whole = model.generate(ids, max_new_tokens=40, **options)
    first: Any = medusa.generate(ids, max_new_tokens=15, return_dict_in_generate=True, **options)
    kept = first.past_key_values.layers[0].keys.clone()
    medusa.generate(ids.flip(1), max_new_tokens=30, **options)  # overwrites the static cache
    assert torch.equal(first.past_key_values.layers[0].keys, kept)
    options["attention_mask"] = torch.ones_like(first.sequences)
    second: Any = medusa.generate(
        first.sequences, past_key_values=first.past_key_values, max_new_tokens=25, **options
    )
    assert torch.equal(second, whole)


def test_a_cache_that_steps_were_measured_with_serves_texts(tiny_llama: TinyLlama) -> None:
    """Steps are measured in inference mode, texts are prefilled outside of it."""
    target = CompiledTarget(tiny_llama(), "eager")
    ids = torch.arange(1, 13)[None]
    with torch.inference_mode():
        measured = target.model(
            ids, **{target.cache_argument: target.new_cache(1, 20)}
        ).logits.clone()
    with torch.no_grad():
        prefilled = target.model(ids, **{target.cache_argument: target.new_cache(1, 20)}).logits
    assert torch.equal(prefilled, measured)


def filled(target: CompiledTarget, batch: int, slots: int = 10) -> StaticRowCache:
    """The cache for such a text, with a prompt in it."""
    cache = target.new_cache(batch, slots)
    with torch.no_grad():
        ids = torch.ones(batch, 4).long()
        target.model(ids, use_cache=True, **{target.cache_argument: cache})
    assert isinstance(cache, StaticRowCache)
    return cache


def test_a_tree_that_found_no_slots_leaves_the_cache_to_the_next_text(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = filled(CompiledTarget(tiny_llama(), "eager"), 1)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch, "arange", interrupted)
        with cache.tree_slots(4, 3, torch.device("cpu")):
            pass
    assert cache.get_seq_length() == 4  # of a tree's forward it would be 0


def test_caches_are_used_again_while_the_others_weigh_little(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = CompiledTarget(tiny_llama(), "eager")
    first = filled(target, 1)
    # Layers, keys and values, heads, slots, width.
    assert first.held_bytes == 2 * 2 * 2 * 512 * 16 * 4
    assert target.new_cache(1, 12) is first  # the same capacity
    monkeypatch.setattr("medusa_heads.target.graphs.kept_caches._BYTES_KEPT", 6 * first.held_bytes)
    two, three = (filled(target, batch) for batch in (2, 3))
    large = filled(target, 8, 2000)  # beside 1, 2 and 3, which weigh 6 together
    assert filled(target, 2) is two  # and now the large one weighs too much
    assert filled(target, 1) is first and filled(target, 3) is three
    assert filled(target, 8, 2000) is not large
    filled(target, 5)  # beside 3, 1 and 2, of which 2 was used longest ago
    filled(target, 4)  # beside 5, 3, 1 and 2: 3 and 2 find no room
    assert filled(target, 1) is first and filled(target, 3) is not three


def test_caches_let_go_are_freed_before_the_next_is_made(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_heads.target.graphs.kept_caches._BYTES_KEPT", 0)
    target = CompiledTarget(tiny_llama(), "eager")
    with Allocations() as allocations:
        one = filled(target, 1).held_bytes
        for batch in (2, 3, 2, 1, 3):
            filled(target, batch)
    assert 3 * one <= allocations.peak < 3.5 * one


def test_the_lm_heads_hook_keeps_nothing_between_texts(tiny_llama: TinyLlama) -> None:
    model = tiny_llama(vocab_size=24)
    target = CompiledTarget(model, "eager")
    ids = torch.arange(1, 13)[None]
    with target.capture_hidden() as last_hidden:
        model(ids)
        assert last_hidden().shape == (1, 12, 64)
    with Allocations() as allocations:
        model(ids)  # with gradients: a state that is kept would keep all of them
        assert allocations.live() == 0


def test_a_text_asks_again_what_there_was_no_memory_for(tiny_llama: TinyLlama) -> None:
    attention._short.add("a layer of much attention")
    with CompiledTarget(tiny_llama(), "eager").capture_hidden():
        assert not attention._short


def test_the_hook_leaves_with_its_target(tiny_llama: TinyLlama) -> None:
    model = tiny_llama()
    target = CompiledTarget(model, "eager")
    filled(target, 1)
    assert len(model.lm_head._forward_pre_hooks) == 1
    gone = weakref.ref(target)
    del target
    gc.collect()
    assert gone() is None
    assert not model.lm_head._forward_pre_hooks


@pytest.mark.usefixtures("untraced")
def test_a_model_whose_dtype_changes_gets_another_cache(tiny_llama: TinyLlama) -> None:
    model: Any = tiny_llama(num_layers=1)
    target = CompiledTarget(model, "eager")
    medusa = MedusaModel(target, new_heads(target, HeadsConfig(num_heads=2)), tree="static:4")
    ids_1T = torch.arange(1, 7)[None]
    for _ in range(2):
        expected = model.generate(ids_1T, max_new_tokens=8, do_sample=False)
        got: Any = medusa.generate(ids_1T, max_new_tokens=8)
        assert torch.equal(got, expected)
        medusa.heads.double()
        model.double()
