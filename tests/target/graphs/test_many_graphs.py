"""More graphs than torch keeps in a process that has decoded many shapes of texts."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from medusa_heads import HeadsConfig, MedusaModel, new_heads
from medusa_heads.target.graphs.compiled import CompiledTarget
from tests.conftest import TinyLlama
from tests.pairs import with_slow


def test_steps_behind_a_prompt_have_no_graph_of_their_own(tiny_llama: TinyLlama) -> None:
    """What the prompt has yielded was made outside of inference mode, what a step yields within."""
    model: Any = tiny_llama(num_layers=1)
    model.generation_config.pad_token_id = 0
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    heads = new_heads(model, HeadsConfig(num_heads=2))
    medusa: Any = MedusaModel(model, heads, tree="none", compile=True, compile_backend=count)
    ids: Any = torch.arange(1, 9)[None]
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(medusa.generate(ids, **given), model.generate(ids, **given))
    assert len(graphs) == 1


@pytest.mark.parametrize("compile", with_slow([True], ["steps"]))
def test_texts_go_on_where_torch_keeps_too_many_graphs(tiny_llama: TinyLlama, compile: Any) -> None:
    """Those of the process are counted together. What has a graph is decoded by it."""
    model: Any = tiny_llama(num_layers=1)
    model.generation_config.pad_token_id = 0
    medusa: Any = MedusaModel(
        model,
        new_heads(model, HeadsConfig(num_heads=2)),
        tree="4",
        compile=compile,
        compile_backend="eager",
    )

    def check(rows: int) -> bool:
        ids = torch.arange(1, 8 * rows + 1).view(rows, 8)
        given: Any = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        given |= {"max_new_tokens": 6, "do_sample": False}
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert torch.equal(medusa.generate(**given), model.generate(**given))
        assert isinstance(medusa.target, CompiledTarget) and medusa.target.compiles
        return any("too many graphs" in str(each.message) for each in said)

    assert not check(1)
    with torch._dynamo.config.patch(accumulated_recompile_limit=1):
        assert check(2) and check(3) and not check(1)
    assert not check(2)
