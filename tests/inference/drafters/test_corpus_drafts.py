"""Drafts that continue a corpus: the text stays the target's, whatever the corpus says."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_heads import MedusaModel
from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.bench.methods import Models, check_methods, make_method
from medusa_heads.inference.drafters.blended import BlendedDrafter
from medusa_heads.inference.drafters.extra.early_exit import ExitClock
from medusa_heads.inference.drafters.text import TextSource
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.inference.lookup.corpus_index import CorpusIndex
from medusa_heads.inference.lookup.suffix_automaton import Continuation
from medusa_heads.inference.models import training_free
from medusa_heads.inference.models.training_free import TrainingFreeModel
from medusa_heads.inference.plan import adaptive as adaptive_plan
from medusa_heads.trees.statistics import HeadStatistics
from medusa_heads.trees.tree import TokenTree
from tests.conftest import DEVICE, TinyLlama
from tests.inference.clock import Clock as Time
from tests.inference.padded import padded
from tests.inference.planted import Misremembering
from tests.inference.reference import reference
from tests.inference.rereading import random_heads
from tests.pairs import alternately

DRAFTERS = ("suffix", "auto", "lookahead+suffix", "early_exit+suffix")
STEPS = {1: 1.0, 4: 1.02, 8: 1.05, 16: 1.1, 32: 1.3}
NEW = 40


@pytest.fixture(autouse=True)
def cheap_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which many nodes pay, as they do not on a model this small."""
    clock = Clock(STEPS, learns=False)
    for module in (training_free, adaptive_plan):
        monkeypatch.setattr(module, "target_clock", lambda *_: clock)
    monkeypatch.setattr(ExitClock, "measured", lambda *_: ExitClock(clock, layers=2, first=0.05))


@pytest.fixture(scope="module")
def model(tiny_llama: TinyLlama) -> Any:
    return tiny_llama(vocab_size=24).to(DEVICE)


@pytest.fixture(scope="module")
def varied(tiny_llama: TinyLlama) -> Any:
    """One with so many tokens that it hardly repeats itself."""
    return tiny_llama().to(DEVICE)


def scattered(text: list[int]) -> list[list[int]]:
    """A corpus that holds most of a text, in pieces between which it is wrong."""
    pieces = [text[start : start + 14] for start in range(0, len(text), 16)]
    return [[*piece, 5, 5] for piece in pieces] + [[6, 7, 8]]


def seeded(generate: Any, input_ids: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(3)
    made: Tensor = generate(input_ids=input_ids, **{"max_new_tokens": NEW} | options)
    return made


@pytest.mark.parametrize(
    ("drafter", "options"),
    alternately(
        DRAFTERS,
        (
            {"do_sample": False},
            {"do_sample": True, "temperature": 0.7, "top_k": 0},
            {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        ),
        slow=[drafter for drafter in DRAFTERS if "+" in drafter],
    ),
)
def test_equals_generate(varied: Any, drafter: str, options: dict[str, Any]) -> None:
    model, ids_BT = varied, torch.tensor([[5, 6, 7, 8]], device=DEVICE)
    expected_BT = seeded(partial(reference, model), ids_BT, **options)
    corpus = scattered(expected_BT[0].tolist())
    with_corpus = TrainingFreeModel(model, drafter, corpus=corpus, rng="transformers")
    assert torch.equal(seeded(with_corpus.generate, ids_BT, **options), expected_BT)
    without = TrainingFreeModel(model, drafter, rng="transformers")
    seeded(without.generate, ids_BT, **options)
    assert with_corpus.last_stats.tokens_per_step > 1.3 * without.last_stats.tokens_per_step


@pytest.mark.parametrize(
    "drafter", [pytest.param(d, marks=[pytest.mark.slow] * ("+" in d)) for d in DRAFTERS]
)
def test_rows_of_a_batch_equal_generate(model: Any, drafter: str) -> None:
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": 2}
    options |= padded((0, 3, 7, 1, 5), 10)
    expected_BT = seeded(partial(reference, model), **options)
    corpus = [piece for row in expected_BT.tolist() for piece in scattered(row)]
    drafted = TrainingFreeModel(model, drafter, corpus=corpus)
    assert torch.equal(seeded(drafted.generate, **options), expected_BT)
    assert drafted.last_stats.tokens_per_step > 1.5


def test_a_wrong_mask_is_caught(tiny_llama: TinyLlama) -> None:
    model: Any = tiny_llama().to(DEVICE)
    ids_BT = torch.tensor([[5, 6, 7, 8]], device=DEVICE)
    expected_BT = seeded(model.generate, ids_BT, do_sample=False)
    index = CorpusIndex.build(scattered(expected_BT[0].tolist()))
    drafted = TrainingFreeModel(model, "suffix", corpus=index)
    for kind, same in ((BlendedDrafter, True), (Misremembering, False)):
        clock = Clock(STEPS, learns=False)
        drafted.drafter = kind(clock, (0, 3, 7, 15), text=TextSource(15, index))
        got_BT = seeded(drafted.generate, ids_BT, do_sample=False)
        assert torch.equal(got_BT, expected_BT) == same


class Counting(BlendedDrafter):
    """Counts the nodes it proposes."""

    nodes: list[int]

    def propose(self, state: DecodingState) -> TokenTree:
        tree = super().propose(state)
        self.nodes.append(tree.num_nodes - 1)
        return tree


def test_a_useless_corpus_is_soon_left_alone(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = tiny_llama().to(DEVICE)
    ids_BT = torch.tensor([[5, 6, 7, 8]], device=DEVICE)
    options: dict[str, Any] = {"do_sample": True, "top_k": 0}
    text = seeded(model.generate, ids_BT, max_new_tokens=160, **options)[0].tolist()
    wrong = [[token, (token + 7) % 199, 3, 4, 5] for token in text for _ in range(8)]
    looks: list[int] = []
    look = CorpusIndex.continuation

    def counted(index: CorpusIndex, text: list[int], most: int) -> Continuation:
        looks.append(len(text))
        return look(index, text, most)

    monkeypatch.setattr(CorpusIndex, "continuation", counted)
    Time(monkeypatch)  # however busy this machine is, drafts take no time
    nodes = []
    for index in (CorpusIndex.build(wrong), None):
        drafted = TrainingFreeModel(model, "suffix", rng="transformers")
        clock = Clock({1: 1.0, 4: 1.1}, learns=False)
        drafter = Counting(clock, (0, 3), text=TextSource(3, index))
        drafted.drafter, drafter.nodes = drafter, []
        got_BT = seeded(drafted.generate, ids_BT, max_new_tokens=160, **options)
        assert got_BT[0].tolist() == text
        nodes.append(drafter.nodes)
    with_corpus, without = nodes
    assert sum(with_corpus[:4]) > sum(without[:4])
    # The corpus costs a few nodes still, while it is tried now and then, and more of them where the
    # text is drawn on another device, and may repeat itself more. Where it is never left alone, it
    # costs most of three a step.
    spare = 3 / 16 if DEVICE == "cpu" else 3 / 8
    for start in (40, 80):
        more = sum(with_corpus[start:]) - sum(without[start:])
        assert more <= spare * len(with_corpus[start:])
    assert len(looks) < len(without) * 0.7 and max(looks) > 110  # seldom, but on and on


@pytest.mark.parametrize("tree", ["auto", "7+suffix", "suffix:4"])
def test_beside_heads(tiny_llama: TinyLlama, tree: str) -> None:
    model: Any = tiny_llama().to(DEVICE)
    ranks_SK = torch.randint(4, (300, 3), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"statistics": HeadStatistics.from_ranks(ranks_SK), "tree": tree}
    ids_BT = torch.tensor([[5, 17, 3, 5, 17, 3, 5]], device=DEVICE)
    expected_BT = seeded(model.generate, ids_BT, do_sample=False)
    corpus = scattered(expected_BT[0].tolist())
    medusa = MedusaModel(model, random_heads(model), corpus=corpus, **options)
    assert torch.equal(seeded(medusa.generate, ids_BT, do_sample=False), expected_BT)
    if tree != "auto":  # which may find on this machine that nothing pays
        assert medusa.last_stats.tokens_per_step > 1.5


@pytest.mark.parametrize("tree", ["chain", 7, "dynamic:4", [[0]], "none"])
def test_trees_that_continue_nothing(tiny_llama: TinyLlama, tree: Any) -> None:
    model = tiny_llama()
    with pytest.raises(ValueError, match=r"a corpus is continued by the trees auto, N\+suffix and"):
        MedusaModel(model, random_heads(model), tree=tree, corpus=[[1, 2]])


@pytest.mark.parametrize("drafter", ["recycling", "lookahead", "early_exit", "early_exit:1"])
def test_drafters_that_continue_nothing(tiny_llama: TinyLlama, drafter: str) -> None:
    with pytest.raises(ValueError, match="a corpus is continued by the drafters auto, suffix and"):
        TrainingFreeModel(tiny_llama(), drafter, corpus=[[1, 2]])


def test_names_in_a_benchmark(tiny_llama: TinyLlama) -> None:
    model: Any = tiny_llama()
    ids_BT = torch.tensor([[5, 6, 7, 8]])
    expected_BT = seeded(model.generate, ids_BT, do_sample=False)
    ranks_SK = torch.randint(4, (300, 3), generator=torch.Generator().manual_seed(0))
    statistics = HeadStatistics.from_ranks(ranks_SK)
    medusa = MedusaModel(model, random_heads(model), statistics=statistics, tree="none")
    index = CorpusIndex.build(scattered(expected_BT[0].tolist()))
    models = Models(medusa.target, medusa, corpus=index)
    steps = {}
    for name in ("suffix", "suffix+corpus", "heads:suffix", "heads:suffix+corpus"):
        check_methods([[name]], heads=True, draft=False, corpus="corpus" in name)
        method = make_method(name, models, most_tokens=NEW + 4)
        assert torch.equal(seeded(method.generate, ids_BT, do_sample=False), expected_BT)
        assert method.stats is not None
        steps[name] = method.stats().steps
    for name in ("suffix", "heads:suffix"):
        assert steps[f"{name}+corpus"] < 0.8 * steps[name]


@pytest.mark.parametrize(
    ("names", "corpus", "message"),
    [
        (["auto+corpus"], False, "'auto.corpus' needs text to continue: give --corpus"),
        (["auto", "plain"], True, "none of the methods auto, plain continues it"),
        (["recycling+corpus"], True, "'recycling.corpus': leave '.corpus' out"),
        (["heads:8+corpus"], True, "'heads:8.corpus': leave '.corpus' out"),
        (["draft-model+corpus"], True, "'draft-model.corpus': leave '.corpus' out"),
        (["plain+corpus"], True, "'plain.corpus': leave '.corpus' out"),
        (["auto+compile+corpus"], True, "expected methods among"),
    ],
)
def test_names_that_are_none(names: list[str], corpus: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_methods([names], heads=True, draft="draft" in names[0], corpus=corpus)


def test_another_vocabulary(tiny_llama: TinyLlama) -> None:
    with pytest.raises(ValueError, match="token ids up to 199, and the target has 199"):
        TrainingFreeModel(tiny_llama(), corpus=[[1, 199]])
