"""Trees that grow as long as their next tokens gain more than they cost."""

from __future__ import annotations

import json
import operator
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_heads import DraftedModel, TargetModel
from medusa_heads.inference.draft_costs import DraftCosts, draft_costs
from medusa_heads.inference.drafters.adaptive_tree import AdaptiveTreeDrafter
from medusa_heads.inference.drafters.draft_trust import DraftTrust
from medusa_heads.tree import TokenTree
from tests.conftest import DEVICE, TinyLlama

VOCAB = 24
CHEAP = DraftCosts([1.0 + 0.01 * n for n in range(9)], first=0.02, further=0.02)
FLAT = DraftCosts([1.0 + 0.001 * n for n in range(40)], first=0.02, further=0.02)
DEAR = DraftCosts([1.0 + 0.3 * n for n in range(9)], first=0.3, further=0.3)


@pytest.fixture(scope="module")
def pair(tiny_llama: TinyLlama) -> tuple[Any, Any]:
    target, draft = tiny_llama(vocab_size=VOCAB), tiny_llama(vocab_size=VOCAB)
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=noise))
    return target.to(DEVICE), draft.to(DEVICE)


def drafted(
    target: Any, draft: Any, costs: DraftCosts, *, chain_only: bool = False
) -> DraftedModel:
    model = DraftedModel(target, draft, tree="chain")
    model.drafter = AdaptiveTreeDrafter(model.draft, VOCAB, costs, chain_only=chain_only)
    return model


@pytest.mark.parametrize("costs", [FLAT, CHEAP, DEAR], ids=["flat", "cheap", "dear"])
def test_equals_generate(pair: tuple[Any, Any], costs: DraftCosts) -> None:
    """One text, and a ragged batch; what is learnt is carried from one to the next."""
    target, draft = pair
    model = drafted(target, draft, costs)
    ids_BT = torch.randint(3, VOCAB, (5, 10), generator=torch.Generator().manual_seed(1))
    mask_BT = (torch.arange(10) >= torch.tensor([[0], [3], [7], [1], [5]])).long()
    for rows in (1, 5, 3):
        inputs: dict[str, Any] = {
            "input_ids": ids_BT[:rows].to(DEVICE),
            "attention_mask": mask_BT[:rows],
        }
        inputs["attention_mask"] = inputs["attention_mask"].to(DEVICE)
        for options in ({"max_new_tokens": 40}, {"max_new_tokens": 60, "eos_token_id": 2}):
            settings: dict[str, Any] = {**inputs, **options, "do_sample": False, "pad_token_id": 0}
            got_BT: Any = model.generate(**settings)
            assert torch.equal(got_BT, target.generate(**settings))
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

    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 300, **options}
    with monkeypatch.context() as patch:
        patch.setattr(model.target, "verify", noted)
        model.generate(torch.tensor([[5, 6, 7, 8]]).to(DEVICE), **settings)
    return trees


def test_lengths_follow_worth_and_costs(
    pair: tuple[Any, Any], tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair

    def lengths(draft: Any, costs: DraftCosts) -> list[int]:
        model = drafted(target, draft, costs, chain_only=True)
        return [tree.num_nodes - 1 for tree in drafts_of(model, monkeypatch)]

    assert lengths(target, CHEAP)[-5:] == [8] * 5  # every token is right
    assert max(lengths(draft, DEAR)[20:]) < 8
    stranger = tiny_llama(vocab_size=VOCAB, num_layers=1, seed=9).to(DEVICE)
    useless = lengths(stranger, DEAR)
    # It rests, and is tried ever more rarely.
    assert sum(map(bool, useless[-128:])) <= 8 and any(useless)


@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
def test_trees_are_as_wide_as_pays(
    pair: tuple[Any, Any], drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair
    options: dict[str, Any] = {"do_sample": drawn, "temperature": 0.5 if drawn else None}
    tokens_per_step = {}
    for name, costs, chain_only in (("tree", FLAT, False), ("chain", FLAT, True)):
        torch.manual_seed(0)
        model = drafted(target, draft, costs, chain_only=chain_only)
        trees = drafts_of(model, monkeypatch, **options)
        tokens_per_step[name] = model.last_stats.tokens_per_step
        for tree in trees:
            parents = tree.parents_BN[0].tolist()
            own = [parent for parent in parents[1:] if parent >= 0]
            assert chain_only is False or own == list(range(len(own)))
            assert tree.num_nodes <= 8 or chain_only or tree.num_nodes % 8 == 0
            # Of what was drawn, every token's distribution is known.
            assert set(tree.drawn_from) == (set(own) if drawn else set())
    assert tokens_per_step["tree"] > 1.15 * tokens_per_step["chain"]
    # Where each verified token costs a quarter of a step, a second one behind another rarely pays.
    costs = DraftCosts([1.0 + 0.25 * n for n in range(9)], first=0.01, further=0.01)
    trees = drafts_of(drafted(target, draft, costs), monkeypatch, **options)
    parents = [tree.parents_BN[0, 1:].tolist() for tree in trees[50:]]
    beside, nodes = sum(len(each) - len(set(each)) for each in parents), sum(map(len, parents))
    assert nodes > 0 and beside < 0.15 * nodes


def test_tokens_that_cannot_be_are_not_drawn(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair
    torch.manual_seed(0)
    trees = drafts_of(drafted(target, draft, FLAT), monkeypatch, do_sample=True, top_k=2)
    children = [0, 0]
    for tree in trees:
        parents, tokens = tree.parents_BN[0].tolist(), tree.tokens_BN[0].tolist()
        for node, probs_BV in tree.drawn_from.items():
            drawn = [tokens[n] for n, parent in enumerate(parents) if parent == node]
            assert 1 <= len(drawn) <= 2 and min(probs_BV[0, drawn]) > 0
            children[len(drawn) - 1] += 1
    assert min(children) > 0


def test_of_too_few_nodes_the_better_ones_are_taken() -> None:
    """Tokens that are rarely right are left out where they would take the place of others."""
    trust = DraftTrust(FLAT, ranks=4)
    trust.worth_reading(0, 1.0)
    assert trust.worth_verifying(0, 0.01, nodes=1, promised=0.9)
    for _ in range(10):
        assert not trust.worth_verifying(3, 0.5, nodes=FLAT.most, promised=0.5)
        assert not trust.worth_reading(3, 0.5, nodes=FLAT.most)
        trust.learn_step(5.0, 1.0)
    assert not trust.worth_verifying(0, 0.01, nodes=1, promised=0.9)
    assert trust.worth_verifying(0, 0.5, nodes=1, promised=0.4)


def learn(trust: DraftTrust, sureness: Sequence[float], kept: int) -> None:
    """From a chain of which so many tokens were right."""
    for depth, sure in enumerate(sureness[: kept + 1]):
        trust.learn(0, sure, right=depth < kept)


def test_a_draft_model_that_gets_better_is_found_out() -> None:
    trust = DraftTrust(DEAR)
    for _ in range(400):
        if trust.worth_reading(0, 1.0):
            trust.chances([0.5])
            trust.learn(0, 0.5, right=False)
    tried = [trust.worth_reading(0, 1.0) for _ in range(130)]
    assert 1 <= sum(tried) <= 3
    for _ in range(90):
        trust.learn(0, 0.5, right=True)
    assert all([trust.worth_reading(0, 1.0) for _ in range(40)][16:])  # reckoned now and then


def test_easier_passages_are_drafted_for() -> None:
    """Of a text in which drafts that do not pay on the whole are right for a while, then wrong."""
    trust, coins = DraftTrust(DEAR), torch.Generator().manual_seed(0)
    steps, tried = {True: 0, False: 0}, {True: 0, False: 0}
    for step in range(6000):
        easy = step % 200 < 40
        steps[easy] += 1
        drafted = trust.worth_reading(0, 1.0)
        if drafted:
            trust.chances([0.5])
        tried[easy] += drafted
        right = drafted and float(torch.rand((), generator=coins)) < (0.95 if easy else 0.15)
        if drafted:
            trust.learn(0, 0.5, right)
        trust.learn_step(1 + right, DEAR.seconds(int(drafted), int(drafted)))
    assert tried[True] > 0.25 * steps[True] and tried[False] < 0.1 * steps[False]


def test_the_length_is_the_best_where_all_tokens_are_alike() -> None:
    """Against the optimum of a chance per token and costs that are known: Leviathan et al."""
    chance, costs = 0.8, DraftCosts([1.0] * 17, first=0.12, further=0.12)
    gained = [(1 - chance ** (n + 1)) / (1 - chance) / costs.seconds(n, n) for n in range(17)]
    best = max(range(17), key=gained.__getitem__)
    trust, coins = DraftTrust(costs), torch.Generator().manual_seed(0)
    for _ in range(3000):
        n = 0
        while n < 16 and trust.worth_reading(n, chance**n):
            trust.chances([0.5])
            n += 1
        flips = (torch.rand(n, generator=coins) < chance).tolist()
        right = flips.index(False) if False in flips else n
        learn(trust, [0.5] * n, right)
        trust.learn_step(1 + right, costs.seconds(n, n))
    assert gained[n] > 0.97 * gained[best]


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


@pytest.mark.parametrize(("sure", "share"), [(0.9, 0.8), (0.75, 0.5), (0.8, 0.15)])
@pytest.mark.parametrize("forward", [0.05, 0.15, 0.4])
def test_no_fixed_length_is_much_better(sure: float, share: float, forward: float) -> None:
    """From the first token on, at costs that are known: cheap draft models and dear ones."""
    costs = DraftCosts([1.0 + 0.02 * n for n in range(9)], first=1.2 * forward, further=forward)
    trust, seconds, tokens = DraftTrust(costs), 0.0, 0
    fixed_seconds, fixed_tokens = [0.0] * 9, [0] * 9
    for _, (sureness, right) in zip(range(1200), passages(sure, share, 0), strict=False):
        n = forwards = 0
        chance = 1.0
        while n < 8 and trust.worth_reading(n, chance):
            forwards += 1
            chance *= trust.chances([sureness[n]])[0]
            if not trust.worth_verifying(n, chance):
                break
            n += 1
        kept, took = min(n, right), costs.seconds(n, forwards)
        learn(trust, sureness[:n], kept)
        trust.learn_step(1 + kept, took)
        tokens, seconds = tokens + 1 + kept, seconds + took
        for length in range(9):
            fixed_tokens[length] += 1 + min(length, right)
            fixed_seconds[length] += costs.seconds(length, length)
    best = max(map(operator.truediv, fixed_tokens, fixed_seconds))
    assert tokens / seconds > 0.97 * best


def test_costs_are_measured(pair: tuple[Any, Any], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("MEDUSA_HEADS_CACHE", str(tmp_path))
    target, draft = map(TargetModel, pair)
    costs = draft_costs(target, draft)
    assert costs.most == 63 and costs.deepest == 16
    assert costs.first > 0 and min(costs.further, costs.reading, costs.beside) >= 0
    assert list(costs.verification) == sorted(costs.verification)
    assert costs.seconds(0, 0) < costs.seconds(2, 2) < costs.seconds(8, 8)
    assert costs.seconds(8, 8) <= costs.seconds(8, 8, beside=20)
    (kept,) = tmp_path.rglob("*.json")
    before = kept.read_bytes()
    assert draft_costs(target, draft) == costs
    assert kept.read_bytes() == before
    # Something else ran while drafts of one token were verified.
    measured = json.loads(before)
    measured["steps"]["verify:1"][0] += 10 * measured["steps"]["verify:15"][0]
    kept.write_text(json.dumps(measured))
    disturbed = draft_costs(target, draft)
    assert disturbed.verification[1] <= costs.verification[2]
    assert disturbed.verification[2:] == costs.verification[2:]
