"""Heads that read features: what they draft from is what they learnt from, wherever it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_heads import MedusaModel, TargetModel, TrainingFreeModel
from medusa_heads.inference.models.assisted import AssistedModel
from medusa_heads.target.graphs.compiled import CompiledTarget
from tests.conftest import DEVICE, TinyLlama
from tests.inference.planted import BUSHY
from tests.inference.recurrent import CHAIN, short_target
from tests.inference.reference import reference
from tests.inference.rereading import RereadingDrafter, random_heads, run
from tests.pairs import alternately, with_slow

SHAPES: dict[str, dict[str, Any]] = {
    "medusa": {"features": [0, 2]},
    "hydra": {"kind": "hydra", "features": [2, 0]},
    "prefix": {"prefix_attention": True, "features": [1]},
    "induction": {"kind": "hydra", "induction": True, "features": [1]},
    "block": {"kind": "block", "features": [0, 2]},
}
OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
VIEWS: dict[str, Callable[[Any], TargetModel]] = {
    "plain": TargetModel,
    "compiled": partial(CompiledTarget, backend="eager"),
}


@cache
def view_of(name: str, model: Any, features: tuple[int, ...]) -> TargetModel:
    """Traced once for all heads that read the same features."""
    return VIEWS[name](model).with_features(features)


@pytest.fixture(scope="module", autouse=True)
def views() -> Iterator[None]:
    """Compiled ones hold caches: they go with the last of these tests."""
    yield
    view_of.cache_clear()


def ragged(padding: tuple[int, ...] = (0, 4, 2), length: int = 9) -> dict[str, Tensor]:
    """Texts of unlike lengths."""
    generator = torch.Generator().manual_seed(5)
    ids_BT = torch.randint(1, 190, (len(padding), length), generator=generator).to(DEVICE)
    mask_BT = torch.arange(length) >= torch.tensor(padding)[:, None]
    return {"input_ids": ids_BT, "attention_mask": mask_BT.long().to(DEVICE)}


@torch.no_grad()
def reread(
    model: Any,
    view: TargetModel,
    shape: dict[str, Any],
    read: dict[str, Tensor],
    choices: Any = BUSHY,
    **more: Any,
) -> None:
    """Decode planted drafts with a view that reads features; compare the text, and at every step
    what heads read with what they make of the whole text."""
    heads, length = random_heads(model, **shape), read["input_ids"].shape[1]
    references = reference(model, **read, **OPTIONS)[:, length:].tolist()
    # A token that ends one row early: rows leave the batch at different steps.
    options = OPTIONS | {"eos_token_id": references[-1][11]}
    drafter = RereadingDrafter(heads, TargetModel(model), references, 190, choices, 0.6)
    custom = partial(run, view, drafter)
    got_BT = model.generate(**read, **options, **more, custom_generate=custom)
    assert torch.equal(got_BT, reference(model, **read, **options))
    assert drafter.compared > 5 * len(read["input_ids"])


@pytest.fixture(scope="module")
def model(tiny_llama: TinyLlama) -> Any:
    return tiny_llama(num_hidden_layers=3).to(DEVICE)


# These are compiled, and read a prompt as a whole, from a recurrent state.
FROM_A_STATE = (("hydra", "compiled"), ("block", "compiled"))


@pytest.mark.parametrize(
    ("shape", "view", "chunk"),
    [
        # Each of these is in a quick one, here or from a recurrent state.
        pytest.param(shape, view, chunk, marks=[] if quick else [pytest.mark.slow])
        for i, shape in enumerate(SHAPES)
        for j, view in enumerate(VIEWS)
        for k, chunk in enumerate((None, 4))
        for meet in [(i + j + k) % 2 == 0 and (shape, view) not in FROM_A_STATE]
        for quick in [meet and (shape, view) != ("prefix", "compiled")]
    ],
)
def test_drafting_reads_what_training_does(
    model: Any, shape: str, view: str, chunk: int | None
) -> None:
    target = view_of(view, model, tuple(SHAPES[shape]["features"]))
    more = {"prefill_chunk_size": chunk} if chunk else {}
    reread(model, target, SHAPES[shape], ragged(), **more)


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(("shape", "view"), alternately(SHAPES, VIEWS, slow=("hydra",)))
def test_from_a_recurrent_state_too(shape: str, view: str) -> None:
    from_a_state(shape, view)


@pytest.mark.slow
def test_from_a_recurrent_state_in_a_graph() -> None:
    view_of.cache_clear()
    from_a_state("block", "compiled")


def from_a_state(shape: str, view: str) -> None:
    plain = short_target("lfm2")
    layers = plain.config.num_hidden_layers
    config = SHAPES[shape] | {"features": list(range(layers))[:: layers - 1]}
    target = view_of(view, plain.model, tuple(config["features"]))
    reread(plain.model, target, config, ragged((0, 3)), CHAIN)


class Shifted(TargetModel):
    """Hands on the features of the token before, with the right last hidden state."""

    @contextmanager
    def capture_hidden(self) -> Iterator[Callable[[], Tensor]]:
        with super().capture_hidden() as last_hidden:
            yield lambda: self._shifted(last_hidden())

    @contextmanager
    def capture_prompt(self) -> Iterator[list[Tensor]]:
        with super().capture_prompt() as seen:
            yield seen
        seen[:] = map(self._shifted, seen)

    def _shifted(self, hidden_BTX: Tensor) -> Tensor:
        features, last_BTD = hidden_BTX.split([hidden_BTX.shape[2] - 64, 64], dim=2)
        return torch.cat([features.roll(1, dims=1), last_BTD], dim=2)


@pytest.mark.parametrize(("shape", "wrong"), alternately(SHAPES, ("layer", "position")))
def test_features_of_another_place_are_noticed(model: Any, shape: str, wrong: str) -> None:
    """The negative control: what was compared above differs."""
    layers = SHAPES[shape]["features"]
    if wrong == "layer":
        target = TargetModel(model).with_features([(layer + 1) % 3 for layer in layers])
    else:
        target = Shifted(model).with_features(layers)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        reread(model, target, SHAPES[shape], ragged())


@pytest.mark.parametrize("compile", with_slow([True], [False]))
@pytest.mark.usefixtures("untraced")
def test_several_heads_on_one_target(tiny_llama: TinyLlama, compile: bool) -> None:
    """Each reads its own features, in turns, and so do drafters that read none."""
    target = tiny_llama(num_hidden_layers=3).to(DEVICE)
    read: Any = ragged((0,))
    expected_BT = target.generate(**read, **OPTIONS)
    options: dict[str, Any] = {"compile": compile, "compile_backend": "eager"}
    first = MedusaModel(target, random_heads(target, features=[0]), tree=6, **options)
    second = MedusaModel(first.target, random_heads(target, features=[1, 2]), tree=6)
    plain = MedusaModel(second.target, random_heads(target), tree=6)
    free = TrainingFreeModel(first.target, "suffix")
    models: list[AssistedModel] = [first, second, plain, free]
    views = [each.target for each in models]
    assert [view.features for view in views] == [(0,), (1, 2), (), ()]
    assert len({type(view) for view in views}) == 1  # a compiled one stays so
    for each in 2 * models:
        got_BT: Any = each.generate(**read, **OPTIONS)
        assert torch.equal(got_BT, expected_BT)


def test_features_that_a_target_does_not_have_are_refused(tiny_llama: TinyLlama) -> None:
    with pytest.raises(ValueError, match="features asks for layer 3, and LlamaForCausalLM has"):
        MedusaModel(tiny_llama(), random_heads(tiny_llama(), features=[3]))
