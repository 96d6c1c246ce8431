"""Trees that grow as long as their next tokens gain more than they cost."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import StoppingCriteriaList

from medusa_heads import DraftedModel
from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.drafters.model.choice import DraftChoice
from medusa_heads.inference.drafters.model.drafted_tree import DraftedTree, Experience
from medusa_heads.inference.engine.rows import Row, StopCheck
from medusa_heads.trees.tree import TokenTree
from tests.conftest import DEVICE, TinyLlama
from tests.inference.drafters.model.drafting import CHEAP, DEAR, FLAT, Costs, drafted, line
from tests.inference.reference import reference
from tests.pairs import alternately

VOCAB = 24


@pytest.fixture(scope="module")
def pair(tiny_llama: TinyLlama) -> tuple[Any, Any]:
    target, draft = tiny_llama(vocab_size=VOCAB), tiny_llama(vocab_size=VOCAB)
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=noise))
    return target.to(DEVICE), draft.to(DEVICE)


@pytest.mark.parametrize(
    "costs",
    [FLAT, pytest.param(CHEAP, marks=pytest.mark.slow), DEAR],
    ids=["flat", "cheap", "dear"],
)
def test_equals_generate(pair: tuple[Any, Any], costs: Costs) -> None:
    """One text, and a ragged batch; what is learnt is carried from one to the next."""
    target, draft = pair
    model = drafted(target, [draft], [costs])
    ids_BT = torch.randint(3, VOCAB, (5, 10), generator=torch.Generator().manual_seed(1))
    mask_BT = (torch.arange(10) >= torch.tensor([[0], [3], [7], [1], [5]])).long()
    for rows in (1, 5, 3):
        inputs: dict[str, Any] = {
            "input_ids": ids_BT[:rows].to(DEVICE),
            "attention_mask": mask_BT[:rows],
        }
        inputs["attention_mask"] = inputs["attention_mask"].to(DEVICE)
        for options in ({"max_new_tokens": 14}, {"max_new_tokens": 18, "eos_token_id": 2}):
            settings: dict[str, Any] = {**inputs, **options, "do_sample": False, "pad_token_id": 0}
            got_BT: Any = model.generate(**settings)
            assert torch.equal(got_BT, reference(target, **settings))
    assert costs is DEAR or model.last_stats.tokens_per_step > 1.3


def drafts_of(
    model: DraftedModel, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> list[TokenTree]:
    """What is drafted for a long text, step by step."""
    trees: list[TokenTree] = []
    verify = model.target.verify

    def noted(tree: TokenTree, *others: Any) -> Any:
        trees.append(tree)
        return verify(tree, *others)

    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 140, **options}
    with monkeypatch.context() as patch:
        patch.setattr(model.target, "verify", noted)
        model.generate(torch.tensor([[5, 6, 7, 8]]).to(DEVICE), **settings)
    return trees


def test_lengths_follow_worth_and_costs(
    pair: tuple[Any, Any], tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair

    def lengths(draft: Any, costs: Costs) -> list[int]:
        model = drafted(target, [draft], [costs], chain_only=True)
        return [tree.num_nodes - 1 for tree in drafts_of(model, monkeypatch)]

    assert lengths(target, CHEAP)[-5:] == [8] * 5  # every token is right
    assert max(lengths(draft, DEAR)[20:]) < 8
    stranger = tiny_llama(vocab_size=VOCAB, num_layers=1, seed=9).to(DEVICE)
    useless = lengths(stranger, DEAR)
    # It rests, and is tried rarely.
    assert sum(map(bool, useless[-128:])) <= 8 and any(useless)


@pytest.mark.parametrize(
    "drawn", [pytest.param(False, marks=pytest.mark.slow), True], ids=["greedy", "drawn"]
)
def test_trees_are_as_wide_as_pays(
    pair: tuple[Any, Any], drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair
    options: dict[str, Any] = {"do_sample": drawn, "temperature": 0.5 if drawn else None}
    options["max_new_tokens"] = 110
    tokens_per_step = {}
    for name, chain_only in (("tree", False), ("chain", True)):
        torch.manual_seed(0)
        model = drafted(target, [draft], [FLAT], chain_only=chain_only)
        trees = drafts_of(model, monkeypatch, **options)
        tokens_per_step[name] = model.last_stats.tokens_per_step
        for tree in trees:
            parents = tree.parents_BN[0, 1:].tolist()
            assert chain_only is False or parents == list(range(len(parents)))
            # Of what was drawn, every token's distribution is known.
            assert set(tree.drawn_from) == (set(parents) if drawn else set())
    assert tokens_per_step["tree"] > 1.15 * tokens_per_step["chain"]
    # Where each verified token costs a quarter of a step, a second one behind another rarely pays.
    model = drafted(target, [draft], [Costs(line(0.25), forward=0.01)])
    trees = drafts_of(model, monkeypatch, **options)
    parents = [tree.parents_BN[0, 1:].tolist() for tree in trees[30:]]
    beside, nodes = sum(len(each) - len(set(each)) for each in parents), sum(map(len, parents))
    assert nodes > 0 and beside < 0.15 * nodes


def test_tokens_that_cannot_be_are_not_drawn(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair
    torch.manual_seed(0)
    model = drafted(target, [draft], [FLAT])
    children = [0, 0]
    for tree in drafts_of(model, monkeypatch, do_sample=True, top_k=2, max_new_tokens=60):
        parents, tokens = tree.parents_BN[0].tolist(), tree.tokens_BN[0].tolist()
        for node, probs_BV in tree.drawn_from.items():
            drawn = [tokens[n] for n, parent in enumerate(parents) if parent == node]
            assert 1 <= len(drawn) <= 2 and min(probs_BV[0, drawn]) > 0
            children[len(drawn) - 1] += 1
    assert min(children) > 0


class World:
    """A draft model of known worth, whose chains are all decided on: how sure it is of its next
    tokens, and how many of them are right."""

    def __init__(self, costs: Costs) -> None:
        chain = 4.0, costs.seconds(4, 4) if costs.most >= 4 else 2.0
        self.costs, self.experience = costs, Experience()
        self.clock = Clock(dict(enumerate(costs.verifying, start=1)))
        self.choice = DraftChoice(self.clock, costs.most, 1, [chain])
        self.row = Row(0, 1, torch.zeros(1, dtype=torch.long), StopCheck(StoppingCriteriaList()))
        self.tokens, self.seconds = 0, 0.0

    def step(self, sureness: Sequence[float], right: int) -> int | None:
        """Tokens that were drafted; None where the draft model was not asked."""
        if not self.choice.pick([0.0, 0.0], self.row.length):
            self.learn(0, 0, 0)
            return None
        tree = DraftedTree([self.row], self.experience, self.choice, self.costs.draft)
        length = forwards = 0
        while True:
            forwards += 1
            slots, _ = tree.grow([[[sureness[length]]]])
            length += len(slots)
            if not slots or length == len(sureness) or not tree.read_on():
                break
        tree.tokens_BN = torch.tensor([[0] + [1] * length])
        self.learn(min(length, right), length, forwards)
        tree.learn()
        return length

    def learn(self, kept: int, drafted: int, forwards: int) -> None:
        self.row.tokens += [1] * kept + [0]
        seconds = self.costs.seconds(drafted, forwards)
        self.clock.learn(drafted + 1, self.costs.verifying[drafted])
        self.choice.learn(1 + kept, seconds)
        self.tokens, self.seconds = self.tokens + 1 + kept, self.seconds + seconds


def test_of_too_few_nodes_deeper_ones_are_left_some() -> None:
    """Where verification is nearly free, a level takes a third of what is left at most."""
    choice = DraftChoice(FLAT.target, FLAT.most, 1, [(2.0, 1.1)])
    row = Row(0, 1, torch.zeros(1, dtype=torch.long), StopCheck(StoppingCriteriaList()))
    tree = DraftedTree([row], Experience(), choice, FLAT.draft)
    nodes = []
    while True:
        nodes.append(len(tree.grow([[[0.9, 0.5, 0.5, 0.5]] * len(tree.read)])[0]))
        if not tree.read_on():
            break
    assert nodes[0] == 4 and max(nodes) <= 12 and len(nodes) >= 8 and sum(nodes) <= FLAT.most


@pytest.mark.parametrize(
    ("sure", "costs", "steps"),
    [(0.9, DEAR, 60), (0.5, Costs(line(0.1), forward=0.15), 60), (0.5, DEAR, 1500)],
    ids=["surer than before", "cheap to try", "dear to try"],
)
def test_a_draft_model_that_gets_better_is_found_out(sure: float, costs: Costs, steps: int) -> None:
    """The dearer a trial is, the longer it takes; the trials of one that stays bad are few."""
    world = World(costs)
    for _ in range(400):
        world.step([0.5], 0)
    tried = [world.step([0.5], 0) is not None for _ in range(128)]
    assert 1 <= sum(tried) <= 8
    for _ in range(steps):
        world.step([sure], 1)
    assert all(world.step([sure], 1) for _ in range(40))


def test_easier_passages_are_drafted_for() -> None:
    """Of a text in which drafts that do not pay on the whole are right for a while, then wrong."""
    world, coins = World(DEAR), random.Random(0)
    steps, tried = {True: 0, False: 0}, {True: 0, False: 0}
    for step in range(6000):
        easy = step % 200 < 40
        steps[easy] += 1
        right = coins.random() < (0.95 if easy else 0.15)
        tried[easy] += world.step([0.5], int(right)) is not None
    assert tried[True] > 0.25 * steps[True] and tried[False] < 0.1 * steps[False]


def test_the_length_is_the_best_where_all_tokens_are_alike() -> None:
    """Against the optimum of a chance per token and costs that are known: Leviathan et al."""
    chance, costs = 0.8, Costs([1.0] * 17, forward=0.12)
    gained = [(1 - chance ** (n + 1)) / (1 - chance) / costs.seconds(n, n) for n in range(17)]
    world, coins = World(costs), random.Random(0)
    lengths = []
    for _ in range(3000):
        right = 0
        while right < 16 and coins.random() < chance:
            right += 1
        lengths.append(world.step([0.5] * 16, right) or 0)
    reached = sum(gained[n] for n in lengths[-500:]) / 500
    assert reached > 0.97 * max(gained)


def passages(sure: float, share: float, seed: int) -> Iterator[tuple[list[float], int]]:
    """Of endless text: how sure a draft model is of its next 8 tokens, and how many are right.

    A draft model knows how sure it may be: `sure`, in passages that make up that share of the text,
    and 0.3 elsewhere, but for some tokens.
    """
    coins, easy = random.Random(seed), True
    while True:
        easy = coins.random() < share if coins.random() < 0.1 else easy
        sureness = [
            min(max(coins.gauss(sure if easy else 0.3, 0.15), 0.02), 0.99) for _ in range(8)
        ]
        right = 0
        while right < 8 and coins.random() < sureness[right]:
            right += 1
        yield sureness, right


PASSAGES = [(0.9, 0.8), (0.75, 0.5), (0.8, 0.15)]


@pytest.mark.parametrize(
    ("passage", "forward"), alternately(PASSAGES, [0.05, 0.15, 0.4], slow=PASSAGES[1:])
)
def test_no_fixed_length_is_much_better(passage: tuple[float, float], forward: float) -> None:
    """From the first token on, at costs that are known: cheap draft models and dear ones."""
    sure, share = passage
    costs = Costs(line(0.02), forward)
    world = World(costs)
    fixed_seconds, fixed_tokens = [0.0] * 9, [0] * 9
    for _, (sureness, right) in zip(range(1200), passages(sure, share, 0), strict=False):
        world.step(sureness, right)
        for length in range(9):
            fixed_tokens[length] += 1 + min(length, right)
            fixed_seconds[length] += costs.seconds(length, length)
    best = max(map(operator.truediv, fixed_tokens, fixed_seconds))
    # With a forward of 0.4 drafts gain a twentieth at most: less than chance takes.
    assert world.tokens / world.seconds > (0.97 if forward < 0.4 else 0.95) * best


@pytest.mark.usefixtures("quiet")
def test_clocks_are_measured_once(pair: tuple[Any, Any], cache: Path) -> None:
    """One for the target and one for the draft model, of forwards with more and fewer tokens."""
    target, draft = pair
    DraftedModel(target, draft)
    kept = {path: path.read_bytes() for path in cache.rglob("*.json")}
    assert len(kept) >= 1
    model = DraftedModel(target, draft)
    assert {path: path.read_bytes() for path in cache.rglob("*.json")} == kept
    assert model.drafter.num_nodes == 64
