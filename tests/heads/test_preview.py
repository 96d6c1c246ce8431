"""The preview of a large vocabulary: what it finds, what it leaves alone, and that text stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_heads import HeadsConfig, MedusaModel
from medusa_heads.heads import new_heads, preview
from medusa_heads.heads.preview import VocabularyPreview, directions, with_preview
from tests.conftest import TinyLlama

VOCAB, HIDDEN = 3000, 64


@pytest.fixture
def matrix_VD() -> Tensor:
    """A vocabulary matrix that varies less and less in later directions, as trained ones do."""
    torch.manual_seed(0)
    basis_DD = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN)).Q
    return torch.randn(VOCAB, HIDDEN) * 0.9 ** torch.arange(HIDDEN) @ basis_DD


def test_the_likeliest_tokens_are_found_and_exact(matrix_VD: Tensor) -> None:
    features_RD = torch.randn(2, 50, HIDDEN) @ (matrix_VD.T @ matrix_VD / VOCAB)
    bias_V = torch.randn(VOCAB) * features_RD.norm(dim=-1).mean() / 10
    exact_RV = features_RD @ matrix_VD.T + bias_V
    near = VocabularyPreview(matrix_VD, bias_V, directions([matrix_VD], 16))
    best = near.logits(features_RD).topk(8)
    expected = exact_RV.topk(8)
    assert torch.equal(best.indices[..., 0], expected.indices[..., 0])
    found = (best.indices[..., :, None] == expected.indices[..., None, :]).any(-1)
    assert found.float().mean() > 0.99
    torch.testing.assert_close(best.values[..., 0], expected.values[..., 0])
    # All of them together weigh what they weigh exactly, so probabilities do too.
    near_R = near.logits(features_RD).logsumexp(-1)
    torch.testing.assert_close(near_R, exact_RV.logsumexp(-1), atol=0.05, rtol=0)


def test_the_wrong_directions_do_not_find_them(matrix_VD: Tensor) -> None:
    features_RD = torch.randn(50, HIDDEN) @ (matrix_VD.T @ matrix_VD / VOCAB)
    wrong_DW = directions([matrix_VD], HIDDEN)[:, :16]
    best_R = VocabularyPreview(matrix_VD, None, wrong_DW).logits(features_RD).argmax(-1)
    assert (best_R == (features_RD @ matrix_VD.T).argmax(-1)).float().mean() < 0.5


@pytest.mark.parametrize("vocab_matrix", ["shared", "own"])
@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_only_the_view_is_near(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch, kind: Any, vocab_matrix: Any
) -> None:
    target = tiny_llama(vocab_size=VOCAB, hidden_size=HIDDEN)
    config = HeadsConfig(kind=kind, num_heads=2, vocab_matrix=vocab_matrix)
    heads = new_heads(target, config)
    assert with_preview(heads) is heads, "small vocabularies are read whole"
    monkeypatch.setattr(preview, "SMALLEST", 0)
    view = with_preview(heads)
    assert view is not heads and heads.previews is None
    assert list(view.parameters()) == list(heads.parameters())
    hidden_RD, tokens_RK = torch.randn(1, HIDDEN), torch.randint(VOCAB, (1, 2))
    with torch.no_grad():
        for block in heads.heads():
            torch.nn.init.normal_(block[0].linear.weight, std=0.1)
        near, exact = view(hidden_RD, tokens_RK), heads(hidden_RD, tokens_RK)
    assert near.shape == exact.shape and not torch.equal(near, exact)
    # This matrix has no directions to speak of; even so the candidates are exact.
    assert torch.isclose(near, exact, atol=1e-5).sum(-1).min() >= preview.CANDIDATES
    # Many rows would read more of the matrix than it has.
    hidden_RD, tokens_RK = hidden_RD.expand(12, -1), tokens_RK.expand(12, -1)
    with torch.no_grad():
        assert torch.equal(view(hidden_RD, tokens_RK), heads(hidden_RD, tokens_RK))


def test_text_stays_the_targets_own(tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preview, "SMALLEST", 0)
    monkeypatch.setattr(preview, "READ_AT_MOST", 1)  # also of a batch as small as this one
    target: Any = tiny_llama(vocab_size=VOCAB, hidden_size=HIDDEN)
    medusa = MedusaModel(target, new_heads(target, HeadsConfig(num_heads=3)), tree="cartesian:3,2")
    assert medusa.drafting.previews is not None and medusa.heads.previews is None
    ids = torch.randint(VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20}
    got: Any = medusa.generate(ids, **options)
    assert torch.equal(got, target.generate(ids, **options))
