"""Sampled tokens follow the target's law, and a rule that bends it is noticed.

Shapes: B rows, N tree nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from medusa_heads.inference.acceptance import SampleThenMatch
from medusa_heads.inference.engine.noise import Noise
from medusa_heads.inference.engine.rows import Row
from scripts.prove.sampling import chi_square
from tests.inference.walking import VOCAB, row, tree


def draw_pairs(
    rule: SampleThenMatch, logits_1NV: Tensor, rounds: int, batch: int = 1, keyed: bool = False
) -> Tensor:
    """The first two tokens of each of many steps; a walk that ends early gives -1 as its second."""
    pairs = []
    for turn in range(rounds // batch):
        rows = [row(index=index, batch=batch) for index in range(batch)]
        if keyed:
            rule.noise = Noise(turn, rows, [0] * batch)
        rule(tree(batch), logits_1NV.expand(batch, -1, -1), rows)
        pairs += [[*one.tokens, -1][:2] for one in rows]
    return torch.tensor(pairs)


@pytest.mark.parametrize(
    ("batch", "keyed"),
    [
        (8, False),
        (8, True),
        *(pytest.param(1, keyed, marks=pytest.mark.slow) for keyed in (False, True)),
    ],
    ids=["8 rows", "8 rows, keyed noise", "one row", "one row, keyed noise"],
)
def test_sampled_tokens_follow_the_targets_distribution(batch: int, keyed: bool) -> None:
    """First tokens, and second tokens given an accepted first one, against the exact law."""
    torch.manual_seed(0)
    logits_BNV = torch.randn(1, 6, VOCAB) * 1.5
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.8), TopKLogitsWarper(8)])
    rule = SampleThenMatch(processors, do_sample=True)
    pairs = draw_pairs(rule, logits_BNV, 6000, batch, keyed)
    dummy: Tensor = torch.zeros(1, 1, dtype=torch.long)
    for node, counts_V in (
        (0, torch.bincount(pairs[:, 0], minlength=VOCAB)),
        (1, torch.bincount(pairs[pairs[:, 0] == 6, 1], minlength=VOCAB)),
        (4, torch.bincount(pairs[pairs[:, 0] == 9, 1], minlength=VOCAB)),
    ):
        scores_1V = processors(dummy, logits_BNV[:, node].clone())  # type: ignore[arg-type]
        statistic, _ = chi_square(counts_V, scores_1V.softmax(-1)[0])
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
    rule.processors = LogitsProcessorList([TemperatureLogitsWarper(1.0001)])
    counts_V = torch.bincount(draw_pairs(rule, logits_BNV, 2000)[:, 0], minlength=VOCAB)
    assert chi_square(counts_V, logits_BNV[0, 0].softmax(-1))[0] > 100
