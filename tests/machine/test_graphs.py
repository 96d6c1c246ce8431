"""Within a text a graph is called again without what torch.compile asks before each call."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from medusa_heads import MedusaHeads, MedusaModel
from medusa_heads.heads import HeadsConfig
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.inference.models.training_free import TrainingFreeModel
from medusa_heads.machine.attention import seen_words
from medusa_heads.machine.graphs import NotingBackend, look, noted
from medusa_heads.target.graphs.compiled import CompiledTarget
from tests.conftest import TinyLlama
from tests.inference.on_device import with_heads
from tests.inference.recurrent import prompt, short_target, written
from tests.pairs import with_slow

IDS = torch.arange(1, 13)[None]
OPTIONS: Any = {"do_sample": False, "attention_mask": torch.ones_like(IDS), "max_new_tokens": 40}


def compiled(function: Callable[..., Any], backend: Any = "eager") -> Callable[..., Any]:
    torch._dynamo.reset()
    made: Callable[..., Any] = torch.compile(
        function, fullgraph=True, dynamic=False, backend=NotingBackend(backend)
    )
    return made


def test_a_call_is_made_again_as_it_was() -> None:
    counter, by = torch.zeros(3), torch.ones(3)

    def count() -> None:
        counter.add_(by)

    step = compiled(count)
    with noted() as calls:
        step()
    again = calls[0].whole()
    assert again is not None
    for _ in range(3):
        again()
    assert counter.tolist() == [4.0] * 3
    assert len(calls) == 1


def test_what_puts_something_out_is_not_made_again_as_it_was() -> None:
    with noted() as calls:
        compiled(lambda x: x + 1)(torch.ones(3))
    assert calls[0].whole() is None


def test_a_call_with_other_tensors() -> None:
    weight = torch.tensor([1.0, 2.0, 3.0])

    def function(x: Tensor, unused: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x * weight, {"y": y + weight}

    x, unused, y = (torch.full((3,), float(n)) for n in range(3))
    with noted() as calls:
        product, others = compiled(function)(x, unused, y)
    again = calls[0].between([x, unused, y], [others["y"], product])
    assert again is not None
    total, product = again([torch.full((3,), float(n)) for n in (10, 20, 30)])
    assert product.tolist() == [10.0, 20.0, 30.0]
    assert total.tolist() == [31.0, 32.0, 33.0]
    assert calls[0].between([x], [total]) is None  # no result of that call


def test_what_a_graph_knows_of_a_tensor() -> None:
    x = torch.ones(3, 4)
    assert look(x) == look(x + 1)
    with torch.inference_mode():
        others = [torch.ones(3, 4)]
    for other in (*others, x.T, x[:, :3], x.double(), torch.ones(4, 3).T):
        assert look(other) != look(x)


def test_a_backend_is_known_by_its_name() -> None:
    assert NotingBackend("eager") == NotingBackend("eager") != NotingBackend("aot_eager")
    assert NotingBackend("eager").__name__ == "eager"
    with pytest.raises(torch._dynamo.exc.InvalidBackend, match="nonsense"):
        NotingBackend("nonsense")


def test_a_backend_of_ones_own_is_reset() -> None:
    class Backend:
        resets = 0

        def __call__(self, module: Any, _: Any) -> Any:
            return module.forward

        def reset(self) -> None:
            self.resets += 1

    backend = Backend()
    compiled(lambda x: x + 1, backend)(torch.ones(3))
    torch.compiler.reset()
    assert backend.resets == 1


def test_weights_may_be_swapped_behind_a_text(tiny_llama: TinyLlama) -> None:
    linear = nn.Linear(2, 2, bias=False)
    torch.compile(linear.forward, backend="eager")(torch.ones(1, 2))
    try:
        torch.utils.swap_tensors(linear.weight, nn.Parameter(torch.ones(2, 2)))
    except RuntimeError:
        pytest.skip("this torch keeps hold of all weights that it has compiled with")
    model: Any = tiny_llama(num_layers=1)
    TrainingFreeModel(model, "recycling:3", compile=True, compile_backend="eager").generate(
        IDS, **OPTIONS
    )
    weight = model.lm_head.weight
    torch.utils.swap_tensors(weight, nn.Parameter(weight.detach().clone(), requires_grad=False))


@pytest.mark.slow
@pytest.mark.skipif("lfm3" not in CONFIG_MAPPING, reason="transformers before 5.20 has no LFM3")
@pytest.mark.filterwarnings("ignore:.*verifies a chain of drafts, not a tree")
def test_layers_that_take_no_mask() -> None:
    target = short_target("lfm3")
    medusa: Any = TrainingFreeModel(target.model, "suffix", compile=True, compile_backend="eager")
    inputs = prompt(12)
    assert torch.equal(written(medusa, inputs), written(target.model, inputs))


@pytest.mark.filterwarnings("ignore:decoding goes on without torch.compile")
def test_without_a_compiler_steps_are_usual_ones(tiny_llama: TinyLlama) -> None:
    """And so something is learnt of their seconds."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    target = CompiledTarget(tiny_llama(num_layers=1), broken)
    TrainingFreeModel(target, "recycling:3").generate(IDS, **OPTIONS)
    assert not target.compiles and not target.looks


def test_nothing_is_noted_outside() -> None:
    step = compiled(lambda x: x + 1)
    with noted() as calls:
        pass
    step(torch.ones(3))
    assert not calls


def counting(target: Any, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One for each call that torch.compile looks at."""
    asked: list[None] = []
    run = target.run

    def count(*args: Any, **kwargs: Any) -> Any:
        asked.append(None)
        return run(*args, **kwargs)

    monkeypatch.setattr(target, "run", count)
    return asked


@pytest.mark.parametrize("features", [pytest.param(None, marks=pytest.mark.slow), [0, 1]])
def test_each_shape_of_a_text_is_asked_about_once(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch, features: list[int] | None
) -> None:
    model: Any = tiny_llama(vocab_size=24, num_layers=2)
    heads = MedusaHeads.from_target(model, HeadsConfig(num_heads=3, features=features))
    medusa: Any = MedusaModel(model, heads, tree="7", compile=True, compile_backend="eager")
    asked = counting(medusa.target, monkeypatch)
    for ids in (IDS, IDS.flip(1)):
        asked.clear()
        expected = model.generate(ids, **OPTIONS)
        assert torch.equal(medusa.generate(ids, **OPTIONS), expected)
        assert medusa.last_stats.forwards > 10
        assert len(asked) == 1


@pytest.mark.parametrize(
    "tree",
    ["dynamic:7", *(pytest.param(tree, marks=pytest.mark.slow) for tree in ("7", "chain", "auto"))],
)
def test_so_is_each_whole_step(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch, tree: str
) -> None:
    """What it reads and writes lies where it lay, and it puts nothing out."""
    model: Any = tiny_llama(num_layers=1)
    medusa: Any = with_heads(model)
    medusa.use_tree(tree)
    asked = counting(medusa.target, monkeypatch)
    expected = model.generate(IDS, **OPTIONS)
    for _ in range(1 if tree == "auto" else 2):
        asked.clear()
        assert torch.equal(medusa.generate(IDS, **OPTIONS), expected)
        assert 1 <= len(asked) <= len(medusa.drafter.sizes or [7])
        assert medusa.last_stats.forwards > 10


@pytest.mark.parametrize(("whole", "texts"), with_slow([(True, 2)], [(True, 3), (False, 3)]))
def test_a_model_that_was_changed_between_two_texts_is_asked_about(
    tiny_llama: TinyLlama, whole: bool, texts: int
) -> None:
    model: Any = tiny_llama(vocab_size=24, num_layers=1)
    target = CompiledTarget(model, "eager", whole_steps=whole)
    medusa: Any = TrainingFreeModel(target, "recycling:3")  # of one size, a graph each time
    made = []
    for act in (nn.SiLU(), nn.ReLU(), nn.SiLU())[:texts]:
        for layer in model.model.layers:
            layer.mlp.act_fn = act
        made.append(medusa.generate(IDS, **OPTIONS))
        assert torch.equal(made[-1], model.generate(IDS, **OPTIONS))
    assert not torch.equal(made[0], made[1])


@pytest.mark.slow
def test_features_are_read_where_others_were_compiled_before(tiny_llama: TinyLlama) -> None:
    """What was compiled without them, by what is gone since, serves none that asks for them."""
    model = tiny_llama(vocab_size=24)
    torch._dynamo.reset()
    TrainingFreeModel(CompiledTarget(model, "eager"), "recycling:7").generate(IDS, **OPTIONS)
    gc.collect()
    heads = MedusaHeads.from_target(model, HeadsConfig(num_heads=3, features=[0, 1]))
    plain = MedusaModel(model, heads, tree="7")
    other = MedusaModel(model, heads, tree="7", compile=True, compile_backend="eager")
    steps = list(zip(hidden_states(plain), hidden_states(other), strict=True))
    assert len(steps) > 10
    for own_BX, compiled_BX in steps:
        torch.testing.assert_close(compiled_BX, own_BX)


def hidden_states(medusa: MedusaModel) -> list[Tensor]:
    """Those that heads read, of each step of a text."""
    read: list[Tensor] = []
    propose = medusa.drafter.propose

    def note(state: DecodingState) -> Any:
        read.append(state.hidden_BD.clone())
        return propose(state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(medusa.drafter, "propose", note)
        medusa.generate(IDS, **OPTIONS)
    return read


def test_words_of_a_mask_are_made_once() -> None:
    made: list[int] = []

    def counted(graph: torch.fx.GraphModule, _: Any) -> Any:
        made.append(len(graph.graph.find_nodes(op="call_function", target=seen_words)))
        return graph.forward

    def of_layers(mask: Tensor, other: Tensor) -> Tensor:
        words: Tensor = 2 * seen_words(mask) + seen_words(other) - seen_words(mask)
        return words

    masks = torch.zeros(2, 1, 1, 3, 8)
    masks[0, ..., 5] = torch.finfo(torch.float32).min
    found = compiled(of_layers, counted)(*masks)
    assert made == [2]
    assert torch.equal(found, seen_words(masks[0]) + seen_words(masks[1]))
