"""Features: what comes out of a target's layers, read in the same forward as its hidden states."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import StoppingCriteriaList

from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.inference.engine.rows import Row, StopCheck
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.target.features import count_layers
from medusa_heads.target.graphs.compiled import CompiledTarget
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.tree import chain_shape
from tests.conftest import TinyLlama
from tests.pairs import with_slow

IDS_BT = torch.arange(20).view(2, 10)


def expected(model: Any, layers: tuple[int, ...], ids_BT: Tensor = IDS_BT) -> Tensor:
    """By transformers' own account, which counts the embeddings as the first."""
    states = model(ids_BT, output_hidden_states=True).hidden_states
    last_BTD = TargetModel(model).hidden(ids_BT)
    return torch.cat([*(states[layer + 1] for layer in layers), last_BTD], dim=-1)


@pytest.fixture
def model(tiny_llama: TinyLlama) -> Any:
    return tiny_llama(num_hidden_layers=4)


@pytest.fixture
def short(tiny_llama: TinyLlama) -> Any:
    """Each of whose layers takes time to trace."""
    return tiny_llama(num_hidden_layers=2)


def test_forwards_of_other_threads_are_neither_read_nor_changed(model: Any) -> None:
    target, others = TargetModel(model).with_features((0,)), IDS_BT + 30

    def elsewhere() -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: model(others).logits.detach()).result()

    alone = elsewhere()
    with target.capture_prompt() as prompt, target.capture_hidden() as last:
        model(IDS_BT)
        own = last()
        assert torch.equal(elsewhere(), alone)
        assert len(prompt) == 1 and torch.equal(last(), own)


def test_a_forward_that_passes_over_the_lm_head_is_told(short: Any) -> None:
    """As that of libraries which patch models, and multiply by its weight themselves."""

    def patched(input_ids: Tensor, **given: Any) -> Any:
        out = short.model(input_ids, **given)
        return SimpleNamespace(logits=out.last_hidden_state @ short.lm_head.weight.T)

    short.forward = patched
    target = TargetModel(short)
    with pytest.raises(UnsupportedArchitecture, match="does not call its lm_head"):
        target.hidden(IDS_BT)
    with (
        target.capture_hidden() as last,
        pytest.raises(UnsupportedArchitecture, match="does not call its lm_head"),
    ):
        short(IDS_BT)
        last()
    compiled = CompiledTarget(short)
    with (
        compiled.capture_hidden() as last,
        pytest.raises(UnsupportedArchitecture, match="does not call its lm_head"),
    ):
        last()


@pytest.mark.parametrize("layers", [(0,), (0, 2), (2, 1, 0)])
def test_they_come_in_order_with_the_last_hidden_state_behind(model: Any, layers: Any) -> None:
    target = TargetModel(model).with_features(layers)
    assert target.width == 64 * (len(layers) + 1) and target.hidden_size == 64
    hidden_BTX = target.hidden(IDS_BT)
    torch.testing.assert_close(hidden_BTX, expected(model, layers), rtol=0, atol=0)
    with target.capture_hidden() as last_hidden, target.capture_prompt() as prompt:
        logits_BTV = model(IDS_BT).logits
    assert logits_BTV.shape[1] == 1  # of a prompt no others are made
    assert torch.equal(prompt[0], hidden_BTX) and torch.equal(last_hidden(), hidden_BTX)
    with target.capture_hidden() as last_hidden:
        model(IDS_BT, logits_to_keep=3)
    torch.testing.assert_close(last_hidden(), hidden_BTX[:, -3:])


def test_views_of_one_model_do_not_disturb_each_other(model: Any) -> None:
    plain = TargetModel(model)
    low, high = plain.with_features([0]), plain.with_features([2])
    of_layers = [layer._forward_hooks for layer in model.model.layers]
    model(IDS_BT, output_hidden_states=True)  # which leaves hooks of transformers' own
    before = list(map(len, of_layers))
    assert plain.with_features(None) is plain and low.with_features((0,)) is low
    with low.capture_hidden() as of_low, plain.capture_hidden() as of_plain:
        with high.capture_hidden() as of_high:
            model(IDS_BT)
            assert torch.equal(of_high(), expected(model, (2,)))
        model(IDS_BT)
        assert torch.equal(of_low(), expected(model, (0,)))
        assert of_plain().shape == (2, 10, 64)
    assert torch.equal(low.with_features(None).hidden(IDS_BT), plain.hidden(IDS_BT))
    assert list(map(len, of_layers)) == before


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_flow_through_them(model: Any, checkpointing: bool) -> None:
    model.requires_grad_(True)
    if checkpointing:
        newer = getattr(model, "activation_checkpointing_enable", None)
        (newer or model.gradient_checkpointing_enable)()
        model.train()
    weight = model.model.layers[0].mlp.down_proj.weight
    target = TargetModel(model).with_features([1])
    weights_BTX = torch.randn(2, 10, 128, generator=torch.Generator().manual_seed(0))
    (ours,) = torch.autograd.grad((target.hidden_with_grad(IDS_BT) * weights_BTX).sum(), weight)
    model.eval()
    (theirs,) = torch.autograd.grad((expected_with_grad(model) * weights_BTX).sum(), weight)
    torch.testing.assert_close(ours, theirs)


def expected_with_grad(model: Any) -> Tensor:
    out = model(IDS_BT, output_hidden_states=True).hidden_states
    return torch.cat([out[2], out[-1]], dim=-1)  # the last of which transformers has normed


def verify(target: TargetModel, past: int = 6) -> None:
    """The end of a text as a chain of drafts behind its beginning."""
    ids_1T = IDS_BT[:1]
    rows = [Row(0, 1, ids_1T[0], StopCheck(StoppingCriteriaList()))]
    state = DecodingState(rows, target.new_cache(1, 20), [0])
    target.model(ids_1T[:, :past], use_cache=True, **{target.cache_argument: state.cache})
    state.lengths = [past]
    state.verify(target, chain_shape(10 - past).tree(ids_1T[:, past:]))


FEATURES = [[0], [1, 0]]


@pytest.mark.parametrize(
    ("layers", "used_before", "features"),
    with_slow([(2, True, FEATURES[:1])], [(3, True, FEATURES), (3, False, FEATURES)]),
)
@torch.no_grad()
def test_compiled_views_of_one_model(
    tiny_llama: TinyLlama, layers: int, used_before: bool, features: list[list[int]]
) -> None:
    """Each with its own features, whichever was compiled first, reading or not."""
    short: Any = tiny_llama(num_hidden_layers=layers)
    plain = CompiledTarget(short, "eager")
    if used_before:
        verify(plain)
    views = [plain, *map(plain.with_features, features)]
    assert plain.with_features(features[0]) is views[1]  # whose graphs are made once
    for _ in range(2):
        for view in views:
            with view.capture_hidden() as last_hidden:
                verify(view)
                read_1TX = last_hidden()
            expected_1TX = expected(short, view.features, IDS_BT[:1])[:, 6:]
            torch.testing.assert_close(read_1TX, expected_1TX)


@torch.no_grad()
def test_a_target_that_goes_while_another_is_compiled(short: Any) -> None:
    others: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        others.clear()
        if gc.isenabled():
            gc.collect()
        return graph.forward

    target = CompiledTarget(short, backend, (0,))
    others.append(CompiledTarget(short, "eager", (0,)))
    others[0].itself = others[0]  # so that only a collection finds it
    with target.capture_hidden() as last_hidden:
        verify(target)
        torch.testing.assert_close(last_hidden(), expected(short, (0,), IDS_BT[:1])[:, 6:])
    assert gc.isenabled()


def test_layers_that_are_not_there_are_refused(model: Any) -> None:
    for make in (TargetModel, CompiledTarget):
        with pytest.raises(ValueError, match="asks for layer 4, and LlamaForCausalLM has the lay"):
            make(model).with_features([1, 4])
    model.model.more = nn.ModuleList(nn.Linear(1, 1) for _ in range(4))
    with pytest.raises(
        UnsupportedArchitecture, match=r"2 lists of 4 modules .* leave features out"
    ):
        TargetModel(model).with_features([1])
    with pytest.raises(UnsupportedArchitecture, match="leave usual_features out"):
        count_layers(model)
    model.config.num_hidden_layers = 5
    with pytest.raises(UnsupportedArchitecture, match="has no lists of 5 modules"):
        TargetModel(model).with_features([1])


def test_a_layer_that_puts_out_something_else_is_refused(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda *_: torch.zeros(4, 2, 10, 64))
    target = TargetModel(model).with_features([1])
    model.model.layers[2].register_forward_pre_hook(
        lambda _, args: (torch.zeros(2, 10, 64), *args[1:])
    )
    with pytest.raises(UnsupportedArchitecture, match=r"puts out \[4, 2, 10, 64\], expected one"):
        target.hidden(IDS_BT)
