"""Compiling in the middle of a text: the same tokens, and only where it has come to pay."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_heads import HeadsConfig, MedusaModel
from medusa_heads.errors import MedusaWarning
from medusa_heads.heads import KINDS, DraftHeads
from medusa_heads.inference.models import late_compiling
from medusa_heads.inference.models.drafted import DraftedModel
from medusa_heads.inference.models.late_compiling import LateCompiling
from medusa_heads.inference.models.training_free import TrainingFreeModel
from medusa_heads.target.graphs.compiled import CompiledTarget
from medusa_heads.target.target import TargetModel
from tests.conftest import DEVICE, TinyLlama
from tests.inference.padded import padded
from tests.inference.recurrent import repeating, short_target, written

PADDING = [0, 3, 5]
DRAFTERS = ("auto", "suffix", "lookahead", "static:7", "prefix", "block")
ALIKE = ("suffix", "lookahead", "static:7", "prefix")
LATE: Any = {"compile": "auto", "compile_backend": "eager"}


@pytest.fixture(autouse=True)
def pays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compiling is paid for by some steps; the eager backend saves nothing, and is taken still."""
    monkeypatch.setenv("MEDUSA_HEADS_CACHE", str(tmp_path))
    monkeypatch.setattr(late_compiling, "_SECONDS", 0.002)
    for least in ("_LEAST_SAVED", "_LEAST_SAVED_OF_SIZES"):
        monkeypatch.setattr(late_compiling, least, -1e9)


@pytest.fixture
def steps_by_view(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many trees each view of the target has verified, once the test has begun."""
    counts = {"plain": 0, "compiled": 0}

    def count(view: type[TargetModel], name: str) -> None:
        read = view.read

        def counted(self: Any, *args: Any, **options: Any) -> Any:
            counts[name] += 1
            return read(self, *args, **options)

        monkeypatch.setattr(view, "read", counted)

    count(TargetModel, "plain")
    count(CompiledTarget, "compiled")
    return counts


def heads_for(model: Any, **settings: Any) -> DraftHeads:
    torch.manual_seed(1)
    sizes = {"hidden_size": model.config.hidden_size, "vocab_size": model.config.vocab_size}
    config = HeadsConfig(num_heads=3, **sizes, **settings)
    return KINDS[config.kind](config)


@pytest.mark.parametrize(
    ("drafter", "rows"),
    [
        # Sources of text draft beside others in "auto", too.
        pytest.param(drafter, rows, marks=marks)
        for i, drafter in enumerate(DRAFTERS)
        for j, rows in enumerate((1, 3))
        for marks in [[] if (i + j) % 2 and drafter not in ALIKE else [pytest.mark.slow]]
    ],
)
@pytest.mark.usefixtures("untraced")
def test_a_text_goes_on_in_fixed_shapes(
    tiny_llama: TinyLlama, steps_by_view: dict[str, int], drafter: str, rows: int
) -> None:
    goes_on(tiny_llama(vocab_size=24), steps_by_view, drafter, rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "rows"), [each for each in product(DRAFTERS, (1, 3)) if each != ("static:7", 1)]
)
def test_a_text_goes_on_compiled(
    tiny_llama: TinyLlama, steps_by_view: dict[str, int], drafter: str, rows: int
) -> None:
    model = tiny_llama(num_layers=1, vocab_size=24)  # each of which takes as long to trace
    goes_on(model, steps_by_view, drafter, rows)


def goes_on(
    model: Any, steps_by_view: dict[str, int], drafter: str, rows: int, backend: Any = "eager"
) -> None:
    late = LATE | {"compile_backend": backend}
    model = model.to(DEVICE)
    given = padded(PADDING[:rows], 8)
    options = {"max_new_tokens": 40, "do_sample": rows == 1, "temperature": 0.5}
    torch.manual_seed(3)
    expected_BT = model.generate(**given, **options)
    if drafter in ("static:7", "prefix", "block"):
        kind = "block" if drafter == "block" else "medusa"
        heads = heads_for(model, kind=kind, prefix_attention=drafter == "prefix")
        drafted: Any = MedusaModel(model, heads, tree="static:7", rng="transformers", **late)
    else:
        drafted = TrainingFreeModel(model, drafter, rng="transformers", **late)
    steps_by_view.update(plain=0, compiled=0)
    torch.manual_seed(3)
    assert drafted.generate(**given, **options).tolist() == expected_BT.tolist()
    assert min(steps_by_view.values()) > 3  # both views had their part of the text
    torch.manual_seed(3)
    assert drafted.generate(**given, **options).tolist() == expected_BT.tolist()
    assert steps_by_view["compiled"] > 10


def test_what_is_measured_is_the_graph_of_texts(
    tiny_llama: TinyLlama, steps_by_view: dict[str, int]
) -> None:
    """Compiling stops a text once, which goes on compiled."""
    graphs: list[Any] = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    goes_on(tiny_llama(vocab_size=24, num_layers=1), steps_by_view, "static:7", 1, count)
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore:.*verifies a chain of drafts, not a tree")
@pytest.mark.usefixtures("untraced")
def test_states_go_on_in_fixed_shapes(steps_by_view: dict[str, int]) -> None:
    """What a recurrent target holds of its text moves into the cache of fixed shape."""
    states_go_on(steps_by_view)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*verifies a chain of drafts, not a tree")
def test_states_go_on_compiled(steps_by_view: dict[str, int]) -> None:
    states_go_on(steps_by_view)


def states_go_on(steps_by_view: dict[str, int]) -> None:
    target, inputs = short_target("lfm2"), repeating()
    drafted = TrainingFreeModel(target.model, "suffix", **LATE)
    expected = written(target.model, inputs)
    steps_by_view.update(plain=0, compiled=0)
    assert torch.equal(written(drafted, inputs), expected)
    assert min(steps_by_view.values()) > 3


def test_nothing_is_compiled_before_it_pays(
    tiny_llama: TinyLlama, steps_by_view: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_compiling, "_SECONDS", 1e6)
    drafted = TrainingFreeModel(tiny_llama(vocab_size=24).to(DEVICE), "auto", **LATE)
    drafted.generate(torch.tensor([[5, 6, 7]], device=DEVICE), max_new_tokens=40)
    assert not steps_by_view["compiled"]


@pytest.mark.usefixtures("untraced")
def test_what_saves_nothing_is_kept_and_not_tried_again(
    tiny_llama: TinyLlama, steps_by_view: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_compiling, "_LEAST_SAVED_OF_SIZES", 0.15)
    monkeypatch.setattr(late_compiling, "median", lambda _: 0.9)  # too little for many sizes
    model: Any = tiny_llama(num_layers=1, vocab_size=24).to(DEVICE)
    ids_BT = torch.tensor([[5, 6, 7]], device=DEVICE)
    expected_BT: Any = model.generate(ids_BT, max_new_tokens=40)
    for _ in range(2):  # the second one reads what the first one kept
        drafted: Any = TrainingFreeModel(model, "auto", **LATE)
        assert drafted.generate(ids_BT, max_new_tokens=40).tolist() == expected_BT.tolist()
        tried = steps_by_view["compiled"]
    assert 0 < tried <= 1 + late_compiling._ROUNDS


@pytest.mark.parametrize(
    ("drafter", "compile"),
    [
        ("auto", "auto"),
        pytest.param("recycling:4", "steps", marks=pytest.mark.slow),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("auto", "recycling:4")),
    ],
)
def test_without_a_compiler_decoding_goes_on(
    drafter: str, compile: Any, tiny_llama: TinyLlama
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise OSError("no compiler here")

    model: Any = tiny_llama(num_layers=1, vocab_size=24).to(DEVICE)
    ids_BT = torch.tensor([[5, 6, 7]], device=DEVICE)
    expected_BT: Any = model.generate(ids_BT, max_new_tokens=40)
    drafted: Any = TrainingFreeModel(model, drafter, compile=compile, compile_backend=broken)
    with pytest.warns(MedusaWarning, match="goes on without torch.compile") as said:
        for _ in range(2):
            assert drafted.generate(ids_BT, max_new_tokens=40).tolist() == expected_BT.tolist()
    assert sum("goes on without" in str(each.message) for each in said) == 1


@pytest.mark.usefixtures("untraced")
def test_without_memory_for_a_second_cache_decoding_goes_on(
    tiny_llama: TinyLlama, steps_by_view: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is asked for again once decoding without has cost as much once more."""
    asked: list[Any] = []

    def full(*sizes: Any) -> Any:
        asked.append(sizes)
        raise torch.OutOfMemoryError("no room for it\nTried to allocate")

    make = CompiledTarget.new_cache
    model: Any = tiny_llama(vocab_size=24).to(DEVICE)
    ids_BT = torch.tensor([[5, 6, 7]], device=DEVICE)
    expected_BT: Any = model.generate(ids_BT, max_new_tokens=40)
    drafted: Any = TrainingFreeModel(model, "auto", **LATE)
    monkeypatch.setattr(CompiledTarget, "new_cache", full)
    with pytest.warns(MedusaWarning, match="failed: no room for it$"):
        assert drafted.generate(ids_BT, max_new_tokens=40).tolist() == expected_BT.tolist()
    assert len(asked) == 1 and set(drafted._late._spent.values()) == {0.0}
    monkeypatch.setattr(CompiledTarget, "new_cache", make)
    steps_by_view["compiled"] = 0
    assert drafted.generate(ids_BT, max_new_tokens=40).tolist() == expected_BT.tolist()
    assert steps_by_view["compiled"] > 10


@pytest.mark.parametrize("kept", [{"seconds": "soon", "share": 0.5}, {"seconds": 1.0}, {}])
def test_a_damaged_measurement_is_none(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch, kept: dict[str, Any]
) -> None:
    monkeypatch.setattr(late_compiling.Measurements, "read", lambda *_: kept)
    target = TargetModel(tiny_llama())
    compiling = LateCompiling(target, lambda: pytest.fail("made"), lambda _: pytest.fail("made"))
    assert compiling.saved == 0.25


def test_what_it_does_not_go_with_is_refused_by_name(tiny_llama: TinyLlama) -> None:
    model: Any = tiny_llama(vocab_size=24).to(DEVICE)
    with pytest.raises(ValueError, match="deterministic=True"):
        TrainingFreeModel(model, "auto", deterministic=True, **LATE)
    with pytest.raises(ValueError, match="draft model"):
        DraftedModel(model, tiny_llama(vocab_size=24), compile="auto")
    with pytest.raises(ValueError, match="compile must be"):
        TrainingFreeModel(model, "auto", compile="late")  # type: ignore[arg-type]
