"""Heads' drafts and the text's own in one tree: the text stays the target's, whoever is asked."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from medusa_heads import HeadsConfig, MedusaHeads, MedusaModel, TargetModel
from medusa_heads.inference.adapt.bandit import Bandit
from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.adapt.evidence import Evidence
from medusa_heads.inference.drafters.blended import BlendedDrafter, text_drafter
from medusa_heads.inference.drafters.growing import Proposal, Source
from medusa_heads.inference.drafters.heads import TreeSource
from medusa_heads.inference.drafters.text import TextProposal, TextSource
from medusa_heads.inference.engine.rows import Row, StopCheck
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.inference.engine.stats import GenerationStats
from medusa_heads.inference.lookup.suffix_automaton import Continuation
from medusa_heads.inference.models.training_free import TrainingFreeModel
from medusa_heads.trees.statistics import HeadStatistics, prior_statistics
from tests.conftest import DEVICE, TinyLlama
from tests.inference.planted import Misremembering, PlantedDrafter, decoding
from tests.inference.rereading import RereadingDrafter, random_heads, run

STEPS = {1: 1.0, 2: 1.05, 4: 1.1, 8: 1.2, 16: 1.5}
SIZES = (0, 1, 3, 7, 15)
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "penalties": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 0},
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sources are asked by chance, so that all ways of going on are gone: how often not, and so."""
    chance, counts = random.Random(0), [0, 0]

    def pick(*_: Any) -> int:
        way = int(chance.random() < 0.4)
        counts[way] += 1
        return way

    monkeypatch.setattr(Bandit, "pick", pick)
    return counts


def blended(sources: Sequence[Source] = (), kind: type[BlendedDrafter] = BlendedDrafter) -> Any:
    return kind(Clock(STEPS, learns=False), SIZES, text=TextSource(15), sources=sources)


def generate(model: Any, drafter: Any, inputs: dict[str, Any]) -> tuple[Tensor, GenerationStats]:
    stats = GenerationStats()
    custom = decoding(TargetModel(model), drafter, rng="transformers", stats=stats)
    torch.manual_seed(7)
    return model.generate(**inputs, custom_generate=custom), stats


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_one_row_equals_generate(
    tiny_llama: TinyLlama, options: dict[str, Any], asked: list[int]
) -> None:
    model: Any = tiny_llama().to(DEVICE)
    ids_BT = torch.randint(199, (1, 12), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    inputs = {"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT)}
    inputs |= options | {"max_new_tokens": 50}
    torch.manual_seed(7)
    expected_BT = model.generate(**inputs)
    planted = TreeSource(PlantedDrafter(expected_BT[:, 12:].tolist(), 199), prior_statistics(4))
    got_BT, stats = generate(model, blended([planted]), inputs)
    assert torch.equal(got_BT, expected_BT)
    assert min(asked) > 5 and stats.tokens_per_step > 1.1


def test_rows_of_a_batch_equal_generate(tiny_llama: TinyLlama, asked: list[int]) -> None:
    model: Any = tiny_llama(vocab_size=24).to(DEVICE)
    ids_BT = torch.randint(3, 24, (4, 10), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    mask_BT = (torch.arange(10) >= torch.tensor([[0], [3], [7], [1]])).long().to(DEVICE)
    inputs = {"input_ids": ids_BT, "attention_mask": mask_BT, "do_sample": False}
    inputs |= {"max_new_tokens": 50, "eos_token_id": 2, "pad_token_id": 0}
    expected_BT = model.generate(**inputs)
    references = expected_BT[:, 10:].tolist()
    for drafter in (
        blended([TreeSource(PlantedDrafter(references, 24), prior_statistics(4))]),
        blended(),
        text_drafter(6),
    ):
        got_BT, stats = generate(model, drafter, inputs)
        assert torch.equal(got_BT, expected_BT)
        assert stats.tokens_per_step > 1.1


def test_a_wrong_mask_is_caught(tiny_llama: TinyLlama) -> None:
    model: Any = tiny_llama(vocab_size=24).to(DEVICE)
    ids_BT = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]], device=DEVICE)
    inputs = {"input_ids": ids_BT, "do_sample": False, "max_new_tokens": 40}
    expected_BT = model.generate(**inputs)
    for kind, same in ((BlendedDrafter, True), (Misremembering, False)):
        got_BT, _ = generate(model, blended(kind=kind), inputs)
        assert torch.equal(got_BT, expected_BT) == same


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param({"prefix_attention": True}, marks=pytest.mark.slow),
        pytest.param({"kind": "hydra", "prefix_attention": True}, marks=pytest.mark.slow),
        {"induction": True},
        {"kind": "block"},
    ],
)
def test_heads_that_are_asked_now_and_then_have_read_everything(
    tiny_llama: TinyLlama, kind: dict[str, Any], asked: list[int]
) -> None:
    model: Any = tiny_llama().to(DEVICE)
    heads = random_heads(model, **kind)
    target = TargetModel(model)
    ids_BT = torch.randint(199, (3, 9), generator=torch.Generator().manual_seed(5)).to(DEVICE)
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[1, :4] = 0
    options: dict[str, Any] = {"attention_mask": mask_BT, "max_new_tokens": 50, "do_sample": False}
    expected_BT = model.generate(ids_BT, **options, pad_token_id=0)
    references = expected_BT[:, 9:].tolist()
    options |= {"eos_token_id": references[2][40], "pad_token_id": 0}
    base = RereadingDrafter(heads, target, references, 199)
    drafter = blended([TreeSource(base, prior_statistics(4))])
    with torch.no_grad():
        got_BT = model.generate(ids_BT, **options, custom_generate=partial(run, target, drafter))
    assert torch.equal(got_BT, model.generate(ids_BT, **options))
    assert base.compared > 8 and min(asked) > 4


@pytest.mark.parametrize(
    "tree",
    [
        "7+suffix",
        pytest.param("auto", marks=pytest.mark.slow),
        pytest.param("dynamic:7+suffix", marks=pytest.mark.slow),
        pytest.param("chain:2+suffix", marks=pytest.mark.slow),
        "suffix:4",
    ],
)
def test_by_the_words_of_a_tree(tiny_llama: TinyLlama, tree: str) -> None:
    model: Any = tiny_llama().to(DEVICE)
    ranks_SK = torch.randint(4, (300, 3), generator=torch.Generator().manual_seed(0))
    statistics = HeadStatistics.from_ranks(ranks_SK)
    medusa = MedusaModel(model, random_heads(model), statistics=statistics, tree=tree)
    assert medusa.tree == tree
    ids_BT = torch.tensor([[5, 17, 3, 5, 17, 3, 5]], device=DEVICE)
    options = {"max_new_tokens": 40, "do_sample": False}
    assert torch.equal(medusa.generate(ids_BT, **options), model.generate(ids_BT, **options))  # type: ignore[arg-type]


def test_words_that_leave_the_heads_nothing_say_so(tiny_llama: TinyLlama) -> None:
    model: Any = tiny_llama()
    for tree in ("none+suffix", "suffix+suffix"):
        with pytest.raises(ValueError, match="leaves the heads nothing to draft"):
            MedusaModel(model, random_heads(model), tree=tree)


class Sure(Proposal):
    """Token 7, again and again, with the same certainty."""

    def __init__(self, evidence: Evidence) -> None:
        super().__init__(evidence, 0, self._after)

    def _after(self, place: Any) -> list[tuple[int, float, int, Any]]:
        return [(7, 0.9, 0, place + 1)] if place < 9 else []


class Promising(Source):
    """Promises tokens, and notes for which rows it was asked."""

    name = "promises"

    def __init__(self) -> None:
        self.seen, self.learnt = Evidence([1.0]), 0

    def draft(self, state: DecodingState) -> list[Proposal]:
        source = self

        class Noted(Sure):
            def learn(self, committed: Sequence[int]) -> None:
                assert committed
                source.learnt += 1
                super().learn(committed)

        return [Noted(self.seen) for _ in state.rows]

    def expected(self, nodes: int) -> float:
        return float(nodes)


@pytest.mark.parametrize("with_heads", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.usefixtures("untraced")
def test_rows_that_end_apart_where_all_are_kept(tiny_llama: TinyLlama, with_heads: bool) -> None:
    """Compiled, rows stay until all are done: those that have ended draft nothing."""
    model: Any = tiny_llama(vocab_size=24).to(DEVICE)
    options: dict[str, Any] = {"compile": True, "compile_backend": "eager"}
    drafted: Any = TrainingFreeModel(model, "auto", **options)
    if with_heads:
        drafted = MedusaModel(
            model, MedusaHeads.from_target(model, HeadsConfig(num_heads=3)), **options
        )
    for sampled in (False, True):
        batch, ends = 8, set()
        for seed in range(2):
            random = torch.Generator().manual_seed(seed)
            ids_BT = torch.randint(1, 24, (batch, 12), generator=random).to(DEVICE)
            inputs: dict[str, Any] = {"input_ids": ids_BT, "pad_token_id": 0}
            inputs |= {"attention_mask": torch.ones_like(ids_BT), "max_new_tokens": 40}
            inputs |= {"eos_token_id": [3, 9], "do_sample": sampled}
            if sampled:
                inputs |= {"temperature": 1.5, "top_k": 0}
            torch.manual_seed(seed)
            got_BT = drafted.generate(**inputs)
            if not sampled:
                assert torch.equal(got_BT, model.generate(**inputs))
            ends |= {int((row != 0).sum()) for row in got_BT}
        assert len(ends) > 3


@pytest.mark.usefixtures("untraced")
def test_rows_that_have_ended_count_for_nothing(tiny_llama: TinyLlama) -> None:
    model: Any = tiny_llama(vocab_size=24).to(DEVICE)
    source = Promising()
    drafter = BlendedDrafter(Clock.flat(), (5,), sources=[source], always=True, padded=True)
    drafted = TrainingFreeModel(model, "suffix", compile=True, compile_backend="eager")
    drafted.drafter = drafter
    ids_BT = torch.randint(8, 24, (6, 9), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    options |= {"attention_mask": torch.ones_like(ids_BT), "eos_token_id": [3, 4, 5]}
    drafted.generate(ids_BT, **options)
    stats = drafted.last_stats
    assert stats.steps < 6 * stats.forwards  # rows did end apart
    # Each row's prompt is a step without a draft, and its last draft is behind it when it ends.
    assert source.learnt <= stats.steps - 6


def test_a_match_is_believed_as_far_as_it_was_right() -> None:
    evidence = Evidence([0.3, 0.5, 0.6, 0.7, 0.8, 0.8, 0.9, 0.9])

    def offered(found: Continuation) -> list[float]:
        proposal = TextProposal(evidence, found)
        return [proposal.offers(place)[0][0] for place in range(len(found.tokens))]

    found, longer = Continuation(5, [1, 2, 3], [1.0] * 3), Continuation(40, [1], [1.0])
    before, untouched = offered(found), offered(longer)
    for _ in range(20):
        TextProposal(evidence, found).learn([1, 2, 3])
    assert offered(found)[0] > before[0]
    for _ in range(60):
        TextProposal(evidence, found).learn([9])
    assert offered(found)[0] < before[0]
    assert offered(longer) == untouched  # other lengths learnt nothing


def test_a_token_is_believed_by_its_share_of_the_occurrences() -> None:
    evidence, found = Evidence([0.3] * 8), Continuation(1, [7], [0.25])
    for place in range(400):
        TextProposal(evidence, found).learn([7 if place % 4 == 0 else 8])
    assert TextProposal(evidence, found).offers(0)[0][0] == pytest.approx(0.25, abs=0.05)
    twice = found._replace(shares=[0.5])
    assert TextProposal(evidence, twice).offers(0)[0][0] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(("drawing", "together"), [("keyed", True), ("drawn", False)])
def test_sources_that_know_the_noise_are_believed_by_what_comes_of_them_together(
    drawing: str, together: bool
) -> None:
    """Two that always say the same, and are always wrong: then neither is blamed for it. Of sources
    that do not know it each is."""
    sources = [Promising(), Promising()]
    row = Row(0, 1, torch.tensor([1, 2]), StopCheck(StoppingCriteriaList()))
    row.commit(3)
    options: dict[str, Any] = {"sources": sources, "always": True}
    drafter = BlendedDrafter(Clock(STEPS, learns=False), SIZES, **options)
    state: Any = SimpleNamespace(rows=[row], padding=[0], memories={}, again=0, room=None)
    state.drawing, state.noise, state.roots_B = drawing, None, torch.tensor([3])
    expected = []
    for _ in range(300):
        drafter.propose(state)
        expected.append(state.memories[drafter].expected)
        row.tokens.append(2)
    assert expected[0] > 1.0 and expected[-1] < 0.1
    assert [source.seen.rate(0) == 1.0 for source in sources] == [together] * 2
