"""What the names of methods stand for, in batches and compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.bench.methods import COMPILED, PLAIN, PROMPT_LOOKUP, check_methods
from medusa_heads.inference.bench.setting import Setting
from medusa_heads.inference.models import training_free
from medusa_heads.inference.models.medusa import MedusaModel
from medusa_heads.inference.models.training_free import DRAFTERS, OWN_MODULES
from medusa_heads.inference.plan import adaptive as adaptive_plan
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.statistics import HeadStatistics
from tests.conftest import TinyLlama
from tests.inference.bench.benchmarked import ASKED, HEADS, NEW, methods_of, result_of, run_setting

# Of the same size and another: a graph each.
TREES = ("heads:4", "heads:dynamic:4", "heads:6")
EVERY_KIND = (
    *TREES,
    "heads:auto", "heads:4+suffix",
    "auto", "suffix", "recycling", "recycling:4", "lookahead", "lookahead+suffix",
    "draft-model:chain:2", "draft-model:dynamic:4", "draft-model:sampled:2x1", "draft-model",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("suffx", "expected methods among plain, plain-compiled, .*suffix.* got 'suffx'"),
        ("plain:3", "got 'plain:3'"),
        ("heads:", "got 'heads:'"),
        ("heads:8", "needs a heads checkpoint"),
        ("draft-model:chain:3", "needs a draft model: give --draft_model"),
        ("transformers-assisted", "needs a draft model"),
        ("draft-model:chain:3+compile", "needs a draft model"),
        ("heads+compile", "needs a heads checkpoint"),
        ("heads:+compile", "got 'heads:.compile'"),
        ("plain+compile", "got 'plain.compile': measure 'plain-compiled'"),
        ("auto+steps+compile", "expected methods among"),
        ("early_exit:4+steps", "leave '.steps' out"),
        ("transformers-prompt-lookup+compile", "only methods of this engine are compiled"),
        ("early_exit:4+suffix+compile", "layers of an uncompiled target"),
        ("plain+stream", "only methods of this engine draw in another way"),
        ("suffix+stream+corpus", r"got 'suffix\+stream\+corpus'"),
        ("draft-model+stream+compile", "needs a draft model"),
    ],
)
def test_methods_that_are_not_there(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_methods([[PLAIN, name]], heads=False, draft=False)


def test_a_method_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a+compile.json").write_text("[[0]]")
    trees = ("auto", "none", "8", "chain:3", "cartesian:3,2", "16+suffix", "a+compile.json")
    heads = [f"heads:{tree}" for tree in (*trees, "dynamic:8", "suffix:5")]
    drafts = [f"draft-model:{tree}" for tree in ("auto", "chain:3", "dynamic:8", "sampled:3x2")]
    compiled = [f"{name}+compile" for name in (*heads, *drafts, "auto", "lookahead+suffix")]
    numbered = ["early_exit:4", "early_exit:4+suffix"]
    named = [PLAIN, *DRAFTERS, *OWN_MODULES, *numbered, *heads, *drafts, *compiled]
    check_methods([named, [PLAIN]], heads=True, draft=True)
    with pytest.raises(ValueError, match="'suffix' is given twice"):
        check_methods([["suffix", PLAIN, "suffix"]], heads=False, draft=False)


def test_what_is_given_is_for_a_method_of_some_setting() -> None:
    given = {"heads": True, "draft": True, "corpus": True}
    check_methods([["draft-model", "auto"], ["auto+corpus", PLAIN]], **given)
    with pytest.raises(ValueError, match=r"methods auto\+corpus, plain drafts with it"):
        check_methods([["auto+corpus"], ["auto+corpus", PLAIN]], **given)
    with pytest.raises(ValueError, match="none of the methods auto, transformers-assisted cont"):
        check_methods([["auto"], ["transformers-assisted"]], **given)


@pytest.fixture
def quick_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny target's steps are not worth measuring: which drafts are cut where is not asked."""
    for module in (training_free, adaptive_plan):
        monkeypatch.setattr(module, "target_clock", lambda *_: Clock({1: 1.0, 7: 1.1, 8: 9.0}))


def test_drafters_and_draft_models_in_padded_batches(
    medusa: MedusaModel, tiny_llama: TinyLlama, quick_costs: None
) -> None:
    draft = TargetModel(tiny_llama(num_layers=1, vocab_size=24))
    names = [PLAIN, PROMPT_LOOKUP, "transformers-assisted", HEADS, "suffix", "early_exit:1+suffix"]
    methods = methods_of(medusa, *names, "draft-model:chain:2", draft=draft)
    for size in (1, 2):
        result = result_of(medusa, methods, batch_size=size)
        alone = {PROMPT_LOOKUP, "transformers-assisted"}
        assert set(result["left_out"]) == (alone if size > 1 else set())
        assert result["prompts"] == (2 if size == 2 else 3)  # no batch has fewer rows
        assert [m["name"] for m in result["methods"]] == [
            m.name for m in methods if size == 1 or m.name not in alone
        ]
        for method in result["methods"]:
            assert method["identical"] == 1.0, method["name"]
            assert method["tokens"] == NEW * result["prompts"]
            assert method["first_token_seconds"] > 0
        (heads,) = [m for m in result["methods"] if m["name"] == HEADS]
        assert heads["nodes"] == 4
        kept = heads["accepted_by_depth"]
        # The first token of each text comes of its prompt alone.
        steps = heads["tokens"] / heads["tokens_per_step"] - result["prompts"]
        assert sum(kept) * steps == pytest.approx(heads["tokens"] - result["prompts"] - steps)


def test_methods_draw_by_noise_that_drafters_know(medusa: MedusaModel) -> None:
    """A draft model that is the target itself is never refused, though tokens are drawn."""
    names = ["draft-model:chain:3+stream", "draft-model:chain:3"]
    methods = methods_of(medusa, PLAIN, *names, draft=medusa.target)
    drawn = run_setting(medusa, methods, Setting("sampled", "float32"))
    assert drawn[names[1]]["tokens_per_step"] > 1.3 * drawn[names[0]]["tokens_per_step"]
    assert drawn[names[1]]["tokens_per_step"] > 3  # of 4


def test_plain_compiled_writes_the_same(medusa: MedusaModel, monkeypatch: Any) -> None:
    """With a static cache and without the minute of compiling."""
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    methods = run_setting(medusa, methods_of(medusa, PLAIN, COMPILED))
    assert methods[COMPILED]["identical"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "turn"),
    [(size, turn) for size in (1, 2) for turn in (0, 1)],
)
def test_compiled_methods_write_the_same(
    medusa: MedusaModel,
    tiny_llama: TinyLlama,
    quick_costs: None,
    monkeypatch: Any,
    size: int,
    turn: int,
) -> None:
    """Over the static cache, and without the minutes of compiling: every tree of heads in forwards
    and in whole steps, and what else drafts in one of both, by turns."""
    compiled: list[Any] = []

    def compile(call: Any, **_: Any) -> Any:
        compiled.append(call)
        return call

    monkeypatch.setattr(torch, "compile", compile)
    draft = TargetModel(tiny_llama(num_layers=1, vocab_size=24))
    ranks = torch.randint(4, (200, 3), generator=torch.Generator().manual_seed(0))
    measured = HeadStatistics.from_ranks(ranks)
    medusa = MedusaModel(medusa.target, medusa.heads, statistics=measured, tree="none")
    # What is not compiled is compared above.
    names = [PLAIN, *TREES]
    others = EVERY_KIND[len(TREES) :]
    names += [f"{name}+compile" for name in (*TREES, *others[turn::2])]
    given: dict[str, Any] = {"batch_size": size, "prompts": ASKED[:size]}
    found = run_setting(medusa, methods_of(medusa, *names, draft=draft), **given)
    assert list(found) == names
    assert [method["identical"] for method in found.values()] == [1.0] * len(names)
    for tree in TREES:
        eager, static = found[tree], found[f"{tree}+compile"]
        for counted in ("tokens_per_step", "target_forwards", "accepted_by_depth", "nodes"):
            assert static[counted] == eager[counted], (tree, counted)
    assert len(compiled) == 1  # trees of one size share a graph
    names = [PLAIN, *(f"{name}+steps" for name in (*TREES, *others[1 - turn :: 2]))]
    found = run_setting(medusa, methods_of(medusa, *names, draft=draft), **given)
    assert [method["identical"] for method in found.values()] == [1.0] * len(names)


@pytest.mark.slow
def test_each_size_of_tree_is_one_graph(medusa: MedusaModel, monkeypatch: Any) -> None:
    """Whatever else runs on the same target in between."""
    graphs: list[Any] = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *a, **kw: compile(*a, **(kw | {"backend": count})))
    names = [PLAIN, HEADS, *(f"{tree}+compile" for tree in TREES)]
    methods = methods_of(medusa, *names)
    for _ in range(2):
        found = run_setting(medusa, methods, prompts=ASKED[:1])
        assert [method["identical"] for method in found.values()] == [1.0] * len(names)
        assert len(graphs) == 2


@pytest.mark.slow
def test_really_compiled(medusa: MedusaModel) -> None:
    names = [PLAIN, COMPILED, f"{HEADS}+compile"]
    for size in (1, 2):
        result = result_of(medusa, methods_of(medusa, *names), batch_size=size)
        assert not result["left_out"]
        assert [method["identical"] for method in result["methods"]] == [1.0] * 3
