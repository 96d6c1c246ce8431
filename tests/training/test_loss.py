"""The chunked loss equals plain cross-entropy, and holds one chunk of logits at a time."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from medusa_heads.config import HeadsConfig
from medusa_heads.heads import MedusaHeads
from medusa_heads.training import loss as loss_module
from medusa_heads.training.loss import head_ranks, heads_loss, linear_cross_entropy

N, D, V = 13, 6, 11


class LmHead:
    """Stands where a target would: all that heads read of one is its lm_head."""

    def __init__(self, weight_VD: Tensor, bias_V: Tensor | None = None) -> None:
        self.linear = torch.nn.Linear(weight_VD.shape[1], weight_VD.shape[0], bias_V is not None)
        self.linear.weight = torch.nn.Parameter(weight_VD)
        if bias_V is not None:
            self.linear.bias = torch.nn.Parameter(bias_V)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.linear


def random_heads(
    num_heads: int,
    vocab_matrix: str,
    *,
    vocab: int = V,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
    hidden: int = D,
) -> MedusaHeads:
    generator = torch.Generator().manual_seed(num_heads)
    lm_head = LmHead(
        torch.randn(vocab, hidden, generator=generator, dtype=dtype),
        torch.randn(vocab, generator=generator, dtype=dtype) if bias else None,
    )
    config = HeadsConfig(num_heads=num_heads, vocab_matrix=vocab_matrix)  # type: ignore[arg-type]
    heads = MedusaHeads.from_target(lm_head, config).to(dtype)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return heads


def random_rows(
    rows: int,
    num_heads: int,
    *,
    vocab: int = V,
    hidden: int = D,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden_RD = torch.randn(rows, hidden, generator=generator, dtype=dtype)
    labels_RK = torch.randint(0, vocab, (rows, num_heads), generator=generator)
    labels_RK[::4, -1] = -100
    return hidden_RD, labels_RK


def plain_loss(
    heads: MedusaHeads, hidden_RD: Tensor, labels_RK: Tensor, decay: float, num_items: int
) -> Tensor:
    logits_RKV = heads(hidden_RD)
    losses = [
        decay**i * F.cross_entropy(logits_RKV[:, i], labels_RK[:, i], reduction="sum")
        for i in range(labels_RK.shape[1])
    ]
    return torch.stack(losses).sum() / num_items


@pytest.mark.parametrize("chunk_rows", [1, 4, 100])
@pytest.mark.parametrize("with_bias", [False, True])
def test_value_and_gradients_equal_cross_entropy(chunk_rows: int, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    inputs = [leaf(N, D), leaf(V, D), *([leaf(V)] if with_bias else [])]
    labels_N = torch.randint(0, V, (N,), generator=generator)
    labels_N[3] = labels_N[7] = -100
    weights_N = torch.rand(N, generator=generator, dtype=torch.float64)
    bias_V = inputs[2] if with_bias else None

    expected_N = F.cross_entropy(F.linear(*inputs), labels_N, reduction="none")
    expected = (expected_N * weights_N).sum() * 3
    got = 3 * linear_cross_entropy(
        inputs[0], inputs[1], bias_V, labels_N, weights_N, chunk_rows=chunk_rows
    )
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(got, inputs), torch.autograd.grad(expected, inputs), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_gradcheck() -> None:
    torch.manual_seed(0)
    labels_N = torch.tensor([0, -100, 4, 2])
    weights_N = torch.tensor([1.0, 1.0, 0.8, 0.5], dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x, w, b: linear_cross_entropy(x, w, b, labels_N, weights_N, chunk_rows=3),
        [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((4, 3), (5, 3), 5)],
    )


@pytest.mark.parametrize("vocab_matrix", ["shared", "own"])
@pytest.mark.parametrize("bias", [False, True])
def test_heads_loss_equals_the_plain_sum_over_heads(vocab_matrix: str, bias: bool) -> None:
    heads = random_heads(3, vocab_matrix, bias=bias, dtype=torch.float64)
    hidden_RD, labels_RK = random_rows(N, 3, dtype=torch.float64)
    got = heads_loss(heads, hidden_RD, labels_RK, decay=0.8, num_items=7)
    expected = plain_loss(heads, hidden_RD, labels_RK, 0.8, 7)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    parameters = list(heads.parameters())
    for ours, theirs in zip(
        torch.autograd.grad(got, parameters),
        torch.autograd.grad(expected, parameters),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("vocab_matrix", ["shared", "own"])
@pytest.mark.parametrize("rows", [0, 5])
def test_nothing_supervised_is_zero_with_zero_gradients(vocab_matrix: str, rows: int) -> None:
    heads = random_heads(2, vocab_matrix)
    labels_RK = torch.full((rows, 2), -100)
    loss = heads_loss(heads, torch.randn(rows, D), labels_RK, num_items=torch.tensor(0))
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and p.grad.eq(0).all() for p in heads.parameters())


@pytest.mark.parametrize("vocab_matrix", ["shared", "own"])
def test_bf16_stays_within_rounding_of_fp32(vocab_matrix: str) -> None:
    # Large enough that a sum kept in bf16 (8 bits) would be off by far more than the tolerance.
    heads = random_heads(2, vocab_matrix, vocab=300, hidden=32)
    hidden_RD, labels_RK = random_rows(2000, 2, vocab=300, hidden=32)
    exact = heads_loss(heads, hidden_RD, labels_RK, num_items=2000)
    with torch.autocast("cpu", torch.bfloat16):
        autocast = heads_loss(heads, hidden_RD, labels_RK, num_items=2000)
    low = random_heads(2, vocab_matrix, vocab=300, hidden=32)
    low.to(torch.bfloat16).share(LmHead(low.vocab_matrix(0)[0].detach().bfloat16()))
    bf16 = heads_loss(low, hidden_RD.bfloat16(), labels_RK, num_items=2000)
    assert autocast.dtype == bf16.dtype == torch.float32
    torch.testing.assert_close(autocast, exact, rtol=3e-3, atol=0)
    torch.testing.assert_close(bf16, exact, rtol=3e-3, atol=0)
    gradients = torch.autograd.grad(exact, list(heads.parameters()))
    rounded = torch.autograd.grad(autocast, list(heads.parameters()))
    for ours, theirs in zip(rounded, gradients, strict=True):
        assert F.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0) > 0.999


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


@pytest.mark.parametrize("vocab_matrix", ["shared", "own"])
@pytest.mark.parametrize("num_heads", [1, 5])
def test_no_tensor_outgrows_a_chunk_however_many_heads(
    vocab_matrix: str, num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab, rows, budget = 1000, 400, 32_000
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS_CPU", budget)
    heads = random_heads(num_heads, vocab_matrix, vocab=vocab)
    hidden_RD, labels_RK = random_rows(rows, num_heads, vocab=vocab)
    with LargestTensor() as largest:
        heads_loss(heads, hidden_RD, labels_RK, num_items=rows).backward()
        head_ranks(heads, hidden_RD, labels_RK, 16)
    assert largest.elements == budget  # rows * vocab logits of one head would be 400,000


@pytest.mark.parametrize("vocab_matrix", ["shared", "own"])
def test_ranks_are_places_in_the_sorted_logits(
    vocab_matrix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS_CPU", 1)  # chunks of 16 rows
    heads = random_heads(3, vocab_matrix)
    hidden_RD, labels_RK = random_rows(50, 3)
    order_RKV = heads(hidden_RD).argsort(dim=-1, descending=True)
    expected_RK = (order_RKV == labels_RK[..., None]).int().argmax(dim=-1)
    expected_RK = expected_RK.clamp(max=4).where(labels_RK != -100, -100)
    assert torch.equal(head_ranks(heads, hidden_RD, labels_RK, 4), expected_RK)


def test_equal_logits_rank_by_token_id() -> None:
    heads = MedusaHeads.from_target(LmHead(torch.ones(5, 2)), HeadsConfig(num_heads=1))
    ranks_RK = head_ranks(heads, torch.ones(3, 2), torch.tensor([[0], [3], [4]]), 16)
    assert ranks_RK.tolist() == [[0], [3], [4]]
