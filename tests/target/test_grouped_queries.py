"""Queries that share keys are read together while a tree is verified, and change nothing.

Shapes: B rows, H query heads, K key heads, N tree nodes, S cache slots, D of a head.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MistralForCausalLM
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from medusa_heads import HeadsConfig, MedusaHeads, MedusaModel, TrainingFreeModel
from medusa_heads.target import attention
from medusa_heads.target.attention import (
    TreeMask,
    compiled_tree_attention,
    take_tree_masks,
    tree_attention,
)
from scripts.prove.tiny_configs import tiny_config
from scripts.prove.tiny_models import random_weights
from tests.conftest import DEVICE, TinyLlama

B, H, K, S, D = 2, 6, 2, 9, 8


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def layer() -> Any:
    module: Any = nn.Module()
    module.num_key_value_groups, module.is_causal = H // K, True
    return module


def attended(nodes: int, mask: Tensor | None, **more: Any) -> Tensor:
    attend: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]
    # As models hand it over: heads in front of tokens, though they lie the other way round.
    query_BHND = drawn(B, nodes, H, D).transpose(1, 2)
    output, _ = attend(layer(), query_BHND, drawn(B, K, S, D), drawn(B, K, S, D), mask, **more)
    return output


def tree(nodes: int) -> TreeMask:
    return TreeMask(torch.ones(B, nodes, S).bool(), torch.zeros(B, nodes).long(), S - nodes)


def refused(*_: Any) -> Any:
    raise AssertionError("keys and values are repeated for every query head")


@pytest.fixture(autouse=True)
def taken(small_caches: None) -> None:
    take_tree_masks()


@pytest.mark.parametrize("scaling", [None, 0.5])
@pytest.mark.parametrize(("nodes", "masks"), [(1, 0), (1, 1), (1, H), (4, 1), (4, H)])
def test_the_same_as_query_head_by_query_head(
    nodes: int, masks: int, scaling: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = drawn(B, masks, nodes, S) if masks else None
    expected = attended(nodes, mask, scaling=scaling)
    monkeypatch.setattr(sdpa_attention, "repeat_kv", refused)
    with tree_attention(tree(nodes)):
        torch.testing.assert_close(attended(nodes, mask, scaling=scaling), expected)


@pytest.mark.parametrize("shape", [(B, H, 1, S), (1, 4, S), (4, S)])
def test_masks_of_other_shapes_say_what_they_say_to_transformers(shape: tuple[int, ...]) -> None:
    mask = drawn(*shape)
    expected = attended(4, mask)
    with tree_attention(tree(4)):
        torch.testing.assert_close(attended(4, mask), expected)


def test_what_comes_out_is_contiguous_as_of_transformers() -> None:
    with tree_attention(tree(4)):
        given = attended(4, drawn(B, 1, 4, S))
    given.view(B, 4, H * D)  # as models may ask


def test_few_masks_are_kept_where_every_layer_has_its_own() -> None:
    mask = tree(4)
    with tree_attention(mask):
        for layer in range(12):
            attended(4, drawn(B, 1, 4, S) + layer)
    assert len(mask.of_groups) <= 4


def test_layers_that_share_a_mask_share_what_is_made_of_it() -> None:
    first, second = drawn(B, 1, 4, S), drawn(B, 1, 4, S) + 1
    mask = tree(4)
    with tree_attention(mask):
        once = attended(4, first)
        attended(4, second)
        torch.testing.assert_close(attended(4, first), once)
    assert len(mask.of_groups) == 2


def test_targets_of_two_threads_leave_each_other_their_graphs() -> None:
    first, second = compiled_tree_attention(), compiled_tree_attention()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert attention._TRACED == [True]  # else the second would be compiled anew
    second.__exit__(None, None, None)
    assert attention._TRACED == [False]


def test_what_is_no_tree_is_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = drawn(B, 1, 4, S)
    monkeypatch.setattr(sdpa_attention, "repeat_kv", refused)
    with pytest.raises(AssertionError, match="are repeated"):
        attended(4, mask)
    # Of which older ones know nothing.
    theirs = pytest.raises((ValueError, AssertionError), match=r"softcap|are repeated")
    with tree_attention(tree(4)), theirs:
        attended(4, mask, softcap=30.0)


def test_a_compiled_target_reads_each_key_once(tiny_llama: TinyLlama) -> None:
    model: Any = tiny_llama(num_layers=1, num_attention_heads=4, num_key_value_heads=2)
    heads_read: list[int] = []

    def look(graph: Any, inputs: Any) -> Any:
        for node in graph.graph.nodes:
            if node.target is torch.ops.medusa_heads.attention:
                heads_read.append(node.args[1].meta["example_value"].shape[1])
        return graph.forward

    heads = MedusaHeads.from_target(model, HeadsConfig(num_heads=2))
    medusa = MedusaModel(model, heads, tree="static:4", compile=True, compile_backend=look)
    ids = torch.arange(1, 7)[None]
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    given: Any = medusa.generate(ids, max_new_tokens=12, do_sample=False)
    assert given.tolist() == expected.tolist()
    assert heads_read == [2]


@pytest.mark.parametrize("masks", [1, H])
def test_a_graph_reads_what_is_in_use_of_its_cache(masks: int) -> None:
    attend: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]
    code: list[str] = []

    def noted(graph: torch.fx.GraphModule, _: Any) -> Any:
        code.append(graph.code)
        return graph.forward

    given = layer(), drawn(B, H, 4, D), drawn(B, K, S, D), drawn(B, K, S, D), drawn(B, masks, 4, S)
    with compiled_tree_attention(), torch.no_grad():
        output, _ = torch.compile(attend, fullgraph=True, backend=noted)(*given, scaling=0.5)
    torch.testing.assert_close(output, attend(*given, scaling=0.5)[0])
    # Which is for masks that are the same for all heads.
    assert ["medusa_heads.attention" in each for each in code] == [masks == 1]


def test_it_is_an_operator_of_torch() -> None:
    given = drawn(B, H, 4, D), drawn(B, K, S, D), drawn(B, K, S, D + 1), drawn(B, 1, 4, S), None
    torch.library.opcheck(torch.ops.medusa_heads.attention.default, given)


@pytest.mark.skipif(DEVICE != "cpu", reason="no CPU interprets what is made for a GPU")
@pytest.mark.slow
@pytest.mark.parametrize(("window", "compile"), [(9, True), (None, "steps")])
def test_graphs_attend_by_the_kernel_for_gpus(
    window: int | None, compile: Any, split_attention: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton is made for Linux alone")
    from medusa_heads.machine import split_attention as kernel

    calls: list[tuple[int, ...]] = []

    def counted(query: Tensor, key: Tensor, *others: Any) -> Tensor:
        calls.append((*query.shape[:3], key.shape[1]))
        return attend(query, key, *others)

    attend = kernel.split_attention
    monkeypatch.setattr(kernel, "split_attention", counted)
    config: Any = tiny_config("mistral")
    config.sliding_window, config.num_hidden_layers = window, 1
    model: Any = random_weights(MistralForCausalLM(config), (0.3, 0.05))
    drafting = TrainingFreeModel(model, "recycling:7", compile=compile, compile_backend="eager")
    ids = torch.tensor([[0, 0, 0, 5, 9, 3], [7, 2, 8, 2, 8, 1]])
    given: Any = {"attention_mask": (ids > 0).long(), "do_sample": False}
    expected = model.generate(ids, max_new_tokens=10, **given)
    got: Any = drafting.generate(ids, max_new_tokens=10, **given)
    assert got.tolist() == expected.tolist()
    assert set(calls) == {(2, 4, 8, 2)}
    assert len(calls) >= drafting.last_stats.forwards - 1
    assert max(drafting.last_stats.accepted) > 0
