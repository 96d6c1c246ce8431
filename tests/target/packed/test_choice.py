"""No packed matrices where they do not pay, are not wanted, find no room, or would be wrong."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import nn

from medusa_heads import HeadsConfig, MedusaModel, new_heads
from medusa_heads.machine.kernels import has_packed_products
from medusa_heads.target.packed import layer as layer_module
from medusa_heads.target.packed import matrices as module
from medusa_heads.target.packed.matrices import PackedMatrices, unpacked
from medusa_heads.target.target import TargetModel
from tests.conftest import TinyLlama
from tests.packing import MATRICES, calls

pytestmark = pytest.mark.skipif(
    not has_packed_products(torch.float32), reason="this build of torch packs no matrix"
)


@pytest.fixture(autouse=True)
def every_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALLEST", 1)
    monkeypatch.setattr(module, "turned_gain", lambda *_: 1.0)


def test_nothing_is_packed_where_it_does_not_pay_or_find_room(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in [("packed_gain", lambda *_: 1.24), ("SMALLEST", 1 << 20)]:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            target = TargetModel(tiny_llama())
            with torch.no_grad(), calls(target, 8) as made:
                target.model(torch.arange(8)[None])
            assert not made and target.packed is not None and not target.packed.rows
    needed = sum(p.nbytes for p in tiny_llama().parameters() if p.dim() == 2) - 199 * 64 * 4
    for free, packed in [(4 * needed, MATRICES), (4 * needed - 1, 0), (None, MATRICES)]:
        monkeypatch.setattr(module, "free_memory", lambda _, free=free: free)
        target = TargetModel(tiny_llama())
        with torch.no_grad(), calls(target, 8) as made:
            target.model(torch.arange(8)[None])
        assert len(made) == packed and target.packed_bytes == (needed if packed else 0)
    # Those that are there already need no further room.
    monkeypatch.setattr(module, "free_memory", lambda _: 4 * needed)
    target = TargetModel(tiny_llama())
    for free in (4 * needed, 0):
        monkeypatch.setattr(module, "free_memory", lambda _, free=free: free)
        target.new_cache()
        with torch.no_grad(), calls(target, 8) as made:
            target.model(torch.arange(8)[None])
        assert len(made) == MATRICES


def test_the_heaviest_kinds_of_matrices_are_measured(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    gains = {(199, 64): 2.0, (128, 64): 1.0}
    asked = []

    def gain(dtype: torch.dtype, outputs: int, inputs: int, use: str) -> float:
        asked.append((outputs, inputs, use))
        return gains[outputs, inputs]

    monkeypatch.setattr(module, "packed_gain", gain)
    target = TargetModel(tiny_llama(num_layers=1))
    for _ in range(2):  # asked once, for all texts
        target.new_cache()
        with torch.no_grad(), calls(target, 8) as made:
            target.model(torch.arange(8)[None])
        kinds = [(128, 64), (199, 64)]
        assert asked == [(*kind, use) for kind in kinds for use in ("decode", "two", "few")]
        assert len(made) == 1
    gains.update({(199, 64): 1.0, (128, 64): 2.0})  # and all others do as the heaviest
    target = TargetModel(tiny_llama(num_layers=1))
    with torch.no_grad(), calls(target, 8) as made:
        target.model(torch.arange(8)[None])
    assert len(made) == 7


@pytest.mark.parametrize(
    ("gains", "least", "most"),
    [
        ({"two": 1.3, "few": 2.0}, 2, 32),
        ({"few": 2.0}, 4, 32),
        ({"two": 1.3, "few": 1.1}, 2, 32),
        ({"two": 1.3}, 2, 7),
        ({"decode": 1.2, "two": 1.3, "few": 1.3}, 1, 32),
        ({"decode": 2.0, "two": 1.2, "few": 1.2}, 1, 0),
    ],
)
def test_for_how_many_rows(
    tiny_llama: TinyLlama,
    monkeypatch: pytest.MonkeyPatch,
    gains: dict[str, float],
    least: int,
    most: int,
) -> None:
    """On some processors torch's own product of two rows is fast, on others that of eight, or of
    one alone."""
    monkeypatch.setattr(module, "packed_gain", lambda *of: gains.get(of[-1], 1.0))
    target = TargetModel(tiny_llama())
    for rows in (1, 2, 3, 4, 7, 8, 32, 33):
        with torch.no_grad(), calls(target, rows) as made:
            target.model(torch.arange(rows)[None])
        assert len(made) == (MATRICES if least <= rows <= most else 0)


def test_one_row_is_multiplied_by_the_columns_of_wide_matrices(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are measured, and those that are at least as wide as the heaviest: of a layer its
    gate and what lies beside, and the lm_head."""
    monkeypatch.setattr(module, "packed_gain", lambda *_: 1.0)
    for gain, wide in ((1.14, 0), (1.2, 2 * 2 + 1)):
        monkeypatch.setattr(module, "turned_gain", lambda *_, gain=gain: gain)
        target = TargetModel(tiny_llama())
        held = [layer for layer in target.model.modules() if isinstance(layer, nn.Linear)]
        most = [layer.weight for layer in held if layer.out_features >= 2 * layer.in_features]
        assert len(most) == 2 * 2 + 1
        with torch.no_grad():
            expected_11V = target.model(torch.tensor([[7]])).logits
            for rows, times in ((1, 1), (2, 0)):
                with calls(target, rows) as made:
                    got_1TV = target.model(torch.full((1, rows), 7)).logits
                assert len(made) == wide * times
        torch.testing.assert_close(got_1TV[:, :1], expected_11V, rtol=1e-4, atol=1e-4)
        assert target.packed_bytes == bool(wide) * sum(weight.nbytes for weight in most)


def test_a_text_of_single_tokens_is_that_of_generate(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "turned_gain", lambda *_: 2.0)
    model = tiny_llama()
    inputs: dict[str, Any] = {"input_ids": torch.arange(7, 19)[None], "do_sample": False}
    inputs["max_new_tokens"] = 20
    expected = model.generate(**inputs).tolist()
    plain: Any = MedusaModel(model, new_heads(TargetModel(model), HeadsConfig()), tree="none")
    assert plain.generate(**inputs).tolist() == expected
    # A negative control: by other weights than the model's, the text is another one.
    for packed in plain.target.packed._packed.values():
        packed._turned_DO = torch.zeros_like(packed._own().weight.t())
        packed.look = lambda: None
    assert plain.generate(**inputs).tolist() != expected


def test_gradients_and_autocast_take_the_models_own(tiny_llama: TinyLlama) -> None:
    target = TargetModel(tiny_llama())
    with calls(target, 8) as made:
        target.model(torch.arange(8)[None])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), calls(target, 8) as made_too:
        target.model(torch.arange(8)[None])
    with torch.no_grad(), calls(target, 8) as made_within, torch.autocast("cpu", torch.bfloat16):
        target.model(torch.arange(8)[None])
    assert not made_within
    # Another thread may learn while a text takes a step.
    with torch.no_grad(), calls(target, 8) as made_then, torch.enable_grad():
        target.model(torch.arange(8)[None]).logits.sum().backward()
    assert not made and not made_too and not made_then
    assert all(parameter.grad is not None for parameter in target.model.parameters())


def test_what_its_user_compiled_of_a_model_keeps_its_own(tiny_llama: TinyLlama) -> None:
    model = tiny_llama()
    target, ids_1T = TargetModel(model), torch.arange(8)[None]
    expected_1TV = model(ids_1T).logits
    for layer in model.model.layers:
        layer.mlp.compile(backend="eager")
    with torch.no_grad(), calls(target, 8) as made:
        torch.testing.assert_close(model(ids_1T).logits, expected_1TV, rtol=1e-4, atol=1e-4)
    assert len(made) == MATRICES - 2 * 3
    # Prompts and trees are of other lengths, for all of which torch.compile soon makes one graph.
    inputs: Any = {"input_ids": torch.arange(20)[None], "max_new_tokens": 24, "do_sample": False}
    medusa: Any = MedusaModel(model, new_heads(target, HeadsConfig(num_heads=2)), tree=8)
    assert medusa.generate(**inputs).tolist() == model.generate(**inputs).tolist()


def test_parameters_of_another_kind_are_left_alone(tiny_llama: TinyLlama) -> None:
    class Doubled(nn.Parameter):
        pass

    model = tiny_llama()
    model.lm_head.weight = Doubled(model.lm_head.weight.data)
    with torch.no_grad(), calls(TargetModel(model), 8) as made:
        model(torch.arange(8)[None])
    assert len(made) == MATRICES - 1


def test_layers_of_another_dtype_are_asked_about_alone(tiny_llama: TinyLlama) -> None:
    model = tiny_llama()
    model.model.layers[0].self_attn.k_proj.double()  # the lightest kind, and none has kernels
    target = TargetModel(model)
    assert target.packed is not None and len(target.packed._chosen()) == MATRICES - 1


def test_rows_are_those_of_the_dtype_that_layers_have_by_now(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "packed_gain", lambda dtype, *_: 2.0 * has_packed_products(dtype))
    monkeypatch.setattr(module, "turned_gain", lambda *_: 2.0)
    target = TargetModel(tiny_llama())
    for rows in (8, 1):
        target.new_cache()
        with torch.no_grad(), calls(target, rows) as made:
            target.model(torch.arange(rows)[None])
        assert made
        target.model.double()  # whose wide matrices are turned for one row, and none is packed


def test_sparse_weights_are_left_alone(tiny_llama: TinyLlama) -> None:
    model = tiny_llama()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.data.to_sparse_csr())
    packed = TargetModel(model).packed
    assert packed is not None and model.lm_head not in packed._chosen()


def test_a_kernel_that_is_wrong_here_is_done_without(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = layer_module.packed_product
    monkeypatch.setattr(layer_module, "packed_product", lambda *args: product(*args) + 1)
    model = tiny_llama()
    with torch.no_grad():
        expected_1TV = model(torch.arange(8)[None]).logits
        with calls(TargetModel(model), 8) as made:
            assert torch.equal(model(torch.arange(8)[None]).logits, expected_1TV)
    assert not made


def test_layers_that_accelerate_runs_are_left_to_it(tiny_llama: TinyLlama) -> None:
    whole, model = TargetModel(tiny_llama()), tiny_llama()
    cpu_offload(model, execution_device=torch.device("cpu"))
    target = TargetModel(model)
    with torch.no_grad(), calls(target, 8) as made:
        logits_1TV = model(torch.arange(8)[None]).logits
    assert not made
    with torch.no_grad():
        torch.testing.assert_close(logits_1TV, whole.model(torch.arange(8)[None]).logits)


def test_what_must_not_hang_on_a_clock_packs_nothing(tiny_llama: TinyLlama) -> None:
    model = tiny_llama()
    heads = new_heads(TargetModel(model), HeadsConfig(num_heads=2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "packed_gain", None)  # which is not asked
        made = MedusaModel(model, heads, tree="8", deterministic=True)
        made.generate(torch.arange(9)[None], max_new_tokens=12)
    assert made.target.packed is None and not PackedMatrices.of(model).held_bytes
    assert MedusaModel(model, heads, tree="8").target.packed is not None
    for how in (False, True, "steps"):
        made = MedusaModel(model, heads, tree="8", compile=how, deterministic=True)
        assert made.target.packed is None


def test_two_threads_leave_each_other_what_they_multiply_by(tiny_llama: TinyLlama) -> None:
    """Else a graph that one of them makes would change while it is made."""
    target = TargetModel(tiny_llama())
    layers = [each for each in target.model.modules() if isinstance(each, nn.Linear)]
    assert target.packed is not None
    with torch.no_grad(), ExitStack() as second:
        with target.packed.instead(8):
            second.enter_context(target.packed.instead(9))
        assert all("forward" in vars(layer) for layer in layers)
        second.close()
        assert not any("forward" in vars(layer) for layer in layers)


def test_a_thread_that_does_without_them_is_alone(tiny_llama: TinyLlama) -> None:
    target = TargetModel(tiny_llama())
    with unpacked(), ThreadPoolExecutor(1) as other:
        assert target.packed is None
        assert other.submit(lambda: target.packed).result() is not None
        assert not target.without_packed().packs
    assert target.packed is not None


def test_layers_are_known_by_where_their_weights_lie_now(tiny_llama: TinyLlama) -> None:
    target = TargetModel(tiny_llama())
    with torch.no_grad(), calls(target, 8):
        before = len(layer_module._placed)
    for _ in range(3):
        for layer in target.model.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.data = layer.weight.data.clone()
        assert target.packed is not None
        target.packed.look_again()
        with torch.no_grad(), calls(target, 8):
            assert len(layer_module._placed) <= before
