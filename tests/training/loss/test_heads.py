"""The chunked loss equals its definition, and holds one chunk of logits at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from medusa_heads.config import IGNORED
from medusa_heads.heads import DraftHeads
from medusa_heads.training.arguments.loss_config import TERMS, LossConfig
from medusa_heads.training.loss import fused as chunks
from medusa_heads.training.loss import fused as vocab_loss
from medusa_heads.training.loss.heads import heads_loss, rows_loss
from medusa_heads.training.loss.rows import SupervisedRows
from medusa_heads.training.loss.teacher import Teacher
from medusa_heads.training.measure.metrics import head_ranks
from tests.pairs import alternately, meeting
from tests.training.loss_cases import (
    DRAFT_TOKENS,
    LmHead,
    W,
    plain_loss,
    random_heads,
    random_hidden,
    random_rows,
    random_teacher,
)

R, K = 13, 3
OBJECTIVES = {
    **{name: LossConfig({name: 1.0}) for name in TERMS},
    "warm": LossConfig({"forward_kl": 0.5, "acceptance": 2.0}, temperature=1.7),
    "cool": LossConfig({"cross_entropy": 0.5, "reverse_kl": 0.5}, temperature=0.6),
    "all": LossConfig(dict(zip(TERMS, (0.3, 0.7, 0.2, 0.6, 1.5, 0.4), strict=True)), decay=0.5),
    "by acceptance": LossConfig(head_weights="acceptance", smoothing=0.3),
    "all by acceptance": LossConfig(dict.fromkeys(TERMS, 0.5), head_weights="acceptance"),
}


def gradients(loss: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, inputs))


def assert_equal(heads: DraftHeads, rows: SupervisedRows, objective: LossConfig) -> None:
    """Value and all gradients of heads_loss are those of the definition."""
    teacher = random_teacher(rows) if objective.needs_teacher else None
    hidden_RD = random_hidden(len(rows.labels_RK)).requires_grad_()
    features_RKD = heads.features(hidden_RD, rows.tokens_RK)
    expected = 3 * plain_loss(heads, features_RKD, rows, objective, 7, teacher)
    got = 3 * heads_loss(
        heads, features_RKD, rows, objective=objective, num_items=7, teacher=teacher
    )
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    inputs = [hidden_RD, *heads.parameters()]
    theirs = torch.autograd.grad(expected, inputs, retain_graph=True)
    for ours, there in zip(gradients(got, inputs), theirs, strict=True):
        torch.testing.assert_close(ours, there, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "vocab_matrix", "reduced", "rank"),
    [
        # Any two of these meet in a quick one.
        pytest.param(name, vocab_matrix, reduced, rank, marks=marks)
        for h, name in enumerate(OBJECTIVES)
        for i, vocab_matrix in enumerate(("shared", "own"))
        for j, reduced in enumerate((False, True))
        for k, rank in enumerate((None, 2))
        for marks in [[] if (i ^ j, i ^ k) == (h % 2, h // 2 % 2) else [pytest.mark.slow]]
    ],
)
def test_the_loss_and_its_gradients_are_those_of_the_definition(
    name: str, vocab_matrix: str, reduced: bool, rank: int | None
) -> None:
    draft_tokens = DRAFT_TOKENS if reduced else None
    heads = random_heads(
        K, vocab_matrix, bias=True, draft_tokens=draft_tokens, correction_rank=rank
    )
    assert_equal(heads, random_rows(R, K), OBJECTIVES[name])


@pytest.mark.parametrize("chunk", [1, 4, 7])
@pytest.mark.parametrize(("vocab_matrix", "rank"), alternately(("shared", "own"), (None, 2)))
def test_chunks_and_strips_of_any_size_give_the_same(
    chunk: int, vocab_matrix: str, rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocab_loss, "chunk_pairs", lambda *_: chunk)
    for name in ("STRIP_ELEMENTS_THREAD", "STRIP_ELEMENTS_CPU"):
        monkeypatch.setattr(chunks, name, 2 * W)
    for objective in (OBJECTIVES["all"], OBJECTIVES["cross_entropy"]):
        heads = random_heads(K, vocab_matrix, correction_rank=rank)
        assert_equal(heads, random_rows(R, K, gap=2), objective)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("vocab_matrix", ["shared", "own"])
def test_nothing_supervised_is_zero_with_zero_gradients(name: str, vocab_matrix: str) -> None:
    heads = random_heads(K, vocab_matrix)
    for count in (0, 5):
        rows = random_rows(5, K)
        teacher = random_teacher(rows)
        rows = SupervisedRows(
            rows.positions_R[:count],
            torch.full_like(rows.labels_RK, IGNORED)[:count],
            rows.tokens_RK[:count],
        )
        loss = rows_loss(
            heads,
            random_hidden(count),
            rows,
            objective=OBJECTIVES[name],
            num_items=torch.tensor(0),
            teacher=teacher,
        )
        grads = gradients(loss, list(heads.parameters()))
        assert loss.item() == 0
        assert all(grad.eq(0).all() for grad in grads)


def test_a_distant_prediction_keeps_finite_gradients() -> None:
    # fp32 knows no overlap of these two distributions at all.
    heads = random_heads(1, dtype=torch.float32)
    rows = SupervisedRows(torch.tensor([0]), torch.tensor([[3]]), torch.tensor([[1]]))
    features_RKD = (1e3 * torch.randn(1, 1, 6)).requires_grad_()
    far = random_teacher(rows, dtype=torch.float32)
    far = replace(far, hidden_PD=-features_RKD.detach()[:, 0], cap=None, scale=1.0)
    far = replace(far, weight_WD=heads.vocab_matrix(0)[0])
    for name in TERMS:
        loss = heads_loss(
            heads,
            features_RKD,
            rows,
            objective=LossConfig({name: 1.0}),
            num_items=1,
            teacher=far,
        )
        (grad,) = gradients(loss, [features_RKD])
        assert loss.isfinite() and grad.isfinite().all()


def test_terms_with_the_target_need_a_teacher() -> None:
    heads, rows = random_heads(K), random_rows(R, K)
    features_RKD = heads.features(random_hidden(R))
    with pytest.raises(ValueError, match="need the target's own distribution"):
        heads_loss(heads, features_RKD, rows, objective=OBJECTIVES["all"], num_items=1)


@pytest.mark.parametrize(
    ("vocab_matrix", "terms", "rank"),
    [
        # Any two of these meet in a quick one.
        pytest.param(vocab_matrix, terms, rank, marks=marks)
        for i, vocab_matrix in enumerate(("shared", "own"))
        for j, terms in enumerate(({"cross_entropy": 1.0}, dict.fromkeys(TERMS, 1.0)))
        for k, rank in enumerate((None, 4))
        for marks in [[] if (i + j + k) % 2 == 0 else [pytest.mark.slow]]
    ],
)
def test_bf16_stays_within_rounding_of_fp32(
    vocab_matrix: str, terms: dict[str, float], rank: int | None
) -> None:
    # Large enough that a sum kept in bf16 (8 bits) would be off by far more than the tolerance.
    objective = LossConfig(terms)
    rows = random_rows(2000, 2, vocab=300)
    hidden_RD = random_hidden(2000, 32, torch.float32)
    teacher = random_teacher(rows, vocab=300, hidden=32, dtype=torch.float32)

    def loss_of(heads: DraftHeads, hidden_RD: Tensor, teacher: Teacher) -> Tensor:
        features_RKD = heads.features(hidden_RD)
        return heads_loss(
            heads, features_RKD, rows, objective=objective, num_items=2000, teacher=teacher
        )

    sizes: dict[str, Any] = {"vocab": 300, "hidden": 32, "correction_rank": rank}
    heads = random_heads(2, vocab_matrix, **sizes, dtype=torch.float32)
    exact = loss_of(heads, hidden_RD, teacher)
    with torch.autocast("cpu", torch.bfloat16):
        autocast = loss_of(heads, hidden_RD, teacher)
    low = random_heads(2, vocab_matrix, **sizes, dtype=torch.float32)
    low.to(torch.bfloat16).share(LmHead(low.vocab_matrix(0)[0].detach().bfloat16()))
    assert teacher.bias_W is not None and teacher.hidden_PD is not None
    bf16 = loss_of(
        low,
        hidden_RD.bfloat16(),
        replace(
            teacher,
            weight_WD=teacher.weight_WD.bfloat16(),
            bias_W=teacher.bias_W.bfloat16(),
            hidden_PD=teacher.hidden_PD.bfloat16(),
        ),
    )
    assert autocast.dtype == bf16.dtype == torch.float32
    torch.testing.assert_close(autocast, exact, rtol=3e-3, atol=0)
    torch.testing.assert_close(bf16, exact, rtol=3e-3, atol=0)
    plain = gradients(exact, list(heads.parameters()))
    for got, of in ((autocast, heads), (bf16, low)):
        rounded = gradients(got, list(of.parameters()))
        for ours, theirs in zip(rounded, plain, strict=True):
            assert F.cosine_similarity(ours.float().flatten(), theirs.flatten(), dim=0) > 0.999


def test_weights_of_bf16_slopes_are_not_rounded() -> None:
    # In bf16 the weight would be 3: all gradients 0.25 % too small.
    heads = random_heads(1, vocab=300, hidden=32, dtype=torch.float32).to(torch.bfloat16)
    heads.share(LmHead(heads.vocab_matrix(0)[0].detach().bfloat16()))
    rows, hidden_RD = random_rows(2000, 1, vocab=300), random_hidden(2000, 32, torch.bfloat16)
    features_RKD = heads.features(hidden_RD)

    def size(weight: float) -> float:
        loss = heads_loss(heads, features_RKD, rows, num_items=1) * weight
        (grad_RKD,) = torch.autograd.grad(loss, [features_RKD])
        return float(grad_RKD.float().abs().sum())

    assert size(3.0075) / size(1) == pytest.approx(3.0075, rel=5e-4)


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements any operation's result had."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(made, Tensor):
                self.elements = max(self.elements, made.numel())
        return result


@pytest.mark.parametrize(
    ("vocab_matrix", "num_heads", "name"),
    meeting(("shared", "own"), (1, 5), ("all", "all by acceptance")),
)
def test_no_tensor_outgrows_a_chunk_however_many_heads(
    vocab_matrix: str, num_heads: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab, rows_count, budget = 1000, 400, 32_000
    monkeypatch.setattr(chunks, "CHUNK_BYTES_CPU", 8 * budget)
    monkeypatch.setattr(chunks, "LEAST_CHUNK", 1)
    heads = random_heads(num_heads, vocab_matrix, vocab=vocab)
    rows = random_rows(rows_count, num_heads, vocab=vocab)
    hidden_RD, teacher = random_hidden(rows_count), random_teacher(rows, vocab=vocab)
    with LargestTensor() as largest:
        rows_loss(
            heads, hidden_RD, rows, objective=OBJECTIVES[name], num_items=1, teacher=teacher
        ).backward()
        head_ranks(heads, hidden_RD, rows, 16)
    assert largest.elements == budget  # the logits of one head would be 400,000
