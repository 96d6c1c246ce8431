"""Compiled verification from a recurrent state: fixed shapes, and what generate() writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_heads import HeadsConfig, MedusaModel, TrainingFreeModel, new_heads
from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.inference.engine.capability import check_batch
from medusa_heads.inference.engine.recurrent import RecurrentState, graph_sizes
from medusa_heads.target.graphs.compiled import CompiledTarget
from medusa_heads.target.graphs.static_cache import StaticRecurrentCache
from medusa_heads.target.recurrent import RecurrentCache
from tests.inference.padded import padded
from tests.inference.planted import PlantedDrafter
from tests.inference.recurrent import IN_GRAPHS, planted, prompt, short_target, tiny_target, written
from tests.pairs import with_slow

pytestmark = IN_GRAPHS

SHORT: dict[str, Any] = {"max_new_tokens": 32}


class Counting:
    """Runs the graph as it was traced, and counts."""

    def __init__(self, wrong: float = 0.0) -> None:
        self.graphs, self.wrong = 0, wrong

    def __call__(self, graph: Any, _inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        if not self.wrong:
            return graph.forward

        def run(*args: Any) -> Any:
            return tuple(
                out + self.wrong * torch.randn_like(out) if out.is_floating_point() else out
                for out in graph.forward(*args)
            )

        return run


@pytest.mark.parametrize("kind", ["lfm2", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_two_graphs_serve_every_length_of_text(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees with nothing in front of them, and with all that there may be. A state that is not put
    back is noticed: the negative control."""
    target, counting = short_target(kind), Counting()
    compiled = CompiledTarget(target.model, counting)
    for length, share in ((21, 0.75), (40, 0.5)):
        inputs = prompt(length)
        expected = written(target.model, inputs)
        got, stats = planted(compiled, inputs, expected, share)
        assert torch.equal(got, expected) and stats.tokens_per_step > 1.5
    assert counting.graphs == 2
    monkeypatch.setattr(RecurrentCache, "put_back", lambda *_: None)
    assert not torch.equal(planted(compiled, inputs, expected)[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lfm2", "falcon_h1"])
def test_rows_of_a_batch_in_one_graph(kind: str) -> None:
    """Layers that keep a state, or rows and a state; a row that has ended stays, and is not read
    on."""
    target, inputs = short_target(kind), padded((5, 0), 24)
    ends = SHORT | {"eos_token_id": int(written(target.model, inputs, **SHORT)[0, 35])}
    expected = written(target.model, inputs, **ends)
    compiled = CompiledTarget(target.model, Counting())
    assert torch.equal(planted(compiled, inputs, expected, **ends)[0], expected)


@pytest.mark.parametrize("most", with_slow([12], [0, 3]))
def test_fixed_shapes_without_a_graph(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same forwards, of every number of tokens that is read again."""
    monkeypatch.setattr(PlantedDrafter, "most_again", lambda *_: most)
    read: set[int] = set()
    verify = RecurrentState.verify

    def counted(state: RecurrentState, *args: Any) -> Tensor:
        logits = verify(state, *args)
        read.add(state._tokens)
        return logits

    for kind in ("lfm2", "nemotron_h"):
        target, inputs = tiny_target(kind), padded((0, 3), 24)
        compiled = CompiledTarget(target.model, "eager")
        check_batch(compiled, [0, 3])
        expected = written(target.model, inputs, **SHORT)
        with compiled.uncompiled(), monkeypatch.context() as patched:
            patched.setattr(RecurrentState, "verify", counted)
            for share in (0.4, 0.9):
                got, _ = planted(compiled, inputs, expected, share, **SHORT)
                assert torch.equal(got, expected)
    drafter = PlantedDrafter([[]], 9, [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)])
    assert read <= set(graph_sizes(drafter, 2)) == {1, 5, 5 + most}


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("kind", with_slow(["medusa"], ["block"]))
def test_a_compiled_text_goes_on_without_a_graph_and_the_other_way(kind: Any) -> None:
    target, inputs = short_target("lfm2"), prompt()
    torch.manual_seed(3)
    heads = new_heads(target, HeadsConfig(kind=kind, num_heads=3))
    models = [
        MedusaModel(target, heads, tree=8),
        MedusaModel(target, heads, tree=8, compile=True, compile_backend="eager"),
    ]
    whole = written(target.model, inputs)
    for first, second in (models, models[::-1]):
        half = written(first, inputs, max_new_tokens=20, return_dict_in_generate=True)
        assert isinstance(half.past_key_values, RecurrentCache)
        assert not isinstance(half.past_key_values, StaticRecurrentCache)
        rest = {"input_ids": half.sequences, "attention_mask": torch.ones_like(half.sequences)}
        got = written(second, rest, max_new_tokens=12, past_key_values=half.past_key_values)
        assert torch.equal(got, whole)


def test_what_a_compiler_gets_wrong_is_refused_by_name() -> None:
    target, inputs = short_target("lfm2"), prompt()
    expected = written(target.model, inputs)
    compiled = CompiledTarget(target.model, Counting(wrong=0.1))
    with pytest.raises(UnsupportedArchitecture, match="the logits of lfm2 differ by"):
        planted(compiled, inputs, expected)


def test_what_is_not_one_graph_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.lfm2 import modeling_lfm2

    def broken(states: Tensor, mask: Any) -> Tensor:
        torch._dynamo.graph_break()
        return states

    monkeypatch.setattr(modeling_lfm2, "apply_mask_to_padding_states", broken)
    model = TrainingFreeModel(short_target("lfm2"), "suffix", compile=True, compile_backend="eager")
    with pytest.raises(UnsupportedArchitecture, match="lfm2 cannot be compiled in one graph"):
        written(model, prompt())


def test_states_weigh_like_rows() -> None:
    """A text's states, and the copies of them, count among what caches may hold together."""
    target, expected = short_target("lfm2"), written(short_target("lfm2").model, prompt(), **SHORT)
    compiled = CompiledTarget(target.model, "eager")
    with compiled.uncompiled():
        planted(compiled, prompt(), expected, **SHORT)
    (cache,) = (each for (batch, *_), each in compiled._caches.items() if batch == 1)
    assert isinstance(cache, StaticRecurrentCache) and cache.states()
    states = sum(state.nbytes for state in cache.states())
    rows = sum(buffer.nbytes for buffer in cache._stacks.stacks)
    assert cache.held_bytes == rows + 2 * states
