"""Ranks of the true tokens are places in the sorted logits."""

from __future__ import annotations

import pytest
import torch

from medusa_heads.config import IGNORED, HeadsConfig
from medusa_heads.heads import MedusaHeads
from medusa_heads.training.loss.rows import SupervisedRows
from medusa_heads.training.measure import metrics as ranks_module
from medusa_heads.training.measure.metrics import head_ranks
from tests.training.loss_cases import (
    DRAFT_TOKENS,
    LmHead,
    random_heads,
    random_hidden,
    random_rows,
)


@pytest.mark.parametrize("vocab_matrix", ["shared", "own"])
@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_ranks_are_places_in_the_sorted_logits(
    vocab_matrix: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "chunk_pairs", lambda *_: 16)
    heads, rows = random_heads(3, vocab_matrix, kind=kind), random_rows(50, 3)
    hidden_RD = random_hidden(50)
    order_RKV = heads(hidden_RD, rows.tokens_RK).argsort(dim=-1, descending=True)
    expected_RK = (order_RKV == rows.labels_RK[..., None]).int().argmax(dim=-1)
    expected_RK = expected_RK.clamp(max=4).where(rows.labels_RK != IGNORED, IGNORED)
    assert torch.equal(head_ranks(heads, hidden_RD, rows, 4), expected_RK)


def test_a_token_outside_the_draft_vocabulary_ranks_last() -> None:
    heads, rows = random_heads(2, draft_tokens=DRAFT_TOKENS), random_rows(50, 2)
    ranks_RK = head_ranks(heads, random_hidden(50), rows, 16)
    inside_RK = torch.isin(rows.labels_RK, DRAFT_TOKENS)
    supervised_RK = rows.labels_RK != IGNORED
    assert (ranks_RK[inside_RK] < len(DRAFT_TOKENS)).all()
    assert (ranks_RK[supervised_RK & ~inside_RK] == 16).all()
    assert (ranks_RK[~supervised_RK] == IGNORED).all()


def test_equal_logits_rank_by_token_id() -> None:
    heads = MedusaHeads.from_target(LmHead(torch.ones(5, 2)), HeadsConfig(num_heads=1))
    labels_RK = torch.tensor([[0], [3], [4]])
    rows = SupervisedRows(torch.arange(3), labels_RK, torch.zeros_like(labels_RK))
    assert head_ranks(heads, torch.ones(3, 2), rows, 16).tolist() == [[0], [3], [4]]
