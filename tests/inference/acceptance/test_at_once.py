"""Acceptance without a walk finds what a walk finds, and draws what it draws."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from medusa_heads.inference.acceptance import SampleThenMatch
from medusa_heads.inference.acceptance.at_once import (
    ProcessorsOnDevice,
    deepest_path,
    draw_all,
    kinds,
)
from medusa_heads.inference.acceptance.base import warp
from medusa_heads.inference.acceptance.lossless import check_drawn
from medusa_heads.inference.engine.noise import NO_TOKEN, Noise, NoiseOnDevice
from medusa_heads.trees.tree import TreeShape
from tests.elsewhere import WithoutFloat64
from tests.inference.planted import BUSHY
from tests.inference.walking import VOCAB, row

SHAPE = TreeShape.from_choices(BUSHY)
ROWS = 6


@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "by keyed noise"])
@pytest.mark.parametrize("trial", range(4))
def test_as_a_walk(drawn: bool, trial: int) -> None:
    """Few tokens are likely, so that paths of all lengths are right."""
    generator = torch.Generator().manual_seed(trial)
    tokens_BN = torch.zeros(ROWS, SHAPE.num_nodes, dtype=torch.long)
    for node, choice in enumerate(SHAPE.choices, start=1):
        tokens_BN[:, node] = choice[-1]  # so siblings differ
    tree = SHAPE.tree(tokens_BN)
    logits_BNV = torch.randn(ROWS, SHAPE.num_nodes, VOCAB, generator=generator)
    logits_BNV[..., :3] += 4.0
    rows = [row(index=b, batch=ROWS) for b in range(ROWS)]
    for b, each in enumerate(rows):
        for token in range(b):
            each.commit(token)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.9), TopKLogitsWarper(5)])
    rule, noise = SampleThenMatch(warpers if drawn else LogitsProcessorList(), drawn), None
    if drawn:
        rule.noise = Noise(7, rows, [0] * ROWS)
        written_B = torch.tensor([len(each.tokens) for each in rows])
        keys_B, tokens_V = torch.tensor(rule.noise.keys(rows)), torch.arange(VOCAB)
        noise = NoiseOnDevice(keys_B, written_B, tokens_V)
    assert rule.draws_at_once([])
    drawn_BN = draw_all(tree, logits_BNV, rule.processors, noise)
    found = deepest_path(tree, drawn_BN, SHAPE.max_depth)
    before = [len(each.tokens) for each in rows]
    paths = rule(tree, logits_BNV, rows)
    for b, walked in enumerate(paths):
        count = int(found.length_B1[b])
        assert found.nodes_BA[b, :count].tolist() == walked
        assert found.tokens_BA[b, :count].tolist() == rows[b].tokens[before[b] :]
    assert len({len(path) for path in paths}) > 1


def test_what_is_no_distribution_draws_no_token() -> None:
    rows = [row(index=b, batch=2) for b in range(2)]
    keys_B = torch.tensor(Noise(7, rows, [0, 0]).keys(rows))
    scores_BNV = torch.zeros(2, 2, VOCAB)
    scores_BNV[1] = -torch.inf
    scores_BNV[0, 1, 3] = torch.nan
    depth_BN = torch.tensor([[0, 1], [0, 1]])
    noise = NoiseOnDevice(keys_B, torch.zeros(2).long(), torch.arange(VOCAB))
    drawn_BN: Tensor = noise.draw_all(scores_BNV, depth_BN)
    assert drawn_BN[0, 0] >= 0
    assert drawn_BN[0, 1] == NO_TOKEN and drawn_BN[1].tolist() == [NO_TOKEN] * 2
    with pytest.raises(ValueError, match="no distribution"):
        check_drawn(drawn_BN[1].tolist())


WARPERS = {
    "temperature": (TemperatureLogitsWarper(0.7), TemperatureLogitsWarper(1.3)),
    "top_p": (TopPLogitsWarper(0.95), TopPLogitsWarper(0.3)),
    "min_p": (MinPLogitsWarper(0.05), MinPLogitsWarper(0.3)),
    "epsilon": (EpsilonLogitsWarper(0.01), EpsilonLogitsWarper(0.05)),
    "eta": (EtaLogitsWarper(0.01), EtaLogitsWarper(0.1)),
    "typical": (TypicalLogitsWarper(0.9), TypicalLogitsWarper(0.3)),
}


@pytest.mark.parametrize("kind", WARPERS)
def test_numbers_on_the_device_say_the_same(kind: str) -> None:
    """To the last bit, of one setting after the other; and they are all that is not of the kind."""
    ids: torch.LongTensor = torch.zeros(1, 1).long()  # type: ignore[assignment]
    first, then = (LogitsProcessorList([warper, TopKLogitsWarper(9)]) for warper in WARPERS[kind])
    scores_RV = 3 * torch.randn(500, VOCAB, generator=torch.Generator().manual_seed(0))
    on_device, seen = ProcessorsOnDevice(first, scores_RV.device), []
    for processors in (first, then, first):
        on_device.take(processors)
        seen.append(warp(on_device.copies, ids, scores_RV))
        assert torch.equal(seen[-1], warp(processors, ids, scores_RV))
    assert torch.equal(seen[0], seen[2]) and not torch.equal(seen[0], seen[1])
    assert kinds(first) == kinds(then) == kinds(on_device.copies)
    assert kinds(first) != kinds(LogitsProcessorList([WARPERS[kind][0], TopKLogitsWarper(8)]))


def test_numbers_of_processors_on_a_device_without_double_precision() -> None:
    """There they are rounded once, as scores are."""
    given = LogitsProcessorList([TemperatureLogitsWarper(0.7)])
    with WithoutFloat64():
        processors = ProcessorsOnDevice(given, torch.device("meta"))
        processors.take(given)
    (copied,) = processors.copies
    assert copied.temperature.dtype == torch.float32 and copied.temperature.is_meta
