"""The words for trees, and trees sized by the machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_heads import HeadsConfig, MedusaHeads, MedusaModel, TargetModel
from medusa_heads.inference.adapt import measure
from medusa_heads.inference.drafters.blended import BlendedDrafter
from medusa_heads.inference.drafters.head_trees import DynamicDrafter, MedusaDrafter
from medusa_heads.inference.plan import tree_size
from medusa_heads.inference.plan.tree_size import TreeSize, best_tree, tune
from medusa_heads.inference.plan.trees import TreeSpec, make_drafter, read_choices, write_choices
from medusa_heads.trees.statistics import HeadStatistics
from tests.conftest import TinyLlama
from tests.inference.recurrent import tiny_target
from tests.pairs import alternately


@pytest.fixture(scope="module")
def heads(tiny_llama: TinyLlama) -> MedusaHeads:
    return MedusaHeads.from_target(tiny_llama(), HeadsConfig(num_heads=3))


@pytest.fixture(scope="module")
def statistics() -> HeadStatistics:
    generator = torch.Generator().manual_seed(0)
    ranks_SK = (torch.rand(400, 3, generator=generator) ** 3 * 8).long()
    measured = HeadStatistics.from_ranks(ranks_SK)
    measured.dynamic_tokens_per_step = {4: 2.0, 16: 2.6}
    return measured


@pytest.mark.parametrize(
    ("spec", "choices"),
    [
        ("chain", [(0,), (0, 0), (0, 0, 0)]),
        ("chain:2", [(0,), (0, 0)]),
        ("none", []),
        ("cartesian:2,1", [(0,), (0, 0), (1,), (1, 0)]),
        ([[0], [1]], [(0,), (1,)]),
    ],
)
def test_explicit_trees(heads: MedusaHeads, spec: TreeSpec, choices: list[Any]) -> None:
    drafter = make_drafter(spec, heads, None)
    assert isinstance(drafter, MedusaDrafter)
    assert drafter.shape.choices == choices


@pytest.mark.parametrize("spec", [12, "12", "static:12"])
def test_static_trees_come_from_statistics(
    heads: MedusaHeads, statistics: HeadStatistics, spec: TreeSpec
) -> None:
    drafter = make_drafter(spec, heads, statistics)
    assert isinstance(drafter, MedusaDrafter)
    assert sorted(drafter.shape.choices) == sorted(statistics.choices(12))
    assert drafter.num_nodes == 13


def test_dynamic_trees(heads: MedusaHeads, statistics: HeadStatistics) -> None:
    drafter = make_drafter("dynamic:20", heads, statistics)
    assert isinstance(drafter, DynamicDrafter)
    assert drafter.num_nodes == 21


def test_a_chain_only_target_gets_the_best_chain_of_any_tree(
    heads: MedusaHeads, statistics: HeadStatistics
) -> None:
    for spec in (16, "dynamic:16", "cartesian:3,2"):
        drafter = make_drafter(spec, heads, statistics, chain_only=True)
        assert isinstance(drafter, MedusaDrafter)
        assert all(not any(path) for path in drafter.shape.choices)


@pytest.mark.parametrize(
    "spec",
    [0, "0", "static:x", "cartesian:2,0", "dynamic:0", "bushy", "9.5", "\N{SUPERSCRIPT TWO}"],
)
def test_unknown_words_are_refused(heads: MedusaHeads, spec: TreeSpec) -> None:
    with pytest.raises(ValueError, match=r"a tree has|tree must be"):
        make_drafter(spec, heads, None)


def test_medusa_choices_files(
    heads: MedusaHeads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "choices.json"
    write_choices(path, [(0,), (0, 1), (2,)])
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_choices(path) == read_choices("~/choices.json") == [[0], [0, 1], [2]]
    drafter = make_drafter(str(path), heads, None)
    assert isinstance(drafter, MedusaDrafter) and drafter.shape.num_nodes == 4
    for content in ("[[0], [true]]", '{"a": 1}', "[["):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"choices\.json"):
            read_choices(path)


@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_tune_measures_once_and_keeps_the_result(
    tiny_llama: TinyLlama,
    statistics: HeadStatistics,
    quiet: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    batch_size: int,
) -> None:
    monkeypatch.setenv("MEDUSA_HEADS_CACHE", str(tmp_path))
    target = TargetModel(tiny_llama())
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=3))
    sizes = tune(target, heads, statistics, context=32, batch_size=batch_size)
    assert {"static:1", "static:15", "dynamic:4", "dynamic:16"} <= {size.tree for size in sizes}
    assert sizes[0].tree == "none" and sizes[0].tokens_per_step == 1
    assert all(size.step_seconds > 0 and size.tokens_per_step > 1 for size in sizes[1:])
    (file,) = (tmp_path / "steps").iterdir()
    assert json.loads(file.read_text())["values"] == {
        size.tree: [size.step_seconds, size.drafting_seconds] for size in sizes
    }

    monkeypatch.setattr(measure, "StepBench", lambda *a: pytest.fail("measured twice"))
    assert tune(target, heads, statistics, context=32, batch_size=batch_size) == sizes
    file.write_text("{broken")
    with pytest.raises(pytest.fail.Exception):
        tune(target, heads, statistics, context=32, batch_size=batch_size)


def test_the_fastest_tree_is_taken(
    tiny_llama: TinyLlama, statistics: HeadStatistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With steps that cost nothing extra the largest gain wins; with steep ones the smallest."""
    target = TargetModel(tiny_llama())
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=3))
    flat = [TreeSize("static:1", 1.0, 1.4), TreeSize("dynamic:16", 1.01, 2.6)]
    steep = [TreeSize("static:1", 1.0, 1.4), TreeSize("dynamic:16", 3.0, 2.6)]
    for sizes, best in ((flat, "dynamic:16"), (steep, "static:1")):
        monkeypatch.setattr(tree_size, "tune", lambda *a, sizes=sizes, **k: sizes)
        assert best_tree(target, heads, statistics) == best


def test_heads_alone_as_fast_as_they_are_here(
    tiny_llama: TinyLlama, statistics: HeadStatistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    heads = MedusaHeads.from_target(model, HeadsConfig(num_heads=3))
    sizes = [TreeSize("none", 1.0, 1.0), TreeSize("static:2", 1.1, 1.6)]
    monkeypatch.setattr(tree_size, "tune", lambda *a, **k: sizes)
    for known in (statistics, None):
        medusa = MedusaModel(model, heads, statistics=known, tree="fastest")
        assert medusa.tree == "static:2" and medusa.drafter.num_nodes == 3
    with pytest.raises(ValueError, match=r"'fastest' goes by a clock.*name a tree"):
        MedusaModel(model, heads, tree="fastest", deterministic=True)
    for words in ("auto", "fastest"):
        with pytest.raises(ValueError, match=rf"auto has \+suffix .* got '{words}\+suffix': use"):
            MedusaModel(model, heads, tree=f"{words}+suffix")


@pytest.mark.filterwarnings("ignore:.*verifies a chain of drafts, not a tree")
def test_targets_that_verify_chains_are_tuned_by_chains(cache: Path) -> None:
    """What a tree's branches would bring is nothing to them."""
    target = tiny_target("lfm2")
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=3))
    # Of 10 positions the first head is right at 6, the second then at 3, the third at none.
    first = [[0, 0, 1]] * 3 + [[0, 2, 1]] * 3 + [[1, 0, 0]] * 4
    statistics = HeadStatistics.from_ranks(torch.tensor(first))
    sizes = tune(target, heads, statistics, context=32)
    expected = {"none": 1.0, "chain:1": 1.6, "chain:2": 1.9, "chain:3": 1.9}
    assert {size.tree: size.tokens_per_step for size in sizes} == pytest.approx(expected)
    assert [size.nodes for size in sizes] == [0, 1, 2, 3]
    medusa = MedusaModel(target, heads, statistics=statistics, tree="fastest")
    assert medusa.tree in expected


def test_auto_is_the_default(
    tiny_llama: TinyLlama, statistics: HeadStatistics, cache: Path, quiet: None
) -> None:
    model = tiny_llama()
    fresh = MedusaHeads.from_target(model, HeadsConfig(num_heads=3))
    for known in (statistics, None):  # heads that nobody measured have a prior
        medusa = MedusaModel(model, fresh, statistics=known)
        assert isinstance(medusa.drafter, BlendedDrafter) and medusa.tree == "auto"
    assert len(list((cache / "clock").iterdir())) == 1  # nothing is measured twice


@pytest.mark.parametrize(
    ("spec", "batch"), alternately(["dynamic:12", "cartesian:3,2,1", "chain", "none"], [1, 3])
)
def test_every_tree_is_lossless(tiny_llama: TinyLlama, spec: str, batch: int) -> None:
    model = tiny_llama(vocab_size=24)
    medusa = MedusaModel(model, MedusaHeads.from_target(model, HeadsConfig(num_heads=3)), tree=spec)
    ids = torch.randint(24, (batch, 12), generator=torch.Generator().manual_seed(0))
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    out: Any = medusa.generate(**inputs, max_new_tokens=32, do_sample=False)
    assert torch.equal(out, model.generate(**inputs, max_new_tokens=32, do_sample=False))
