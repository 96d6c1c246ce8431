"""Layers over the text so far: what each position sees, alone or with a block of queries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_heads.config import HeadsConfig
from medusa_heads.decoder_shape import BlockShape, DecoderShape
from medusa_heads.heads import DraftHeads, block, new_heads
from medusa_heads.target.target import TargetModel
from tests.conftest import TinyLlama
from tests.inference.rereading import random_heads

READERS: dict[str, dict[str, Any]] = {
    "medusa, prefix": {"prefix_attention": True},
    "hydra, prefix": {"kind": "hydra", "prefix_attention": True},
    "block": {"kind": "block"},
    "block, 2 layers": {"kind": "block", "num_layers": 2},
}
BLOCKS = ["block", "block, 2 layers"]


@pytest.fixture(params=READERS)
def heads(request: pytest.FixtureRequest, tiny_llama: TinyLlama) -> DraftHeads:
    return random_heads(tiny_llama(), **READERS[request.param])


def text(length: int, rows: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden_BTD = torch.randn(rows, length, 64, generator=generator)
    return hidden_BTD, torch.randint(199, (rows, length), generator=generator)


@pytest.mark.parametrize("kind", BLOCKS)
@torch.no_grad()
def test_fresh_blocks_say_what_the_mean_of_the_text_says(tiny_llama: TinyLlama, kind: str) -> None:
    """As far as a hidden state, alone, is that mean."""
    target = TargetModel(tiny_llama())
    heads = new_heads(target, HeadsConfig(num_heads=3, correction_rank=4, **READERS[kind]))
    ids_BT = torch.arange(24).view(2, 12)
    hidden_BTD = target.hidden(ids_BT)[:, :1].expand(-1, 12, -1)
    heads.prefix.mask_with(torch.zeros(64))
    found_BD = heads.features(heads.encode(hidden_BTD, ids_BT))[:, -1, -1]
    alike_B = torch.nn.functional.cosine_similarity(found_BD, hidden_BTD[:, 0])
    assert float(alike_B.min()) > 0.9


@torch.no_grad()
def test_a_position_looks_back_and_one_token_ahead(heads: DraftHeads) -> None:
    hidden_BTD, ids_BT = text(8)
    encoded_BTE = heads.encode(hidden_BTD, ids_BT)
    other_BTD, other_BT = hidden_BTD.clone(), ids_BT.clone()
    other_BTD[0, 4] += 1.0
    other_BT[0, 4] = (other_BT[0, 4] + 1) % 199  # the token behind position 3
    # What a block knows of the tokens before it, it knows from hidden states.
    until = 4 if heads.kind == "block" else 8
    for changed, since, end in (
        (heads.encode(other_BTD, ids_BT), 4, 8),
        (heads.encode(hidden_BTD, other_BT), 3, until),
    ):
        differs_TE = (changed != encoded_BTE)[0].unflatten(-1, (-1, 64)).any(-1)
        assert differs_TE.all(-1).tolist() == [since <= t < end for t in range(8)]
        assert differs_TE.any(-1).tolist() == [since <= t < end for t in range(8)]


@torch.no_grad()
def test_packed_documents_do_not_see_each_other(heads: DraftHeads) -> None:
    hidden_BTD, ids_BT = text(9)
    position_ids_BT = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed_BTE = heads.encode(hidden_BTD, ids_BT, position_ids_BT)
    for part in (slice(0, 4), slice(4, 9)):
        alone_BTE = heads.encode(hidden_BTD[:, part], ids_BT[:, part])
        # Behind a document's last token none follows: that position is of no use.
        torch.testing.assert_close(packed_BTE[:, part][:, :-1], alone_BTE[:, :-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("off", [-1, 0, 1])
@torch.no_grad()
def test_drafting_reads_what_training_reads(
    heads: DraftHeads, off: int, dtype: torch.dtype
) -> None:
    """From keys and values of the text up to a position, and of no position more or less."""
    heads.to(dtype)
    hidden_BTD, ids_BT = text(9, rows=2)
    hidden_BTD = hidden_BTD.to(dtype)
    encoded_BTE = heads.encode(hidden_BTD, ids_BT)
    layer = heads.prefix
    assert layer is not None
    x_BTD = layer.read(hidden_BTD, heads.embed(ids_BT.roll(-1, dims=1)))
    positions_BT = torch.arange(9).expand(2, -1)
    held_LBASE = layer.keys_and_values(x_BTD, positions_BT, 9)
    at = slice(5, 6)
    masked = [(held_LBASE[..., : 6 + off, :], None), (held_LBASE, torch.arange(9) < 6 + off)]
    for held, visible_S in masked:
        visible = None if visible_S is None else visible_S.expand(2, 1, -1)
        got = layer.look(x_BTD[:, at], positions_BT[:, at], 9, held, visible)
        difference = float((got - encoded_BTE[:, at]).norm() / encoded_BTE[:, at].norm())
        assert (difference < (1e-5 if dtype == torch.float32 else 0.02)) == (off == 0)


@pytest.mark.parametrize("kind", BLOCKS)
def test_long_texts_are_computed_in_parts(
    tiny_llama: TinyLlama, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same outputs and gradients, packed or not."""
    heads = random_heads(tiny_llama(), **READERS[kind])
    hidden_BTD, ids_BT = text(11, rows=2)
    packed_BT = torch.tensor([[*range(4), *range(7)], [*range(9), *range(2)]])
    for position_ids_BT in (None, packed_BT):
        found = []
        for at_once in (1 << 27, 60_000):
            monkeypatch.setattr(block, "AT_ONCE", at_once)
            read_BTD = hidden_BTD.clone().requires_grad_()
            encoded_BTE = heads.encode(read_BTD, ids_BT, position_ids_BT)
            layer = heads.prefix
            assert layer is not None
            learnt = [read_BTD, *layer.parameters()]
            found.append([encoded_BTE, *torch.autograd.grad(encoded_BTE.square().mean(), learnt)])
        for whole, parts in zip(*found, strict=True):
            torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("correction_rank", [None, 4])
@torch.no_grad()
def test_queries_of_a_block_see_each_other(
    tiny_llama: TinyLlama, correction_rank: int | None
) -> None:
    """The last known token's query sees those of mask tokens. It drafts in DSpark's blocks, which
    are corrected, and not in DFlash's, which have a query more."""
    heads = random_heads(tiny_llama(), kind="block", correction_rank=correction_rank)
    shape: Any = heads.config.decoder
    assert shape.sample_from_anchor == (correction_rank is not None)
    hidden_BTD, ids_BT = text(5)
    features_BTKD = heads.features(heads.encode(hidden_BTD, ids_BT))
    assert features_BTKD.shape == (1, 5, 3, 64)
    heads.prefix.mask_with(torch.randn(64))
    other_BTKD = heads.features(heads.encode(hidden_BTD, ids_BT))
    assert (other_BTKD != features_BTKD).any(-1).all()


@torch.no_grad()
def test_a_mask_token_is_one_that_exists(tiny_llama: TinyLlama) -> None:
    model = tiny_llama()
    embedded_VD = model.get_input_embeddings().weight
    embedded_VD[150:] *= 1e-3
    heads = new_heads(model, HeadsConfig(kind="block"))
    shape: Any = heads.config.decoder
    assert shape.mask_token_id == 149


def test_a_block_has_no_second_layer_over_the_text() -> None:
    with pytest.raises(ValueError, match="as they are: leave prefix_attention out"):
        HeadsConfig(kind="block", prefix_attention=True)


def test_shapes_that_no_block_of_such_a_target_has() -> None:
    with pytest.raises(ValueError, match="block heads have no decoder of the shape DecoderShape"):
        HeadsConfig(kind="block", decoder=DecoderShape.of_width(64))
    with pytest.raises(ValueError, match="eagle3 heads have no decoder of the shape BlockShape"):
        HeadsConfig(kind="eagle3", decoder=BlockShape.of_width(64))
    masked = HeadsConfig(kind="block", decoder=replace(BlockShape.of_width(64), mask_token_id=199))
    with pytest.raises(ValueError, match="mask_token_id 199 is none of the target's 199 tokens"):
        masked.for_target(64, 199)
    assert masked.for_target(64, 200).decoder == masked.decoder
