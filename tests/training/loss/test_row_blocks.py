"""Blocks of rows: the same gradients, in memory that does not grow with the heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from medusa_heads.config import HeadsConfig
from medusa_heads.heads import DraftHeads, new_heads
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.loss.heads import rows_loss
from medusa_heads.training.loss.rows import SupervisedRows
from tests.pairs import meeting
from tests.training.loss_cases import (
    D,
    LmHead,
    random_heads,
    random_hidden,
    random_rows,
    random_teacher,
)

R, K = 13, 3

OBJECTIVE = LossConfig({"cross_entropy": 1.0, "reverse_kl": 0.5}, head_weights="acceptance")


def results(
    heads: DraftHeads, block_rows: int | None, dtype: torch.dtype, count: int = R
) -> list[Tensor]:
    """The loss and the gradients of hidden states and parameters, through .backward()."""
    rows = random_rows(count, K)
    hidden_RD = random_hidden(count, dtype=dtype).requires_grad_()
    loss = rows_loss(
        heads,
        hidden_RD * 1.5,
        rows,
        objective=OBJECTIVE,
        num_items=7,
        teacher=random_teacher(rows, dtype=dtype),
        block_rows=block_rows,
    )
    heads.zero_grad()
    (2 * loss).backward()
    assert hidden_RD.grad is not None
    parameters = [parameter.grad for parameter in heads.parameters()]
    return [loss.detach(), hidden_RD.grad, *(grad for grad in parameters if grad is not None)]


@pytest.mark.parametrize(
    ("kind", "vocab_matrix", "rank"), meeting(("medusa", "hydra"), ("shared", "own"), (None, 2))
)
@pytest.mark.parametrize("block_rows", [1, 5])
def test_blocks_of_any_size_give_the_same(
    kind: str, vocab_matrix: str, block_rows: int, rank: int | None
) -> None:
    heads = random_heads(K, vocab_matrix, kind=kind, bias=True, correction_rank=rank)
    whole = results(heads, R, torch.float64)
    assert len(whole) == 2 + len(list(heads.parameters()))
    for ours, theirs in zip(results(heads, block_rows, torch.float64), whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize("vocab_matrix", ["shared", "own"])
def test_blocks_under_autocast_give_the_same_to_rounding(kind: str, vocab_matrix: str) -> None:
    heads = random_heads(K, vocab_matrix, kind=kind, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        whole, blocks = (results(heads, size, torch.float32) for size in (R, 4))
    assert all(gradient.dtype == torch.float32 for gradient in blocks)
    for ours, theirs in zip(blocks, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02 * float(theirs.abs().max()))


def rows_seen(heads: DraftHeads, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows these heads are asked for, each time."""
    seen: list[int] = []
    features = heads.features

    def noted(hidden_RD: Tensor, tokens_RK: Tensor) -> Tensor:
        seen.append(len(hidden_RD))
        return features(hidden_RD, tokens_RK)

    monkeypatch.setattr(heads, "features", noted)
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_in_low_precision_a_cpu_meets_few_shapes(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of a bf16 run on a CPU took a fifth longer, for machine code of each batch's shape."""
    heads = random_heads(K, "own", kind="hydra", dtype=torch.float32)
    seen = rows_seen(heads, monkeypatch)
    for count in (R, 64, 70):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            ours, whole = (results(heads, size, torch.float32, count) for size in (None, count))
        for mine, theirs in zip(ours, whole, strict=True):
            atol = 0.02 * float(theirs.abs().max())
            torch.testing.assert_close(mine, theirs, rtol=0.02, atol=atol)
    assert seen == ([64, R, 64, 64, 128, 70] if dtype == torch.bfloat16 else [R, R, 64, 64, 70, 70])


@pytest.mark.parametrize(("count", "blocks"), [(0, [0]), (130, [64, 64, 64])])
def test_so_it_does_in_several_blocks_and_without_rows(
    count: int, blocks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_heads.training.loss.heads.BLOCK_FEATURES_CPU", 100 * K * D)
    heads = random_heads(K, dtype=torch.float32)
    seen = rows_seen(heads, monkeypatch)
    hidden_RD = random_hidden(count, dtype=torch.bfloat16).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = rows_loss(heads, hidden_RD, random_rows(count, K), num_items=7)
    loss.backward()
    assert seen == blocks
    assert hidden_RD.grad is not None and hidden_RD.grad.shape == (count, D)
    assert bool(loss > 0) == bool(hidden_RD.grad.any()) == bool(count)


@pytest.mark.parametrize("vocab_matrix", ["shared", pytest.param("own", marks=pytest.mark.slow)])
def test_gradients_of_many_blocks_are_summed_in_fp32(vocab_matrix: str) -> None:
    # All rows alike: bf16 loses each row's part once the sum is 256 times as large.
    heads, rows, count = random_heads(K, vocab_matrix, dtype=torch.float32), random_rows(1, K), 320
    alike = SupervisedRows(*(part.repeat_interleave(count, 0) for part in vars(rows).values()))

    def gradients(rows: SupervisedRows, count: int) -> list[Tensor]:
        hidden_RD = random_hidden(1, dtype=torch.float32).expand(count, -1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = rows_loss(heads, hidden_RD, rows, num_items=count, block_rows=1)
        return list(torch.autograd.grad(loss, list(heads.parameters())))

    for ours, one in zip(gradients(alike, count), gradients(rows, 1), strict=True):
        torch.testing.assert_close(ours, one, rtol=0.02, atol=0.02 * float(one.abs().max()))


@pytest.mark.parametrize("vocab_matrix", ["shared", "own"])
def test_small_shares_of_a_large_step_are_kept_in_fp16(vocab_matrix: str) -> None:
    # Divided by so many tokens, most slopes are less than fp16 can tell from zero.
    heads, rows = random_heads(K, vocab_matrix, dtype=torch.float32), random_rows(R, K)
    parameters = list(heads.parameters())
    scale = 2.0**15  # as GradScaler's

    def gradients(dtype: torch.dtype, half: bool) -> list[Tensor]:
        hidden_RD = random_hidden(R, dtype=dtype).requires_grad_()
        with torch.autocast("cpu", torch.float16, enabled=half):
            loss = rows_loss(heads, hidden_RD, rows, num_items=300_000, block_rows=4)
        found = torch.autograd.grad(loss * scale, [hidden_RD, *parameters])
        return [gradient.float() / scale for gradient in found]

    exact = gradients(torch.float32, half=False)
    for ours, theirs in zip(gradients(torch.float16, half=True), exact, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.01 * float(theirs.abs().max()))


def test_without_gradients_the_value_is_the_same() -> None:
    heads, rows = random_heads(K), random_rows(R, K)
    with torch.no_grad():
        whole, blocks = (
            rows_loss(heads, random_hidden(R), rows, num_items=1, block_rows=size)
            for size in (R, 4)
        )
    assert not blocks.requires_grad
    torch.testing.assert_close(blocks, whole)


def test_parameters_that_do_not_learn_are_left_alone() -> None:
    heads, rows = random_heads(K), random_rows(R, K)
    frozen, *others = heads.parameters()
    frozen.requires_grad_(False)
    rows_loss(heads, random_hidden(R), rows, num_items=1, block_rows=4).backward()
    assert frozen.grad is None
    assert all(parameter.grad is not None for parameter in others)


def test_heads_that_do_not_learn_pass_gradients_on() -> None:
    heads, rows = random_heads(K).requires_grad_(False), random_rows(R, K)
    found = []
    for block_rows in (4, R):
        hidden_RD = random_hidden(R).requires_grad_()
        rows_loss(heads, hidden_RD, rows, num_items=1, block_rows=block_rows).backward()
        found.append(hidden_RD.grad)
    assert found[0] is not None and found[0].abs().max() > 0
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("num_heads", [1, 5])
def test_what_is_kept_for_gradients_does_not_grow_with_rows(num_heads: int) -> None:
    heads, count = random_heads(num_heads), 300
    kept = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept = max(kept, tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rows_loss(
            heads, random_hidden(count), random_rows(count, num_heads), num_items=1, block_rows=10
        ).backward()
    assert 0 < kept <= 10 * num_heads * 6  # a block's features, not those of 300 rows


def test_blocks_are_as_large_where_more_is_read_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """By induction heads read K times as much of it beside, and keep no more than of any other."""
    monkeypatch.setattr("medusa_heads.training.loss.heads.BLOCK_FEATURES_CPU", 100 * K * D)
    config = HeadsConfig(num_heads=K, induction=True)
    heads = new_heads(LmHead(torch.randn(11, D)), config)
    seen = rows_seen(heads, monkeypatch)
    hidden_RE = random_hidden(130, dtype=torch.float32).repeat(1, 1 + K).requires_grad_()
    rows_loss(heads, hidden_RE, random_rows(130, K), num_items=7).backward()
    assert seen == [100, 30]
