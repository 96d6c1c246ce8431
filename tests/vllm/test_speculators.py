"""What is written in speculators' layouts, its own model classes read, and say what ours say.

Skipped where the package speculators is not installed.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_heads.decoder_shape import DecoderShape
from tests.vllm.written import BLOCKS, exported, text

speculators: Any = pytest.importorskip("speculators")


@pytest.mark.parametrize("name", BLOCKS)
@torch.no_grad()
def test_a_block_says_the_same(tmp_path: Path, name: str) -> None:
    to, config = BLOCKS[name]
    heads, target, folder = exported(tmp_path, to, kind="block", **config)
    theirs: Any = speculators.SpeculatorModel.from_pretrained(str(folder)).float().eval()
    theirs._attn_impl, theirs._create_mask_fn = "eager", _eager_mask()
    theirs.config.transformer_layer_config._attn_implementation = "eager"
    ids_1T = text()
    hidden_1TX = target.hidden(ids_1T)
    width = target.hidden_size
    block = theirs.block_size
    anchors = ids_1T.shape[1] - block
    hidden, logits, _, _, places = theirs._backbone_forward(
        hidden_1TX[..., :-width],
        ids_1T,
        torch.ones_like(ids_1T),
        hidden_1TX[..., -width:],
        torch.zeros_like(ids_1T),
        max_anchors=anchors,
    )
    got = logits.view(anchors, block, -1)
    if to == "dspark":
        before = ids_1T[0, places].view(anchors, block)
        got = got + theirs.markov_head.block_bias(
            prev_token_ids=before, hidden_states=hidden.view(anchors, block, -1)
        )
    got = got[1:, -heads.config.num_heads :]  # before the first token there is no text
    encoded_1TE = heads.encode(hidden_1TX, ids_1T)[:, : anchors - 1]
    following = torch.stack([ids_1T[:, 1 + i : anchors + i] for i in range(4)], dim=-1)
    expected = heads(encoded_1TE, following)[0]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    drafted = torch.arange(theirs.draft_vocab_size)
    if theirs.d2t is not None:
        drafted = drafted + theirs.d2t
        assert torch.equal(theirs.t2d.nonzero()[:, 0], drafted)
    assert torch.equal(drafted, heads.token_ids(torch.arange(len(drafted))))


def _eager_mask() -> Any:
    return importlib.import_module("speculators.models.attention").create_float_mask


@pytest.mark.parametrize("matrix", ["shared", "own"])
@torch.no_grad()
def test_an_eagle3_layer_says_the_same(tmp_path: Path, matrix: str) -> None:
    heads, target, folder = exported(
        tmp_path, "eagle3-speculators", kind="eagle3", vocab_matrix=matrix, draft_vocab_size=500
    )
    theirs: Any = speculators.SpeculatorModel.from_pretrained(str(folder)).float().eval()
    ids_1T = text()
    hidden_1TX = target.hidden(ids_1T)
    fused = theirs.fc(
        torch.cat(
            [
                norm(part)
                for norm, part in zip(
                    theirs.fc_norm, hidden_1TX[..., : -target.hidden_size].chunk(3, -1), strict=True
                )
            ],
            dim=-1,
        )
    )
    following = ids_1T.roll(-1)
    both = torch.cat([theirs.embed_tokens(following), fused], dim=-1)
    length = ids_1T.shape[1]
    mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
    positions = torch.arange(length)[None]
    theirs.config.transformer_layer_config._attn_implementation = "eager"
    out = theirs.layers[0](
        both,
        attention_mask=mask,
        position_ids=positions,
        position_embeddings=theirs.rotary_emb(both, positions),
    )
    out = out[0] if isinstance(out, tuple) else out
    got = theirs.lm_head(theirs.norm(out))
    expected = heads.project(0, heads.features(heads.encode(hidden_1TX, ids_1T))[:, :, 0])
    torch.testing.assert_close(got[:, :-1], expected[:, :-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("norm_output", [False, True])
@torch.no_grad()
def test_steps_of_an_eagle3_layer_go_on_as_theirs(tmp_path: Path, norm_output: bool) -> None:
    """Their own loop over the steps, fed with the true tokens."""
    shape = replace(DecoderShape.of_width(384), norm_output=norm_output)
    heads, target, folder = exported(
        tmp_path, "eagle3-speculators", kind="eagle3", draft_vocab_size=500, decoder=shape
    )
    theirs: Any = speculators.SpeculatorModel.from_pretrained(str(folder)).float().eval()
    assert theirs.config.norm_output is norm_output
    theirs._attn_impl, theirs._create_mask_fn = "eager", _eager_mask()
    theirs.config.transformer_layer_config._attn_implementation = "eager"
    ids_1T = text()
    hidden_1TX = target.hidden(ids_1T)
    said: list[torch.Tensor] = []
    theirs.lm_head.register_forward_hook(lambda _module, _inputs, out: said.append(out))
    theirs(
        hidden_1TX[..., : -target.hidden_size],
        ids_1T.roll(-1),
        torch.zeros_like(ids_1T),
        ttt_steps=4,
    )
    features_1TKD = heads.features(heads.encode(hidden_1TX, ids_1T))
    assert len(said) == 4
    for step, got in enumerate(said):
        expected = heads.project(0, features_1TKD[:, :, step])
        end = ids_1T.shape[1] - 1 - step  # beyond the text they read other tokens
        torch.testing.assert_close(got[:, :end], expected[:, :end], atol=1e-4, rtol=1e-4)
    heads.decoder._norm_output = not norm_output  # type: ignore[union-attr]
    other = heads.project(0, heads.features(heads.encode(hidden_1TX, ids_1T))[:, :30, 1])
    assert not torch.allclose(said[1][:, :30], other, atol=1e-2)
