"""The correction by the token before: what it adds to heads of every kind, and when nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from medusa_heads.config import HeadsConfig
from medusa_heads.heads import DraftHeads, new_heads
from medusa_heads.heads.correction import Correction
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.dynamic_tree import Ranking
from tests.conftest import TinyLlama
from tests.training.loss_cases import D, W, random_heads

KINDS = ["medusa", "hydra"]
MATRICES = ["shared", "own"]


def inputs(rows: int, heads: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden_RD = torch.randn(rows, D, generator=generator).double()
    return hidden_RD, torch.randint(W, (rows, heads), generator=generator)


@pytest.mark.parametrize("kind", KINDS)
def test_fresh_heads_predict_what_the_target_does(tiny_llama: TinyLlama, kind: str) -> None:
    target = TargetModel(tiny_llama())
    heads = new_heads(target, HeadsConfig(kind=kind, num_heads=2, correction_rank=4))  # type: ignore[arg-type]
    ids_BT = torch.arange(24).view(2, 12)
    logits_BTKV = heads(target.hidden(ids_BT), ids_BT[:, :, None].expand(-1, -1, 2))
    expected_BTV = target.model(ids_BT).logits
    torch.testing.assert_close(logits_BTKV, expected_BTV[:, :, None].expand_as(logits_BTKV))


def test_one_step_of_an_optimiser_moves_logits_by_much_of_the_rate() -> None:
    """At a tenth of the scale, 64 steps left later heads with two thirds of their accuracy."""
    torch.manual_seed(0)
    correction, rank, rate = Correction(50, 50, 128), 128, 1e-3
    optimizer = torch.optim.AdamW(correction.parameters(), lr=rate, weight_decay=0.0)
    before_R, logits_RC = torch.arange(50), torch.zeros(50, 50)
    torch.nn.functional.cross_entropy(correction.add_to(logits_RC, before_R), before_R).backward()
    optimizer.step()
    moved_RC = correction.add_to(logits_RC, before_R)
    assert 0.3 < moved_RC.diagonal().mean().item() / (rate * rank) < 1.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_matrix", MATRICES)
@pytest.mark.parametrize("draft_tokens", [None, torch.tensor([0, 2, 3, 7, 10])])
def test_it_adds_a_product_of_the_token_before(
    kind: str, vocab_matrix: str, draft_tokens: Tensor | None
) -> None:
    settings = {"kind": kind, "draft_tokens": draft_tokens, "correction_rank": 2}
    heads = random_heads(3, vocab_matrix, **settings)  # type: ignore[arg-type]
    hidden_RD, tokens_RK = inputs(5, 3)
    corrected_RKV = heads(hidden_RD, tokens_RK)
    assert heads.correction is not None
    correction, heads.correction = heads.correction, None
    added_RKV = correction.before.weight[tokens_RK] @ correction.after.weight.T
    torch.testing.assert_close(corrected_RKV, heads(hidden_RD, tokens_RK) + added_RKV)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_matrix", MATRICES)
@pytest.mark.parametrize("rank", [None, 2])
def test_after_a_path_heads_say_what_they_learnt_to_say_of_it(
    kind: str, vocab_matrix: str, rank: int | None
) -> None:
    heads: DraftHeads = random_heads(3, vocab_matrix, kind=kind, correction_rank=rank)
    hidden_BD, _ = inputs(2, 3)
    paths_BFK = torch.randint(W, (2, 4, 3), generator=torch.Generator().manual_seed(2))
    expected_BFKV = heads(hidden_BD[:, None].expand(-1, 4, -1), paths_BFK)
    after = heads.after_paths(hidden_BD)
    for head in (2, 0, 1, 0):  # in any order, and again: nothing is written in place
        asked = head, paths_BFK[:, :, : head + 1], torch.arange(4).expand(2, -1)
        got_BFV, places = after(*asked)
        assert places is None
        torch.testing.assert_close(got_BFV, expected_BFKV[:, :, head])
        if rank is not None and kind == "medusa":
            some_BFC, places_BC = heads.after_paths(hidden_BD, likely=5)(*asked)
            assert places_BC is not None and places_BC.shape == (2, 5)
            own_BKV = heads._project_all(heads.features(hidden_BD))
            assert torch.equal(own_BKV[:, head].topk(5).indices.sort()[0], places_BC.sort()[0])
            index_BFC = places_BC[:, None].expand_as(some_BFC)
            torch.testing.assert_close(some_BFC, got_BFV.gather(2, index_BFC))
            tokens_BFR, _ = Ranking(heads, [1.0] * 3).best(some_BFC, 2, head, places_BC)
            rest_BFV = torch.full_like(got_BFV, -torch.inf).scatter(2, index_BFC, some_BFC)
            assert torch.equal(tokens_BFR, rest_BFV.topk(2).indices)


def test_a_table_that_is_put_in_its_place_has_rows_of_its_own() -> None:
    """As a serving engine's process puts its part of a checkpoint."""
    whole = Correction(9, 5, 2)
    torch.nn.init.normal_(whole.after.weight)
    made = Correction(1, 1, 2)
    made.before.weight, made.after.weight = whole.before.weight, whole.after.weight
    logits_RC, before_R = torch.zeros(3, 5), torch.tensor([0, 4, 8])
    assert torch.equal(made.add_to(logits_RC, before_R), whole.add_to(logits_RC, before_R))


def test_tokens_are_asked_for() -> None:
    with pytest.raises(ValueError, match="medusa heads see the tokens between: pass tokens_RK"):
        random_heads(2, correction_rank=2)(inputs(1, 2)[0])


def test_heads_without_one_are_stored_as_ever() -> None:
    assert "correction_rank" not in HeadsConfig().to_dict()
    config = HeadsConfig(correction_rank=128)
    assert HeadsConfig.from_dict(config.to_dict()) == config
    assert not config.is_plain_medusa
