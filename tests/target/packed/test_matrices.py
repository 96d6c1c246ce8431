"""Packed matrices: the same products, of the weights as they are now."""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
import weakref
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from medusa_heads import HeadsConfig, MedusaModel, new_heads
from medusa_heads.machine import kernels
from medusa_heads.machine.kernels import has_packed_products
from medusa_heads.target.graphs.compiled import CompiledTarget
from medusa_heads.target.packed import layer as layer_module
from medusa_heads.target.packed import matrices as module
from medusa_heads.target.packed.layer import Copies
from medusa_heads.target.packed.matrices import ROWS
from medusa_heads.target.target import TargetModel
from tests.conftest import TinyLlama
from tests.inference.planted import PlantedDrafter
from tests.packing import MATRICES, calls
from tests.pairs import with_slow

pytestmark = pytest.mark.skipif(
    not has_packed_products(torch.float32), reason="this build of torch packs no matrix"
)


@pytest.fixture(autouse=True)
def every_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALLEST", 1)


@pytest.mark.parametrize("rows", [1, *ROWS[:3], 17, ROWS[-1], ROWS[-1] + 1])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_the_same(tiny_llama: TinyLlama, rows: int, with_bias: bool) -> None:
    target = TargetModel(tiny_llama(attention_bias=with_bias))
    ids_1T = torch.arange(rows)[None]
    with torch.no_grad():
        expected_1TV = target.model(ids_1T).logits
        with calls(target, rows) as made:
            got_1TV = target.model(ids_1T).logits
        # One row: wide ones by columns, and those of the second kind that is measured packed.
        assert len(made) == (3 * 2 + 3 if rows == 1 else MATRICES if rows in ROWS else 0)
        torch.testing.assert_close(got_1TV, expected_1TV, rtol=1e-4, atol=1e-4)
        assert torch.equal(target.model(ids_1T).logits, expected_1TV)  # its own matrices again
    assert not any("forward" in vars(layer) for layer in target.model.modules())


def test_what_a_layer_reads_decides_not_what_the_forward_reads(tiny_llama: TinyLlama) -> None:
    """The lm_head of a forward of eight tokens may be asked for the last one alone."""
    target = TargetModel(tiny_llama())
    with torch.no_grad(), calls(target, 8) as made:
        target.model(torch.arange(8)[None], logits_to_keep=1)
    assert made == ["packed_product"] * (MATRICES - 1) + ["turned_product"]


@pytest.mark.parametrize("tied", with_slow([True], [False]))
def test_planted_text_is_that_of_generate(tiny_llama: TinyLlama, tied: bool) -> None:
    model = tiny_llama(tie_word_embeddings=tied)
    inputs: Any = {"input_ids": torch.arange(7, 19)[None], "max_new_tokens": 64, "do_sample": False}
    expected_1T: Any = model.generate(**inputs)
    heads = new_heads(TargetModel(model), HeadsConfig(num_heads=2))
    medusa: Any = MedusaModel(model, heads, tree="8")
    truth = expected_1T[:, 12:].tolist()
    medusa.drafter = PlantedDrafter(truth, 199)
    assert medusa.generate(**inputs).tolist() == expected_1T.tolist()
    assert medusa.last_stats.tokens > 1.5 * medusa.last_stats.forwards
    assert medusa.target.packed_bytes > 0
    # A negative control: of other weights than the model's, the text is another one.
    for packed in medusa.target.packed._packed.values():
        packed._packed = layer_module.pack(torch.zeros_like(packed._own().weight))
        packed.look = lambda: None
    assert medusa.generate(**inputs).tolist() != expected_1T.tolist()


def compiled(model: Any, how: Any, backend: str = "eager") -> tuple[dict[str, Any], list[int], Any]:
    """What decodes a text of a model through graphs, its prompt and its tokens by `generate()`."""
    heads = new_heads(TargetModel(model), HeadsConfig(num_heads=2))
    inputs: dict[str, Any] = {"input_ids": torch.arange(7, 19)[None], "do_sample": False}
    inputs["max_new_tokens"] = 40
    medusa: Any = MedusaModel(model, heads, tree="8", compile=how, compile_backend=backend)
    return inputs, model.generate(**inputs).tolist(), medusa


@pytest.mark.parametrize("how", [True, pytest.param("steps", marks=pytest.mark.slow)])
def test_graphs_multiply_by_the_packed_matrices_of_the_weights_as_they_are(
    tiny_llama: TinyLlama, how: Any
) -> None:
    model = tiny_llama(num_layers=1, attention_bias=True)
    inputs, expected, medusa = compiled(model, how)
    assert medusa.generate(**inputs).tolist() == expected
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    model.lm_head.weight.data.copy_(model.lm_head.weight.roll(1, 0))
    assert model.generate(**inputs).tolist() != expected
    assert medusa.generate(**inputs).tolist() == model.generate(**inputs).tolist()
    # A negative control: of other weights than the model's, the text is another one.
    for packed in medusa.target.packed._packed.values():
        packed._packed = layer_module.pack(torch.zeros_like(packed._own().weight))
        packed.look = lambda: None
    assert medusa.generate(**inputs).tolist() != model.generate(**inputs).tolist()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.slow
@pytest.mark.parametrize("how", [True, "steps"])
def test_inductors_graphs_do_so_as_well(tiny_llama: TinyLlama, how: Any) -> None:
    inputs, expected, medusa = compiled(tiny_llama(attention_bias=True), how, "inductor")
    assert medusa.generate(**inputs).tolist() == expected
    for packed in medusa.target.packed._packed.values():
        packed._packed = layer_module.pack(torch.zeros_like(packed._own().weight))
        packed.look = lambda: None
    assert medusa.generate(**inputs).tolist() != expected


def test_weights_where_others_lay_are_multiplied_by_themselves(tiny_llama: TinyLlama) -> None:
    layer, other = (tiny_llama(seed=seed).lm_head for seed in (1, 2))
    packed, x_8D = layer_module.PackedLayer(layer, Copies(frozenset(ROWS))), torch.randn(8, 64)
    packed.look()
    with torch.no_grad():
        torch.testing.assert_close(layer_module._linear(x_8D, layer.weight, None), layer(x_8D))
        # What was packed lay there once; another layer's weights lie there now.
        layer.weight.data, other.weight.data = other.weight.data, layer.weight.data.mul_(2.0)
        assert torch.equal(layer_module._linear(x_8D, other.weight, None), other(x_8D))
        assert torch.equal(layer_module._linear(x_8D, layer.weight, None), layer(x_8D))


@pytest.mark.parametrize("how", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_matrices_that_begin_at_one_place(tiny_llama: TinyLlama, how: bool) -> None:
    model = tiny_llama()
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.o_proj.weight = nn.Parameter(attention.q_proj.weight.data.T)
        attention.k_proj.weight = nn.Parameter(attention.q_proj.weight.data[:32])
    inputs, expected, medusa = compiled(model, how)
    assert medusa.generate(**inputs).tolist() == expected


def test_what_a_graph_calls_is_an_operator_of_torch() -> None:
    for bias_O in (None, torch.randn(16)):
        given = torch.randn(2, 4, 24), torch.randn(16, 24), bias_O
        torch.library.opcheck(torch.ops.medusa_heads.linear.default, given)


def test_another_copy_of_the_package_has_the_same_operators() -> None:
    first = kernels.operator("linear(Tensor x) -> Tensor", torch.neg, torch.neg)
    assert first is torch.ops.medusa_heads.linear
    importlib.reload(kernels)  # as notebooks do
    assert torch.ops.medusa_heads.linear(torch.eye(2), torch.ones(3, 2), None).shape == (2, 3)


def test_views_without_them_share_their_graphs(tiny_llama: TinyLlama) -> None:
    graphs: list[Any] = []

    def noted(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    target = CompiledTarget(tiny_llama(num_layers=1), noted)
    heads = new_heads(target, HeadsConfig(num_heads=2))
    ids_1T = torch.arange(9)[None]
    for _ in range(2):
        medusa: Any = MedusaModel(target, heads, tree="8", deterministic=True)
        medusa.generate(ids_1T, max_new_tokens=8)
    assert medusa.target is target.without_packed() and not medusa.target.packs
    assert target.packs and len(graphs) == 1


@pytest.mark.parametrize("change", ["data", "row", "layer", "adapter"])
def test_a_text_is_that_of_the_weights_as_they_are_when_it_begins(
    tiny_llama: TinyLlama, change: str
) -> None:
    model = tiny_llama()
    target = TargetModel(model)
    ids_1T = torch.arange(8)[None]
    with torch.no_grad(), calls(target, 8):
        before_1TV = model(ids_1T).logits
    if change == "data":  # which leaves no trace in the tensor's version
        model.model.layers[1].mlp.up_proj.weight.data.mul_(1.5)
    elif change == "row":
        model.lm_head.weight.data[5] += 1.0
    elif change == "layer":
        model.lm_head = nn.Linear(64, 199, bias=False)
    else:
        get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    target.new_cache()
    with torch.no_grad():
        expected_1TV = model(ids_1T).logits
        with calls(target, 8) as made:
            got_1TV = model(ids_1T).logits
    assert not torch.allclose(got_1TV, before_1TV, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(got_1TV, expected_1TV, rtol=1e-4, atol=1e-4)
    assert len(made) >= MATRICES  # an adapter's own as well


def test_a_small_change_in_half_precision_is_seen(tiny_llama: TinyLlama) -> None:
    if not has_packed_products(torch.bfloat16):
        pytest.skip("this processor packs no bf16")
    model = tiny_llama().to(torch.bfloat16)
    target, read_D = TargetModel(model), torch.zeros(64)
    read_D[3] = 1e4
    x_4D = read_D.expand(4, 64).to(torch.bfloat16)
    with torch.no_grad(), calls(target, 4):
        before_4V = model.lm_head(x_4D)
    model.lm_head.weight.data[7, 3] *= 1.02
    target.new_cache()
    with torch.no_grad(), calls(target, 4) as made:
        after_4V = model.lm_head(x_4D)
    assert made and not torch.equal(after_4V[:, 7], before_4V[:, 7])
    assert torch.equal(after_4V[:, :7], before_4V[:, :7])


def test_another_dtype_of_the_same_weights(tiny_llama: TinyLlama) -> None:
    if not has_packed_products(torch.bfloat16):
        pytest.skip("this processor packs no bf16")
    model = tiny_llama().to(torch.bfloat16)
    target = TargetModel(model)
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):  # which float32 holds exactly
        model.to(dtype)
        target.new_cache()
        with torch.no_grad(), calls(target, 8) as made:
            assert model(torch.arange(8)[None]).logits.dtype == dtype
        assert len(made) == MATRICES


def test_a_bias_with_gaps(tiny_llama: TinyLlama) -> None:
    model = tiny_llama(attention_bias=True)
    layer = model.model.layers[0].self_attn.q_proj
    layer.bias.data = torch.randn(64, 2)[:, 0]
    with torch.no_grad():
        expected_1TV = model(torch.arange(8)[None]).logits
        with calls(TargetModel(model), 8) as made:
            got_1TV = model(torch.arange(8)[None]).logits
    assert len(made) == MATRICES
    torch.testing.assert_close(got_1TV, expected_1TV, rtol=1e-4, atol=1e-4)


def test_all_who_decode_a_model_share_what_was_packed(tiny_llama: TinyLlama) -> None:
    model = tiny_llama()
    target = TargetModel(model)
    assert target.packed is TargetModel(model).packed is target.with_features([0]).packed
    left = weakref.ref(model)
    model.lm_head.register_forward_hook(lambda *_, model=model: None)
    with torch.no_grad(), calls(target, 8):
        model(torch.arange(8)[None])
    del model, target
    gc.collect()
    assert left() is None  # and is not kept alive by it


def test_views_are_copied_and_pickled(tiny_llama: TinyLlama) -> None:
    target = TargetModel(tiny_llama())
    with torch.no_grad(), calls(target, 8):
        pass
    for view in (copy.deepcopy(target), pickle.loads(pickle.dumps(target))):
        with torch.no_grad(), calls(view, 8) as made:
            view.model(torch.arange(8)[None])
        assert len(made) == MATRICES and view.packed is not target.packed


def test_what_was_left_behind_is_taken_away(tiny_llama: TinyLlama) -> None:
    """A step may be broken off anywhere, even before it puts back what it exchanged."""
    model = tiny_llama()
    target = TargetModel(model)
    with torch.no_grad(), calls(target, 8):
        left = {
            layer: vars(layer)["forward"] for layer in model.modules() if "forward" in vars(layer)
        }
    for layer, forward in left.items():
        vars(layer)["forward"] = forward
    target.new_cache()
    with torch.no_grad(), calls(target, 8) as made:
        model(torch.arange(8)[None])
    assert len(made) == MATRICES
    assert not any("forward" in vars(layer) for layer in model.modules())


def test_an_error_leaves_the_model_as_it_was(tiny_llama: TinyLlama) -> None:
    target = TargetModel(tiny_llama())
    with torch.no_grad(), pytest.raises(KeyError), calls(target, 8):
        raise KeyError
    assert not any("forward" in vars(layer) for layer in target.model.modules())


def test_it_hangs_on_no_default_dtype(tiny_llama: TinyLlama) -> None:
    target = TargetModel(tiny_llama())
    try:
        torch.set_default_dtype(torch.float64)
        with torch.no_grad(), torch.device("meta"), calls(target, 8):
            pass
    finally:
        torch.set_default_dtype(torch.float32)
    assert target.packed_bytes > 0
