"""Acceptance: the walk on hand-set logits, and the distribution of sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from medusa_heads.inference.acceptance import SampleThenMatch
from medusa_heads.inference.engine.rows import Row, StopCheck
from medusa_heads.trees.tree import TokenTree, TreeShape

VOCAB = 12
#   0:5 --- 1:6 --- 2:7 --- 3:8
#      `--- 4:9 --- 5:7
SHAPE = TreeShape.from_choices([(0,), (0, 0), (0, 0, 0), (1,), (1, 0)])


def tree(batch: int = 1) -> TokenTree:
    return SHAPE.tree(torch.tensor([[5, 6, 7, 8, 9, 7]] * batch))


def logits_naming(tokens: list[int]) -> Tensor:
    """[1, N, V]: node i's most likely token is tokens[i]."""
    return torch.nn.functional.one_hot(torch.tensor([tokens]), VOCAB).float() * 20


def row(max_length: int = 100, eos: int | None = None) -> Row:
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length)])
    if eos is not None:
        criteria.append(EosTokenCriteria(eos))
    return Row(0, 1, torch.tensor([1, 2, 5]), StopCheck(criteria))


@pytest.fixture(params=[True, False], ids=["all at once", "lazy"])
def runs_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk for devices that run ahead of the host, and the one for a CPU."""
    if request.param:
        monkeypatch.setattr(f"{SampleThenMatch.__module__}._runs_ahead", lambda device: True)
        monkeypatch.delattr(SampleThenMatch, "_draw")  # nothing is drawn node by node
    else:
        monkeypatch.setattr(f"{SampleThenMatch.__module__}._runs_ahead", lambda device: False)


@pytest.mark.usefixtures("runs_ahead")
@pytest.mark.parametrize(
    ("named", "path", "tokens"),
    [
        pytest.param([0, 0, 0, 0, 0, 0], [0], [0], id="never accepts"),
        pytest.param([6, 7, 8, 3, 0, 0], [0, 1, 2, 3], [6, 7, 8, 3], id="always accepts"),
        pytest.param([9, 0, 0, 0, 7, 11], [0, 4, 5], [9, 7, 11], id="the second branch"),
        pytest.param([6, 0, 0, 0, 0, 0], [0, 1], [6, 0], id="token 0 is no padding"),
    ],
)
def test_greedy_walk(named: list[int], path: list[int], tokens: list[int]) -> None:
    rule = SampleThenMatch(LogitsProcessorList(), do_sample=False)
    one = row()
    assert rule(tree(), logits_naming(named), [one]) == [path]
    assert one.tokens == tokens


@pytest.mark.usefixtures("runs_ahead")
def test_rows_that_run_ahead_walk_their_own_paths() -> None:
    walk_a_batch(SampleThenMatch(LogitsProcessorList(), do_sample=False))


@pytest.mark.parametrize("processors", [[], [TopKLogitsWarper(12)]], ids=["plain", "warped"])
def test_rows_of_a_batch_walk_their_own_paths(processors: list[TopKLogitsWarper]) -> None:
    walk_a_batch(SampleThenMatch(LogitsProcessorList(processors), do_sample=False))


def walk_a_batch(rule: SampleThenMatch) -> None:
    """Rows that accept all, nothing, another branch; that end; and one that has ended before."""
    named = [[6, 7, 8, 3, 0, 0], [0] * 6, [9, 0, 0, 0, 7, 11], [6, 7, 8, 3, 0, 0]]
    rows = [row(), row(), row(), row(max_length=5)]
    rows.insert(1, row(max_length=4))
    rows[1].commit(1)
    logits_BNV = torch.cat([logits_naming(tokens) for tokens in [named[0], *named]])
    assert rule(tree(5), logits_BNV, rows) == [[0, 1, 2, 3], [], [0], [0, 4, 5], [0, 1]]
    assert [one.tokens for one in rows] == [[6, 7, 8, 3], [1], [0], [9, 7, 11], [6, 7]]


def test_nothing_follows_an_end_token_inside_an_accepted_block() -> None:
    rule = SampleThenMatch(LogitsProcessorList(), do_sample=False)
    one = row(eos=7)
    assert rule(tree(), logits_naming([6, 7, 8, 3, 0, 0]), [one]) == [[0, 1]]
    assert one.tokens == [6, 7] and one.done


def test_length_limit_inside_an_accepted_block() -> None:
    rule = SampleThenMatch(LogitsProcessorList(), do_sample=False)
    one = row(max_length=6)
    assert rule(tree(), logits_naming([6, 7, 8, 3, 0, 0]), [one]) == [[0, 1, 2]]
    assert one.tokens == [6, 7, 8] and one.length == 6 and one.done


def chi_square(counts_V: Tensor, probabilities_V: Tensor) -> float:
    expected_V = probabilities_V * counts_V.sum()
    seen_V = expected_V > 0
    assert counts_V[~seen_V].sum() == 0, "a token of probability 0 was drawn"
    return float(((counts_V - expected_V) ** 2 / expected_V)[seen_V].sum())


def draw_pairs(rule: SampleThenMatch, logits_1NV: Tensor, rounds: int, batch: int = 1) -> Tensor:
    """The first two tokens of each of many steps; a walk that ends early gives -1 as its second."""
    pairs = []
    for _ in range(rounds // batch):
        rows = [row() for _ in range(batch)]
        rule(tree(batch), logits_1NV.expand(batch, -1, -1), rows)
        pairs += [[*one.tokens, -1][:2] for one in rows]
    return torch.tensor(pairs)


@pytest.mark.parametrize("batch", [1, 8])
def test_sampled_tokens_follow_the_targets_distribution(batch: int) -> None:
    """First tokens, and second tokens given an accepted first one, against the exact law."""
    torch.manual_seed(0)
    logits_BNV = torch.randn(1, 6, VOCAB) * 1.5
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.8), TopKLogitsWarper(8)])
    rule = SampleThenMatch(processors, do_sample=True)
    pairs = draw_pairs(rule, logits_BNV, 6000, batch)
    dummy: Tensor = torch.zeros(1, 1, dtype=torch.long)
    for node, counts_V in (
        (0, torch.bincount(pairs[:, 0], minlength=VOCAB)),
        (1, torch.bincount(pairs[pairs[:, 0] == 6, 1], minlength=VOCAB)),
        (4, torch.bincount(pairs[pairs[:, 0] == 9, 1], minlength=VOCAB)),
    ):
        scores_1V = processors(dummy, logits_BNV[:, node].clone())  # type: ignore[arg-type]
        statistic = chi_square(counts_V.float(), scores_1V.softmax(-1)[0])
        assert statistic < 24.3, f"node {node}"  # 7 degrees of freedom, p = 0.001


class AcceptMoreThanAllowed(SampleThenMatch):
    """A wrong rule: takes a drafted child whenever it is likely enough, as lossy rules do."""

    def _draw(
        self, logits_BNV: Tensor, rows: Sequence[Row], walking: Sequence[int], nodes: Sequence[int]
    ) -> list[int]:
        drawn = super()._draw(logits_BNV, rows, walking, nodes)
        likely_B = logits_BNV[:, 0].softmax(-1)[:, 6] > 0.05
        return [
            6 if node == 0 and likely_B[b] and token != 9 else token
            for b, node, token in zip(walking, nodes, drawn, strict=True)
        ]


def test_a_wrong_rule_is_caught() -> None:
    """Negative control for the distribution test."""
    torch.manual_seed(0)
    logits_BNV = torch.randn(1, 6, VOCAB) * 0.5
    rule = AcceptMoreThanAllowed(LogitsProcessorList(), do_sample=True)
    rule._processors = LogitsProcessorList([TemperatureLogitsWarper(1.0001)])
    counts_V = torch.bincount(draw_pairs(rule, logits_BNV, 2000)[:, 0], minlength=VOCAB)
    assert chi_square(counts_V.float(), logits_BNV[0, 0].softmax(-1)) > 100
