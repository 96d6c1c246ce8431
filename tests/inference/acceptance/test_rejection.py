"""The rejection rule, enumerated: every outcome of its draws with its probability, no sampling.

Shapes: N tree nodes, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations, product
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
)

from medusa_heads.inference.acceptance import RejectionSampling, SampleThenMatch
from medusa_heads.inference.engine.noise import Noise
from medusa_heads.inference.engine.rows import Row, StopCheck
from medusa_heads.trees.tree import TokenTree, TreeShape
from tests.inference.outcomes import Outcomes
from tests.pairs import with_slow

VOCAB = 4
# Laws of four tokens: usual, sure, equal, without some tokens.
LAWS = [
    [0.1, 0.2, 0.3, 0.4],
    [0.4, 0.1, 0.3, 0.2],
    [0.97, 0.01, 0.01, 0.01],
    [0.25, 0.25, 0.25, 0.25],
    [0.0, 0.5, 0.5, 0.0],
    [0.3, 0.0, 0.0, 0.7],
    [0.0, 0.0, 1.0, 0.0],
]


class Uniform:
    """A number drawn evenly from 0 to 1 and scaled: below a bound or not, both are tried."""

    def __init__(self, outcomes: Outcomes, scale: float = 1.0) -> None:
        self._outcomes, self._scale = outcomes, scale

    def __mul__(self, scale: Tensor) -> Uniform:
        return Uniform(self._outcomes, self._scale * float(scale))

    def __lt__(self, bound: Tensor) -> bool:
        below = min(float(bound) / self._scale, 1.0)
        return self._outcomes.choose([below, 1 - below]) == 0


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Outcomes]:
    """Makes dice that torch draws from, from then on."""

    def roll() -> Outcomes:
        made = Outcomes()

        def multinomial(chances_V: Tensor, num_samples: int) -> Tensor:
            assert num_samples == 1
            return torch.tensor([made.choose((chances_V / chances_V.sum()).tolist())])

        monkeypatch.setattr(torch, "rand", lambda *_, **__: Uniform(made))
        monkeypatch.setattr(torch, "multinomial", multinomial)
        return made

    return roll


def drawings(q_V: Sequence[float], count: int) -> Iterator[tuple[float, tuple[int, ...]]]:
    """All ordered drawings without putting back, and their probabilities. Where q runs out of
    tokens, others stand in their places."""
    supported = [token for token in range(VOCAB) if q_V[token] > 0]
    others = [token for token in range(VOCAB) if q_V[token] == 0]
    for drawn in permutations(supported, min(count, len(supported))):
        left = [1 - sum(q_V[token] for token in drawn[:place]) for place in range(len(drawn))]
        chance = prod(q_V[token] / rest for token, rest in zip(drawn, left, strict=True))
        yield chance, (*drawn, *others[: count - len(drawn)])


def laws_found(
    rule: RejectionSampling,
    trees: Iterator[tuple[float, TokenTree]],
    p_NV: Tensor,
    roll: Callable[[], Outcomes],
) -> dict[int, list[float]]:
    """How likely each next token is behind each node that is reached, over all trees and outcomes;
    checks on the way that the path is that of the committed tokens."""
    found: dict[int, list[float]] = defaultdict(lambda: [0.0] * VOCAB)
    for of_tree, tree in trees:
        tokens, parents = tree.tokens_BN[0].tolist(), tree.parents_BN[0].tolist()
        dice = roll()
        for _ in dice.runs():
            row = Row(0, 1, torch.tensor([0]), StopCheck(StoppingCriteriaList()))
            (path,) = rule(tree, p_NV.log()[None], [row])
            assert [tokens[node] for node in path[1:]] == row.tokens[:-1]
            for node, token in zip(path, row.tokens, strict=True):
                found[node][token] += of_tree * dice.chance
            chosen = [
                node
                for node, parent in enumerate(parents)
                if parent == path[-1] and path[-1] not in tree.drawn_from
            ]
            assert row.tokens[-1] not in [tokens[node] for node in chosen]
    return {node: [part / sum(parts) for part in parts] for node, parts in found.items()}


def rule(kind: type[RejectionSampling] = RejectionSampling, *warpers: Any) -> RejectionSampling:
    return kind(LogitsProcessorList(warpers), do_sample=True)


def one_level(q_V: Sequence[float], count: int) -> Iterator[tuple[float, TokenTree]]:
    """A root with drawn children, all ways to draw them."""
    shape = TreeShape.from_choices([(rank,) for rank in range(count)])
    for chance, drawn in drawings(q_V, count):
        tree = shape.tree(torch.tensor([[0, *drawn]]))
        tree.drawn_from[0] = torch.tensor([q_V])  # type: ignore[index]
        yield chance, tree


@pytest.mark.parametrize(
    ("p_V", "q_V", "count"),
    [  # each pair of laws is in a quick one with every other number of drafts
        pytest.param(LAWS[i], LAWS[j], n, marks=[pytest.mark.slow] * ((i + j + n) % 2))
        for i, j, n in product(range(len(LAWS)), range(len(LAWS)), (1, 2, 3, 4))
    ],
)
def test_next_tokens_have_exactly_the_targets_law(
    p_V: list[float], q_V: list[float], count: int, outcomes: Callable[[], Outcomes]
) -> None:
    leaves = [LAWS[(node + 3) % len(LAWS)] for node in range(count)]
    p_NV = torch.tensor([p_V, *leaves])
    found = laws_found(rule(), one_level(q_V, count), p_NV, outcomes)
    for node, law_V in found.items():
        assert law_V == pytest.approx(p_NV[node].tolist(), abs=1e-6)


def mixed(q_V: Sequence[float], deeper_V: Sequence[float]) -> Iterator[tuple[float, TokenTree]]:
    """0 --- 1 --- 3, 4    1 and 2 drawn behind 0, 3 to 5 chosen, 6 and 7 drawn behind 3.
    |     |     `--- 6, 7
    |     `-- 5 below 2
    """
    shape = TreeShape([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)])
    for chance, drawn in drawings(q_V, 2):
        for deeper_chance, deeper in drawings(deeper_V, 2):
            tree = shape.tree(torch.tensor([[0, *drawn, 2, 0, 1, *deeper]]))
            tree.drawn_from[0] = torch.tensor([q_V])  # type: ignore[index]
            tree.drawn_from[3] = torch.tensor([deeper_V])  # type: ignore[index]
            yield chance * deeper_chance, tree


@pytest.mark.parametrize("turn", with_slow([0, 1, *range(4, len(LAWS))], [2, 3]))
def test_drawn_and_chosen_children_in_one_tree(turn: int, outcomes: Callable[[], Outcomes]) -> None:
    usual = [LAWS[0], LAWS[1], LAWS[3]]
    p_NV = torch.tensor([usual[node % 3] for node in range(8)])
    q_V, deeper_V = LAWS[turn], LAWS[turn - 1]
    found = laws_found(rule(), mixed(q_V, deeper_V), p_NV, outcomes)
    assert {0, 3} < set(found)
    for node, law_V in found.items():
        assert law_V == pytest.approx(p_NV[node].tolist(), abs=1e-6)


def test_the_law_is_that_of_the_warped_logits(outcomes: Callable[[], Outcomes]) -> None:
    p_NV = torch.tensor([LAWS[0]] * 3)
    found = laws_found(
        rule(RejectionSampling, TopKLogitsWarper(2)), one_level(LAWS[1], 2), p_NV, outcomes
    )
    for law_V in found.values():
        assert law_V == pytest.approx([0, 0, 3 / 7, 4 / 7], abs=1e-6)


class ForgetsTheRest(RejectionSampling):
    """Wrong: what is rejected is drawn anew from the whole law."""

    def _keep(self, p_V: Tensor, q_V: Tensor, drawn: Sequence[int]) -> tuple[int, int | None]:
        if torch.rand(()) * q_V[drawn[0]] < p_V[drawn[0]]:
            return drawn[0], 0
        return int(torch.multinomial(p_V, num_samples=1)), None


class KeepsTheDraftsLaw(RejectionSampling):
    """Wrong: later siblings count as if the first could still be drawn."""

    def _keep(self, p_V: Tensor, q_V: Tensor, drawn: Sequence[int]) -> tuple[int, int | None]:
        for place, token in enumerate(drawn):
            if torch.rand(()) * q_V[token] < p_V[token]:
                return token, place
            p_V = (p_V - q_V).clamp_min(0)
            p_V = p_V / p_V.sum()
        return int(torch.multinomial(p_V, num_samples=1)), None


@pytest.mark.parametrize("wrong", [ForgetsTheRest, KeepsTheDraftsLaw])
def test_a_wrong_rule_is_caught(
    wrong: type[RejectionSampling], outcomes: Callable[[], Outcomes]
) -> None:
    """Negative control."""
    p_NV = torch.tensor([LAWS[0]] * 3)
    found = laws_found(rule(wrong), one_level(LAWS[3], 2), p_NV, outcomes)
    assert max(abs(a - b) for a, b in zip(found[0], LAWS[0], strict=True)) > 1e-3


def sure(tokens: Sequence[int]) -> Tensor:
    """Laws, one a row: each of one token alone."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).float()


def batch_of(count: int) -> list[Row]:
    stop = StopCheck(StoppingCriteriaList(), count)
    return [Row(index, count, torch.tensor([0]), stop) for index in range(count)]


def test_rows_of_a_batch_have_drafts_and_laws_of_their_own() -> None:
    tree = TreeShape.from_choices([(0,), (0, 0)]).tree(
        torch.tensor([[0, 1, 3], [0, 1, 3], [0, 2, 1]])
    )
    tree.drawn_from[0] = sure([1, 1, 2])  # type: ignore[index]
    logits_BNV = torch.stack([sure([1, 3, 2]), sure([1, 3, 2]), sure([2, 3, 0])]).log()
    rows = batch_of(3)
    rows[1].done = True
    with torch.device("meta"):  # what names no device would lie on another one than the tensors
        paths = rule()(tree, logits_BNV, rows)
    assert paths == [[0, 1, 2], [], [0, 1]]
    assert [row.tokens for row in rows] == [[1, 3, 2], [], [2, 3]]


def test_a_rejected_draft_on_another_device_than_the_default() -> None:
    tree = TreeShape.from_choices([(0,), (1,)]).tree(torch.tensor([[0, 1, 2]]))
    tree.drawn_from[0] = torch.tensor([[0.0, 0.5, 0.5, 0.0]])  # type: ignore[index]
    logits_1NV = sure([3, 0, 0]).log()[None]
    (row,) = batch_of(1)
    with torch.device("meta"):
        assert rule()(tree, logits_1NV, [row]) == [[0]]
    assert row.tokens == [3]


def test_nothing_follows_the_end_of_a_row() -> None:
    tree = TreeShape.from_choices([(0,)]).tree(torch.tensor([[0, 1]]))
    tree.drawn_from[0] = sure([1])  # type: ignore[index]
    stop = StopCheck(StoppingCriteriaList([MaxLengthCriteria(2)]))
    row = Row(0, 1, torch.tensor([0]), stop)
    assert rule()(tree, sure([1, 2]).log()[None], [row]) == [[0]]
    assert row.tokens == [1] and row.done


def test_drawn_drafts_are_walked_greedily_where_no_token_is_drawn() -> None:
    tree = TreeShape.from_choices([(0,), (1,)]).tree(torch.tensor([[0, 1, 2]]))
    tree.drawn_from[0] = torch.tensor([LAWS[0]])  # type: ignore[index]
    logits_BNV = torch.tensor([[LAWS[1], LAWS[0], LAWS[0]]]).log()
    for token in (1, 2):
        logits_BNV[0, 0, token] = 5.0
        (row,) = batch_of(1)
        greedy = RejectionSampling(LogitsProcessorList(), do_sample=False)
        assert greedy(tree, logits_BNV, [row]) == [[0, token]]
        assert row.tokens == [token, 3]
        logits_BNV[0, 0, token] = -5.0


def test_by_keyed_noise_nothing_is_rejected() -> None:
    """What is drawn is the same whatever was drafted, and however."""
    torch.manual_seed(0)
    logits_1NV = torch.randn(1, 3, VOCAB)
    for seed in range(20):
        texts = []
        for drawn in (False, True):
            tree = TreeShape.from_choices([(0,), (1,)]).tree(torch.tensor([[0, 1, 2]]))
            if drawn:
                tree.drawn_from[0] = torch.tensor([LAWS[0]])  # type: ignore[index]
            keyed, rows = rule(), batch_of(1)
            keyed.noise = Noise(seed, rows, [0])
            texts.append((keyed(tree, logits_1NV, rows), rows[0].tokens))
        assert texts[0] == texts[1]


def test_chosen_drafts_are_walked_with_the_random_numbers_of_generate() -> None:
    torch.manual_seed(0)
    tree = TreeShape.from_choices([(0,), (0, 0), (1,)]).tree(torch.tensor([[0, 1, 2, 3]] * 3))
    logits_BNV = torch.randn(3, 4, VOCAB)
    for seed in range(10):
        said = []
        for kind in (SampleThenMatch, RejectionSampling):
            torch.manual_seed(seed)
            rows = batch_of(3)
            said.append((kind(LogitsProcessorList(), True)(tree, logits_BNV, rows), rows))
        assert said[0][0] == said[1][0]
        assert [row.tokens for row in said[0][1]] == [row.tokens for row in said[1][1]]


def test_the_drafts_law_goes_to_the_device_of_the_targets() -> None:
    """Torch's device without memory says so when numbers are sent for."""
    tree = TreeShape.from_choices([(0,)]).tree(torch.tensor([[0, 1]]))
    tree.drawn_from[0] = sure([1]).to("meta")  # type: ignore[index]
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        rule()(tree, sure([1, 2]).log()[None], batch_of(1))
