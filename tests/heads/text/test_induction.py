"""What followed like places: found, counted by what stands as far behind, seen by nobody else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from medusa_heads.config import HeadsConfig
from medusa_heads.heads import DraftHeads
from medusa_heads.heads.text import induction
from medusa_heads.heads.text.induction import NOTHING, SHARPNESS, InductionLayer
from tests.conftest import TinyLlama
from tests.inference.rereading import random_heads

WIDTH, K, PERIOD = 64, 3, 4
KINDS: dict[str, dict[str, Any]] = {"medusa": {}, "hydra": {"kind": "hydra"}}


@pytest.fixture(params=KINDS)
def heads(request: pytest.FixtureRequest, tiny_llama: TinyLlama) -> DraftHeads:
    return random_heads(tiny_llama(), induction=True, **KINDS[request.param])


def text(length: int, rows: int = 1) -> tuple[Tensor, Tensor]:
    """States and tokens that come again, not quite the same, after PERIOD positions."""
    generator = torch.Generator().manual_seed(2)
    again = [place % PERIOD for place in range(length)]
    once_BPD = torch.randn(rows, PERIOD, WIDTH, generator=generator)
    noise_BTD = torch.randn(rows, length, WIDTH, generator=generator)
    ids_BP = torch.randint(199, (rows, PERIOD), generator=generator)
    return once_BPD[:, again] + 0.3 * noise_BTD, ids_BP[:, again]


@pytest.fixture
def blunt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places count that are not alike, too."""
    monkeypatch.setattr(induction, "SHARPNESS", 1.0)
    monkeypatch.setattr(induction, "NOTHING", 0.0)


def layer_of(heads: DraftHeads) -> InductionLayer:
    layer = heads.prefix
    assert isinstance(layer, InductionLayer)
    return layer


def read_by_hand(hidden_TD: Tensor, following_TD: Tensor) -> Tensor:
    """What every head reads at every position, place by place, [T, K, 2 * D]."""
    both_TV = torch.cat([F.rms_norm(part, (WIDTH,)) for part in (hidden_TD, following_TD)], dim=1)
    read_TKV = torch.zeros(len(both_TV), K, 2 * WIDTH)
    for t in range(len(both_TV)):
        for i in range(K):
            total = math.exp(NOTHING)
            for s in range(t - i):  # what stands i + 1 behind it is known
                cosines = (both_TV[t] * both_TV[s]).view(2, WIDTH).sum(dim=1) / WIDTH
                weight = math.exp(SHARPNESS * float(cosines.sum()))
                read_TKV[t, i] += weight * both_TV[s + i + 1]
                total += weight
            read_TKV[t, i] /= total
    return read_TKV


@torch.no_grad()
def test_heads_read_what_stands_as_far_behind_like_places(heads: DraftHeads) -> None:
    hidden_BTD, ids_BT = text(3 * PERIOD, rows=2)
    layer, following_BTD = layer_of(heads), heads.embed(F.pad(ids_BT[:, 1:], (0, 1)))
    read_BTKV = layer.followed(hidden_BTD, following_BTD)
    for of_row in zip(read_BTKV, hidden_BTD, following_BTD, strict=True):
        torch.testing.assert_close(of_row[0], read_by_hand(*of_row[1:]), rtol=1e-4, atol=1e-5)
    # From the second period on it is what comes PERIOD earlier and i + 1 later, and that will come.
    comes_BTD = F.rms_norm(hidden_BTD, (WIDTH,))
    for i in range(K):
        found_BTD = read_BTKV[:, PERIOD + i : -i - 1, i, :WIDTH]
        alike_BT = F.cosine_similarity(found_BTD, comes_BTD[:, PERIOD + 2 * i + 1 :], dim=-1)
        assert float(alike_BT[:, :-1].min()) > 0.7


@torch.no_grad()
def test_each_head_adds_the_state_of_its_own_matrix(heads: DraftHeads) -> None:
    hidden_BTD, ids_BT = text(2 * PERIOD)
    layer, following_BTD = layer_of(heads), heads.embed(F.pad(ids_BT[:, 1:], (0, 1)))
    read_BTKV = layer.followed(hidden_BTD, following_BTD)
    tokens_BTK = F.pad(ids_BT, (0, K)).unfold(1, K, 1)[:, 1:]
    encoded_BTE = heads.encode(hidden_BTD, ids_BT)
    features_BTKD = heads.features(encoded_BTE, tokens_BTK)
    alone_BTKD = heads.features(encoded_BTE[..., :WIDTH], tokens_BTK)  # with nothing that followed
    for i in range(K):
        added_BTD = read_BTKV[:, :, i] @ layer.matrices[i]
        found_BTD = features_BTKD[:, :, i] - alone_BTKD[:, :, i]
        torch.testing.assert_close(found_BTD, added_BTD, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("blunt")
@torch.no_grad()
def test_a_position_looks_back_and_one_token_ahead(heads: DraftHeads) -> None:
    hidden_BTD, ids_BT = text(12)
    encoded_BTE = heads.encode(hidden_BTD, ids_BT)
    other_BTD, other_BT = hidden_BTD.clone(), ids_BT.clone()
    other_BTD[0, 6] += 1.0
    other_BT[0, 6] = (other_BT[0, 6] + 1) % 199  # the token behind position 5
    for changed, since in (
        (heads.encode(other_BTD, ids_BT), 6),
        (heads.encode(hidden_BTD, other_BT), 5),
    ):
        differs_TE = (changed != encoded_BTE)[0, :, WIDTH:].unflatten(-1, (K, WIDTH)).any(-1)
        assert differs_TE.all(-1).tolist() == [since <= t for t in range(12)]
        assert differs_TE.any(-1).tolist() == [since <= t for t in range(12)]


@torch.no_grad()
def test_packed_documents_do_not_see_each_other(heads: DraftHeads) -> None:
    hidden_BTD, ids_BT = text(14)
    position_ids_BT = torch.tensor([[*range(6), *range(8)]])
    packed_BTE = heads.encode(hidden_BTD, ids_BT, position_ids_BT)
    for part in (slice(0, 6), slice(6, 14)):
        alone_BTE = heads.encode(hidden_BTD[:, part], ids_BT[:, part])
        # Behind a document's last token none follows: that position is of no use.
        torch.testing.assert_close(packed_BTE[:, part][:, :-1], alone_BTE[:, :-1])
    unpacked_BTE = heads.encode(hidden_BTD, ids_BT)
    assert float((unpacked_BTE - packed_BTE)[:, 6:-1].abs().max()) > 0.01


@pytest.mark.usefixtures("blunt")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("off", [-1, 0, 1])
@torch.no_grad()
def test_drafting_reads_what_training_reads(
    heads: DraftHeads, off: int, dtype: torch.dtype
) -> None:
    """From what is kept of the text up to a position, and of no position more or less."""
    heads.to(dtype)
    hidden_BTD, ids_BT = text(12, rows=2)
    hidden_BTD = hidden_BTD.to(dtype)
    encoded_BTE = heads.encode(hidden_BTD, ids_BT)
    layer, positions_BT = layer_of(heads), torch.arange(12).expand(2, -1)
    x_BTW = layer.read(hidden_BTD, heads.embed(ids_BT.roll(-1, dims=1)))
    held_LBASE, at = layer.keys_and_values(x_BTW, positions_BT, 12), slice(8, 9)
    assert held_LBASE[:, 0, :, 0].numel() == layer.held_per_token
    masked = [(held_LBASE[..., : 9 + off, :], None), (held_LBASE, torch.arange(12) < 9 + off)]
    for held, visible_S in masked:
        visible = None if visible_S is None else visible_S.expand(2, 1, -1)
        got = layer.look(x_BTW[:, at], positions_BT[:, at], 12, held, visible)
        difference = float((got - encoded_BTE[:, at]).norm() / encoded_BTE[:, at].norm())
        assert (difference < (1e-5 if dtype == torch.float32 else 0.02)) == (off == 0)


def test_long_texts_are_computed_in_parts(
    heads: DraftHeads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same outputs and gradients, packed or not."""
    hidden_BTD, ids_BT = text(11, rows=2)
    packed_BT = torch.tensor([[*range(4), *range(7)], [*range(9), *range(2)]])
    for position_ids_BT in (None, packed_BT):
        found = []
        for at_once in (1 << 24, 200):
            monkeypatch.setattr(induction, "SCORES_AT_ONCE", at_once)
            encoded_BTE = heads.encode(hidden_BTD, ids_BT, position_ids_BT)
            learnt = [*layer_of(heads).parameters()]
            found.append([encoded_BTE, *torch.autograd.grad(encoded_BTE.square().mean(), learnt)])
        for whole, parts in zip(*found, strict=True):
            torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)
            assert whole.abs().sum() > 0


def test_a_text_is_read_by_one_layer() -> None:
    with pytest.raises(ValueError, match=r"so far: leave one out \(induction false, where a"):
        HeadsConfig(prefix_attention=True, induction=True)
    for kind in ("block", "eagle3"):
        with pytest.raises(ValueError, match="leave induction out"):
            HeadsConfig(kind=kind, induction=True)
    assert "induction" not in HeadsConfig().to_dict()  # which earlier versions do not know
    config = HeadsConfig(induction=True)
    assert HeadsConfig.from_dict(config.to_dict()) == config
