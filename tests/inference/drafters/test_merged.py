"""Trees that merge the text, heads and recycling on the device: the same drafts on both roads, and
generate()'s tokens whatever was drafted."""

from __future__ import annotations

import gc
import random
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_heads import MedusaModel
from medusa_heads.inference.adapt.buckets import Buckets
from medusa_heads.inference.adapt.measure import room
from medusa_heads.inference.drafters.continuation import TextsOnDevice, continuation
from medusa_heads.inference.drafters.merged import MergedTrees
from medusa_heads.inference.engine import reading
from medusa_heads.inference.lookup.suffix_automaton import SuffixAutomaton
from medusa_heads.inference.models.training_free import TrainingFreeModel
from medusa_heads.target.graphs.captured import CapturedTarget
from medusa_heads.trees.dynamic_tree import Tail, best_first_tree
from medusa_heads.trees.levels import NEVER, merged
from medusa_heads.trees.tree import TokenTree
from tests import replayed
from tests.conftest import DEVICE, TinyLlama
from tests.inference.clock import Clock
from tests.inference.on_device import NEW, SAMPLING, text, with_heads
from tests.inference.padded import padded
from tests.inference.reference import reference
from tests.pairs import alternately


@pytest.fixture(scope="module")
def model(tiny_llama: TinyLlama) -> Any:
    made = tiny_llama().to(DEVICE)
    made.generation_config.pad_token_id = 0
    return made


def test_continuation_is_that_of_the_automaton() -> None:
    """The longest earlier occurrence of the text's end, padding and what stands behind left out."""
    draw = random.Random(0)
    for _ in range(60):
        texts = [[draw.randrange(3) for _ in range(draw.randint(1, 14))] for _ in range(3)]
        paddings = [draw.randrange(4) for _ in texts]
        ids_BC = torch.full((3, 24), 1, device=DEVICE)  # padding and the rest: a token of the texts
        for ids_C, own, padding in zip(ids_BC, texts, paddings, strict=True):
            ids_C[padding : padding + len(own)] = torch.tensor(own)
        ends = [padding + len(own) - 1 for padding, own in zip(paddings, texts, strict=True)]
        ends_B, padding_B = (torch.tensor(each, device=DEVICE) for each in (ends, paddings))
        found = continuation(ids_BC, ends_B, padding_B, most=5)
        for row, own in enumerate(texts):
            length = SuffixAutomaton(own).match_length
            groups = found.groups_BL[row].tolist()
            if not length:
                assert groups == [-1] * 5
                continue
            end = own[len(own) - length :]
            places = [i for i in range(length, len(own)) if own[i - length : i] == end]
            follows = own[max(places) : max(places) + 5]
            assert found.tokens_BL[row].tolist()[: len(follows)] == follows
            assert [group >= 0 for group in groups] == [i < len(follows) for i in range(5)]


def test_a_text_learns_nothing_of_what_another_drafted() -> None:
    on_device = TextsOnDevice(torch.zeros(2, 4, dtype=torch.long), 16, 3)
    numbers = {"lengths_B": [6, 6], "padding_B": [0, 0], "fresh_B": [3, 3]}
    state: Any = SimpleNamespace(**{name: torch.tensor(of) for name, of in numbers.items()})
    state.following_BP, counts_2G = torch.full((2, 3), 2), torch.ones(2, 5)
    on_device._last_2BL.fill_(2)  # the token and its group
    on_device.advance(state, counts_2G)
    assert counts_2G[:, 2].gt(6).all()  # six drafts were right
    on_device._last_2BL.fill_(2)
    on_device.begin(SimpleNamespace(ids_BS=torch.ones(2, 4, dtype=torch.long)))  # type: ignore[arg-type]
    known_2G = counts_2G.clone()
    on_device.advance(state, counts_2G)
    assert torch.equal(counts_2G, known_2G)


def test_each_token_is_offered_once() -> None:
    tokens_BFR = torch.tensor([[[7, 3, 7, 5]]])
    logs_BFR = merged(tokens_BFR, torch.tensor([0.5, 0.1, 0.2, 0.05]).log()[None, None])
    assert logs_BFR[0, 0].exp().tolist() == pytest.approx([0.6, 0.1, 0.0, 0.05])
    logs_BFR = merged(tokens_BFR, torch.tensor([0.9, 0.8, 0.2, 0.0]).log()[None, None])
    assert float(logs_BFR.exp().sum()) == pytest.approx(1.0)
    unknown = torch.tensor([NEVER, -1.0, -2.0, NEVER])[None, None]
    logs_BFR = merged(tokens_BFR, unknown)  # what the first says nothing of, another offers
    assert logs_BFR[0, 0, :2].tolist() == pytest.approx([-2.0, -1.0])
    assert logs_BFR[0, 0, 2] < logs_BFR[0, 0, 3] <= NEVER


def test_a_guess_that_is_no_number_is_left_out_alone() -> None:
    tokens_BFR = torch.tensor([[[7, 3, 7, 5]]])
    chances = torch.tensor([float("nan"), 0.1, 0.2, float("nan")])
    logs_BFR = merged(tokens_BFR, chances.log()[None, None])
    assert logs_BFR[0, 0, :2].exp().tolist() == pytest.approx([0.2, 0.1])
    assert torch.all(logs_BFR[0, 0, 2:] <= NEVER)


def test_a_tail_goes_on_behind_the_levels() -> None:
    """Where the tree has its beginning; and nowhere else."""

    def guess(level: int, paths_BFJ: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        tokens_R = torch.tensor([1, 2, 3])
        shape = (*paths_BFJ.shape[:2], 3)
        return tokens_R.expand(shape), torch.tensor([0.6, 0.2, 0.1]).log().expand(shape)

    tokens_BL = torch.tensor([[1, 1, 9, 8, 7], [1, 2, 9, 8, 7], [1, 5, 9, 8, 7]])
    sure = torch.tensor([0.6, 0.6, 0.9, 0.9, 0.9]).log()
    tail = Tail(tokens_BL, sure.expand(3, -1))
    tree = best_first_tree(torch.tensor([0, 0, 0]), guess, 6, 2, None, tail)
    paths = []
    for row in range(3):
        own = []
        for node in range(7):
            path = tree.ancestors_BNN[row, node].nonzero()[:, 0]
            assert tree.depth_BN[row, node] == len(path) - 1
            own.append(tree.tokens_BN[row, path[1:]].tolist())
        paths.append(own)
    assert [1, 1, 9, 8, 7] in paths[0]
    assert [1, 2] in paths[1] and [1, 2, 9] not in paths[0]
    assert not any(9 in path for path in paths[2])


@pytest.mark.parametrize("of_tail", [NEVER, -0.1])
@pytest.mark.parametrize("behind", [NEVER, float("nan")])
def test_no_node_stands_without_its_parent(of_tail: float, behind: float) -> None:
    """Also of the nodes that nobody offers, where a tree takes more than are offered: on one level
    several tokens, and behind them none; of the last level, what is no number."""

    def guess(level: int, paths_BFJ: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        ranks = 1 if level else 9
        tokens_BFR = torch.arange(1, ranks + 1).expand(*paths_BFJ.shape[:2], ranks)
        chance = behind if level == 4 else NEVER if level else -1.0
        return tokens_BFR, torch.full(tokens_BFR.shape, chance)

    tail = Tail(torch.full((1, 60), 77), torch.full((1, 60), of_tail))
    for num_drafted in range(6, 60):
        own = Tail(*(each[:, :num_drafted] for each in tail))
        tree = best_first_tree(torch.tensor([0]), guess, num_drafted, 5, 10, own)
        parents_N, depth_N = tree.parents_BN[0, 1:], tree.depth_BN[0]
        assert torch.all(parents_N < torch.arange(1, num_drafted + 1))
        assert torch.equal(depth_N[1:], depth_N[parents_N] + 1)
        assert torch.equal(tree.ancestors_BNN[0].sum(dim=1), depth_N + 1)


KINDS: dict[str, dict[str, Any]] = {
    "medusa": {},
    "hydra": {"kind": "hydra"},
    "prefix": {"prefix_attention": True, "correction_rank": 8},
    "induction": {"kind": "hydra", "induction": True},
    "eagle3": {"kind": "eagle3"},
}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k != "medusa")) for k in KINDS]
)
def test_heads_beside_the_text(model: Any, kind: str) -> None:
    asking = with_heads(model, **KINDS[kind])
    medusa = MedusaModel(model, asking.heads, tree="auto", compile="steps", compile_backend="eager")
    asking = MedusaModel(model, asking.heads, tree="none")
    for padding, tree in (([0], "7+suffix"), ([0, 4, 0], "auto")):
        inputs: Any = padded(padding, 12)
        greedy = reference(model, do_sample=False, max_new_tokens=NEW, **inputs)
        torch.manual_seed(3)
        drawn: Any = asking.generate(**inputs, max_new_tokens=NEW, **SAMPLING)
        medusa.use_tree(tree)
        assert isinstance(medusa.drafter, MergedTrees)
        is_drawn = (list(KINDS).index(kind) + len(padding) // 2) % 2 == 1  # one of a kind's texts
        options, right = (SAMPLING, drawn) if is_drawn else ({}, greedy)
        assert torch.equal(text(medusa, inputs, **options), right)
        assert "step" in medusa.last_stats.seconds


@pytest.mark.parametrize(
    ("drafter", "padding"), alternately(("auto", "suffix"), ([0], [0, 4, 0]), slow=("suffix",))
)
def test_both_roads_accept_as_much(
    model: Any, drafter: str, padding: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a text that repeats itself, and of one that is drawn: what is learnt is learnt on both."""
    # A step begun before it is known that a text is over learns from the text's last step too.
    monkeypatch.setattr(reading, "_READ_LATE", set())
    asking = TrainingFreeModel(model, "suffix")
    inputs: Any = padded(padding, 12)
    new = NEW + 14
    greedy = reference(model, do_sample=False, max_new_tokens=new, **inputs)
    torch.manual_seed(3)
    drawn: Any = asking.generate(**inputs, max_new_tokens=new, **SAMPLING)
    accepted = []
    for whole_steps in (True, False) if padding == [0] else (True,):
        free = TrainingFreeModel(model, drafter, compile="steps", compile_backend="eager")
        free.target.whole_steps = whole_steps  # type: ignore[attr-defined]
        assert isinstance(free.drafter, MergedTrees)
        free.drafter.sizes = ()  # the other road verifies all nodes at every step
        for options, right in (({}, greedy), (SAMPLING, drawn)):
            made = text(free, inputs, **options, max_new_tokens=new)
            assert torch.equal(made, right)
            assert ("step" in free.last_stats.seconds) == whole_steps
            accepted.append(free.last_stats.accepted)
    if padding == [0]:
        assert accepted[:2] == accepted[2:]
        assert max(accepted[0]) > 0


def test_the_text_alone_drafts_no_more_than_there_is_room_for(tiny_llama: TinyLlama) -> None:
    model: Any = tiny_llama(max_position_embeddings=16).to(DEVICE)
    model.generation_config.pad_token_id = 0
    inputs: Any = padded([0], 6)
    inputs["input_ids"] %= 3
    right = reference(model, do_sample=False, max_new_tokens=9, **inputs)
    free = TrainingFreeModel(model, "suffix", compile="steps", compile_backend="eager")
    assert free.drafter.num_nodes == room(free.target) == 8
    assert torch.equal(text(free, inputs, max_new_tokens=9), right)
    assert "step" in free.last_stats.seconds


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_drafter_outlives_its_choice(tiny_llama: TinyLlama, compiled: bool) -> None:
    """Nor does what it keeps of texts, though the cache stays."""
    model: Any = tiny_llama(num_layers=1).to(DEVICE)
    model.generation_config.pad_token_id = 0
    medusa, inputs = with_heads(model), dict[str, Any](padded([0], 12))
    medusa.use_tree("auto")
    if compiled:
        medusa.generate(**inputs, do_sample=False, max_new_tokens=9)
    else:
        text(medusa, inputs)
    assert "step" in medusa.last_stats.seconds
    caches = [*medusa.target._caches.values()]  # type: ignore[attr-defined]
    (held,) = [*medusa.drafter.memories.values()]
    matrix = medusa.drafter._parts[1]._kept[0]  # type: ignore[attr-defined]
    gone = [weakref.ref(each) for each in (medusa.drafter, matrix, *held.values())]
    assert len(gone) == 3 and caches
    medusa.use_tree("none")
    del held, matrix
    gc.collect()
    assert [each() for each in gone] == [None] * 3


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(("batch", "cost"), alternately((1, 3), (1.0, 0.0)))
def test_steps_that_ask_the_host_verify_as_many_nodes_as_pay(
    model: Any, batch: int, cost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a node takes as long as a step without, few, since these heads know nothing; where it
    costs nothing, many."""
    inputs = padded([0, 3, 1][:batch], 12)
    asks: dict[str, Any] = {"no_repeat_ngram_size": 3}  # which reads the text
    expected = replayed.text(model, inputs, **asks)
    medusa, clock, taken = replayed.with_heads(model, "auto"), Clock(monkeypatch), list[int]()
    assert isinstance(medusa.drafter, MergedTrees)
    verify, fewest = CapturedTarget.verify, min(medusa.drafter.sizes) + 1

    def timed(target: CapturedTarget, tree: TokenTree, *given: Any) -> Any:
        clock.work(1.0 + cost * tree.num_nodes)
        taken.append(tree.num_nodes)
        return verify(target, tree, *given)

    monkeypatch.setattr(CapturedTarget, "verify", timed)
    for _ in range(4):
        assert torch.equal(replayed.text(medusa, inputs, **asks), expected)
    assert "step" not in medusa.last_stats.seconds
    assert set(taken) == {size + 1 for size in medusa.drafter.sizes}
    assert (set(taken[-8:]) == {fewest}) == (cost > 0)


@pytest.mark.usefixtures("recorded")
def test_rows_that_have_ended_say_nothing_of_what_pays(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay in a recorded batch, and commit nothing."""
    inputs = padded([0, 3, 1, 2], 12)
    asks: dict[str, Any] = {"no_repeat_ngram_size": 3, "max_new_tokens": 2 * NEW}
    *others, last = replayed.text(model, inputs, **asks)[:, 12:].tolist()
    ends = [token for row in others for token in row[:8] if token not in last]
    expected = replayed.text(model, inputs, eos_token_id=ends, **asks)
    lengths_B = (expected[:, 12:] != 0).sum(dim=1)
    assert lengths_B[-1] == 2 * NEW and lengths_B.min() <= 8
    learn, told = Buckets.learn, list[tuple[float, float]]()

    def noted(buckets: Buckets, size: int, accepted: float, expected: Any, *more: Any) -> None:
        told.append((accepted, expected[-1]))
        learn(buckets, size, accepted, expected, *more)

    monkeypatch.setattr(Buckets, "learn", noted)
    medusa = replayed.with_heads(model, "auto")
    for _ in range(2):
        assert torch.equal(replayed.text(medusa, inputs, eos_token_id=ends, **asks), expected)
    assert len(told) > 12 and min(min(each) for each in told) >= 0.0
