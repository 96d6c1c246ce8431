"""As many nodes as pay: chances over seconds, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from medusa_heads.inference.step_costs import StepCosts
from medusa_heads.prefix_tree import PrefixTree
from medusa_heads.tree import TokenTree

CPU = torch.device("cpu")


def chain(*chances: float) -> PrefixTree:
    tree = PrefixTree(0)
    tree.add_path(range(1, len(chances) + 1), chances)
    return tree


def nodes(cut: tuple[TokenTree, float]) -> int:
    return cut[0].num_nodes


def test_takes_the_size_with_the_most_tokens_a_second() -> None:
    costs = StepCosts({0: 1.0, 1: 1.1, 3: 1.6, 7: 3.0})
    # (1 + .9) / 1.1 = 1.73 against (1 + .9 + .8 + .7) / 1.6 = 2.1 and 3.4 / 3.0
    assert nodes(costs.cut([chain(0.9, 0.8, 0.7)], CPU)) == 4
    # 1.73 against 2.05 / 1.6
    assert nodes(costs.cut([chain(0.9, 0.1, 0.05)], CPU)) == 2
    assert nodes(costs.cut([chain(0.05, 0.01)], CPU)) == 1
    assert nodes(costs.cut([PrefixTree(0)], CPU)) == 1


def test_rows_of_a_batch_decide_together() -> None:
    costs = StepCosts({0: 1.0, 1: 1.1, 3: 1.6})
    sure, unsure = chain(0.9, 0.9, 0.9), chain(0.0, 0.0, 0.0)
    assert nodes(costs.cut([sure], CPU)) == 4
    assert nodes(costs.cut([sure, unsure, unsure, unsure], CPU)) == 2


def test_a_depth_promises_no_more_than_a_certainty() -> None:
    tree = PrefixTree(0)
    for token in range(4):
        tree.add(0, token, 0.9)
    # One node is believed at 0.9; three more could not bring 1 + 3.6 tokens.
    assert nodes(StepCosts({0: 1.0, 1: 1.1, 4: 1.6}).cut([tree], CPU)) == 2


def test_a_drafter_is_asked_where_it_adds_more_than_it_costs() -> None:
    costs = StepCosts({0: 1.0, 4: 1.1}, draft_seconds=0.4)
    drafted, unknown, known = [0.8, 0.5, 0.3], PrefixTree(0), chain(0.98, 0.96, 0.94, 0.92)
    assert costs.worth_asking([unknown], drafted)[0]
    # 4.8 tokens in 1.1 seconds against at most 5.0 in 1.5.
    assert not costs.worth_asking([known], drafted)[0]
    assert not costs.worth_asking([unknown], [0.2, 0.1])[0]
    assert costs.worth_asking([known, unknown, unknown, unknown], drafted)[0]


def test_noise_of_measurement_is_smoothed() -> None:
    # Seven nodes were measured faster than three: they cost as much.
    costs = StepCosts({0: 1.0, 3: 1.4, 7: 1.2})
    assert nodes(costs.cut([chain(*[0.9] * 3, *[0.01] * 4)], CPU)) == 8


def test_a_disturbed_measurement_lifts_no_other() -> None:
    costs = StepCosts({0: 5.0, 3: 1.4, 7: 2.0, 15: 9.0, 31: 3.0})
    assert [costs.seconds(size) for size in (0, 3, 7, 15, 31)] == [1.4, 1.4, 2.0, 3.0, 3.0]


def test_fixed_size_and_one_cost_for_all() -> None:
    fixed = StepCosts({7: 2.0}, fixed=True)
    assert nodes(fixed.cut([chain(0.5)], CPU)) == fixed.most + 1 == 8
    assert nodes(StepCosts.of_size(5).cut([chain(*[0.01] * 9)], CPU)) == 6
    assert nodes(StepCosts.of_size(5).cut([chain(0.01)], CPU)) == 2


@pytest.mark.parametrize("seconds", [{}, {-1: 1.0}, {3: 0.0}], ids=str)
def test_what_no_machine_measures(seconds: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="step costs need"):
        StepCosts(seconds)


def test_promises_are_believed_in_part() -> None:
    costs = StepCosts({0: 1.0, 3: 1.5})
    tree = chain(0.5, 0.3, 0.1)
    drafts, promised = costs.cut([tree], CPU)
    assert drafts.num_nodes == 4 and promised == pytest.approx(0.9)
    drafts, promised = costs.cut([tree], CPU, belief=0.4)
    assert drafts.num_nodes == 1 and promised == 0
    assert costs.worth_asking([PrefixTree(0)], [0.5, 0.3, 0.1])[0]
    assert not costs.worth_asking([PrefixTree(0)], [0.5, 0.3, 0.1], belief=0.4)[0]


def test_drafting_costs_what_it_has_cost() -> None:
    costs = StepCosts({0: 1.0, 3: 1.2}, draft_seconds=0.1)
    assert costs.worth_asking([PrefixTree(0)], [0.4, 0.2, 0.1])[0]
    for _ in range(100):
        costs.learn_drafting(0.9)
    assert not costs.worth_asking([PrefixTree(0)], [0.4, 0.2, 0.1])[0]
    # Once it was asked, that is spent whatever the size: more nodes are worth more.
    assert nodes(costs.cut([chain(0.3, 0.05, 0.01)], CPU, asked=False)) == 4
    assert nodes(costs.cut([chain(0.15, 0.05, 0.01)], CPU, asked=False)) == 4
    assert nodes(costs.cut([chain(0.1, 0.05, 0.01)], CPU, asked=False)) == 1
    assert nodes(costs.cut([chain(0.1, 0.05, 0.01)], CPU, asked=True)) == 4
