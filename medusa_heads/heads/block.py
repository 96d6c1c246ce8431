"""Block heads: all at once from the whole text so far, each a query of one block.

The queries are embeddings alone: of the last known token, and of one mask token for each that is to
come. All that they know of the text they find in its keys and values, which every layer projects
from the same states of the target. The layers are Qwen3 layers of transformers, and what they hold
has the names that it has in DFlash's and DSpark's checkpoints.

Shapes: R rows (any leading dimensions), B batch, T tokens, P positions that are read from, S
positions held, L layers, A attention heads, E their width, K heads, Q queries of a position, D
hidden, O = Q * D, X columns of hidden states with features.
Source: the block drafters DFlash (arXiv:2602.06036) and DSpark (DeepSeek 2026, arXiv:2607.05147),
the latter with a correction by the token before.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from medusa_heads.config import HeadsConfig
from medusa_heads.decoder_shape import BlockShape
from medusa_heads.heads.decoder import DecoderHeads, RotaryLayers, settings_of
from medusa_heads.heads.vocabulary import HasVocabulary

AT_ONCE = 1 << 27
"""Numbers that blocks keep for the backward pass; of longer texts they are computed again."""

_AGAIN: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}


class BlockLayers(RotaryLayers):
    """The layers, what makes one state of N features before them, and the norm behind them."""

    def __init__(self, config: HeadsConfig, shape: BlockShape) -> None:
        from transformers import Qwen3Config
        from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

        super().__init__()
        width, eps = config.hidden_size, shape.rms_norm_eps
        assert width is not None
        settings, rotary = settings_of(
            shape, Qwen3Config, Qwen3RotaryEmbedding, width, config.num_layers
        )
        self.keep_rotary(rotary)
        self._mask_D = torch.empty(0)
        self._num_queries = config.num_heads + (not shape.sample_from_anchor)
        self._num_heads = config.num_heads
        if config.features is not None:
            self.fc = nn.Linear(len(config.features) * width, width, bias=False)
            nn.init.zeros_(self.fc.weight)
            with torch.no_grad():
                self.fc.weight[:, -width:].fill_diagonal_(1.0)
        self.hidden_norm = nn.RMSNorm(width, eps=eps)
        self.layers: Any = nn.ModuleList(
            Qwen3DecoderLayer(settings, i) for i in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(width, eps=eps)
        self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        """Let the first layer hand on the mean of what it sees, and all others nothing: from a mean
        of states that the target's vocabulary matrix can read, a block learns faster."""
        for place, layer in enumerate(self.layers):
            attention = layer.self_attn
            for zeroed in (attention.o_proj, layer.mlp.down_proj):
                zeroed.weight.zero_()
            if place == 0:
                attention.v_proj.weight.zero_()
                for same in (attention.v_proj, attention.o_proj):
                    same.weight.fill_diagonal_(1.0)

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    @property
    def held_per_token(self) -> int:
        """Numbers that keys and values of one position are."""
        return sum(2 * layer.self_attn.k_proj.out_features for layer in self.layers)

    def mask_with(self, embedding_D: Tensor) -> None:
        """Let this embedding stand for every token that is not known yet."""
        self._mask_D = embedding_D

    def fuse(self, features_RX: Tensor) -> Tensor:
        """One state of the features, side by side: (..., N * D) -> (..., D)."""
        return self.fc(features_RX)

    def read(self, hidden_BTD: Tensor, following_BTD: Tensor) -> Tensor:
        """What the layers read at a position, [B, T, 2 * D]: the target's state, normalised, and
        the embedding of the token behind."""
        normed_BTD = self.hidden_norm(hidden_BTD.to(self.dtype))
        return torch.cat([normed_BTD, following_BTD.to(normed_BTD.dtype)], dim=-1)

    def forward(
        self, hidden_BTD: Tensor, following_BTD: Tensor, position_ids_BT: Tensor | None = None
    ) -> Tensor:
        """Whole texts at once, a block at every position, which sees itself and what came before:
        [B, T, K * D]. Packed documents do not see each other."""
        x_BTD, end = self.read(hidden_BTD, following_BTD), hidden_BTD.shape[1]
        slots_T, document_BT = torch.arange(end, device=x_BTD.device), None
        if position_ids_BT is None:
            position_ids_BT = slots_T.expand(len(x_BTD), -1)
        else:
            document_BT = (position_ids_BT == 0).cumsum(dim=1)
        held_LBASE = self.keys_and_values(x_BTD, position_ids_BT, end)
        attention_heads = self.layers[0].self_attn.config.num_attention_heads
        of_scores = 4 * attention_heads * (end + self._num_queries)
        of_position = self._num_queries * (of_scores + 8 * x_BTD.shape[-1]) * len(self.layers)
        count = max(AT_ONCE // (len(x_BTD) * of_position), 1)
        parts = []
        for start in range(0, end, count):
            chunk = slice(start, min(start + count, end))
            visible_BPS = (slots_T[chunk, None] >= slots_T[: chunk.stop])[None]
            if document_BT is not None:
                same_BPS = document_BT[:, chunk, None] == document_BT[:, None, : chunk.stop]
                visible_BPS = visible_BPS & same_BPS
            at = x_BTD[:, chunk], position_ids_BT[:, chunk]
            look: Any = self.look if count >= end else partial(checkpoint, self.look, **_AGAIN)
            parts.append(look(*at, end, held_LBASE[..., : chunk.stop, :], visible_BPS))
        return torch.cat(parts, dim=1)

    def keys_and_values(self, x_BTD: Tensor, positions_BT: Tensor, end: int) -> Tensor:
        """Of all layers, from what was read at some positions, [2 * L, B, A, T, E]."""
        context_BTD, _ = x_BTD.chunk(2, dim=-1)
        turned = self._rotary[0](context_BTD, positions_BT)
        pairs = (_keys_and_values(layer.self_attn, context_BTD, turned) for layer in self.layers)
        return torch.stack([part for pair in pairs for part in pair])

    def look(
        self,
        x_BPD: Tensor,
        positions_BP: Tensor,
        end: int,
        held_LBASE: Tensor,
        visible_BPS: Tensor | None = None,
    ) -> Tensor:
        """What blocks at some positions find, [B, P, K * D], in `keys_and_values` of the text, of
        which each sees what is visible to it; by default all."""
        queries, anchor_BPD = self._num_queries, x_BPD.chunk(2, dim=-1)[1]
        masks = self._mask_D.to(x_BPD).expand(*anchor_BPD.shape[:2], queries - 1, -1)
        x_BOD = torch.cat([anchor_BPD[:, :, None], masks], dim=2).flatten(1, 2)
        ahead_Q = 1 + torch.arange(queries, device=x_BPD.device)
        turned = self._rotary[0](x_BOD, (positions_BP[:, :, None] + ahead_Q).flatten(1))
        for layer, text in zip(self.layers, held_LBASE.split(2), strict=True):
            normed_BOD = layer.input_layernorm(x_BOD)
            own = (
                _queries(layer.self_attn, normed_BOD, turned),
                *_keys_and_values(layer.self_attn, normed_BOD, turned),
            )
            mixed_BAOE = _of_text_and_block(own, text, queries, visible_BPS)
            x_BOD = x_BOD + layer.self_attn.o_proj(mixed_BAOE.transpose(1, 2).flatten(2))
            x_BOD = x_BOD + layer.mlp(layer.post_attention_layernorm(x_BOD))
        found_BPKD = self.norm(x_BOD).unflatten(1, (-1, queries))[:, :, -self._num_heads :]
        return found_BPKD.flatten(2)


class BlockHeads(DecoderHeads):
    """K heads that are queries of a block, over `config.num_layers` layers in `prefix.*`: `encode`
    makes of a position what each head's own query has found.

    With features, these are read in place of the last hidden state.
    """

    kind = "block"

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        self.prefix = BlockLayers(config, self._shape())

    def encoder(self) -> BlockLayers:
        return self.prefix

    def _shape(self) -> BlockShape:
        assert self.config.hidden_size is not None
        shape = self.config.decoder
        if shape is None:  # DSpark's has a correction, DFlash's has none
            usual = BlockShape.of_width(self.config.hidden_size)
            shape = replace(usual, sample_from_anchor=self.config.correction_rank is not None)
        assert isinstance(shape, BlockShape)
        return shape

    def share(self, target: HasVocabulary) -> None:
        """See DraftHeads. Fresh heads choose their mask token: the last of the vocabulary whose
        embedding is no shorter than is usual, as those of tokens that do not exist are."""
        super().share(target)
        assert self._embeddings_VD is not None
        shape = self._shape()
        if shape.mask_token_id is None:
            precise = torch.promote_types(self._embeddings_VD.dtype, torch.float32)
            length_V = torch.linalg.vector_norm(self._embeddings_VD, dim=-1, dtype=precise)
            usual = (length_V >= length_V.median() / 2).nonzero()
            shape = replace(shape, mask_token_id=int(usual[-1]))
            self.config = replace(self.config, decoder=shape)
        self.prefix.mask_with(self._embeddings_VD[shape.mask_token_id])


def _queries(attention: Any, x_BTD: Tensor, turned: Any) -> Tensor:
    return _turn(attention.q_norm(_by_heads(attention.q_proj(x_BTD), attention)), turned)


def _keys_and_values(attention: Any, x_BTD: Tensor, turned: Any) -> tuple[Tensor, Tensor]:
    keys = _turn(attention.k_norm(_by_heads(attention.k_proj(x_BTD), attention)), turned)
    return keys, _by_heads(attention.v_proj(x_BTD), attention).to(keys.dtype)


def _by_heads(x_BTD: Tensor, attention: Any) -> Tensor:
    return x_BTD.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)


def _turn(x_BATE: Tensor, turned: Any) -> Tensor:
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    return apply_rotary_pos_emb(x_BATE, x_BATE, *turned)[0].to(x_BATE.dtype)


def _of_text_and_block(
    own: tuple[Tensor, ...], text_LBASE: Tensor, queries: int, visible_BPS: Tensor | None
) -> Tensor:
    """What blocks mix [B, A, P * Q, E] by queries, keys and values of their `own`: each query sees
    what its position may see of the text's S keys and values, and those of its own block. Several
    attention heads may share their keys and values."""
    shared = own[0].shape[1] // own[1].shape[1]
    text_keys, text_values = (x.repeat_interleave(shared, dim=1) for x in text_LBASE)
    keys, values = (x.repeat_interleave(shared, dim=1).unflatten(2, (-1, queries)) for x in own[1:])
    query = own[0].unflatten(2, (-1, queries)) * own[0].shape[-1] ** -0.5
    scores_BAPQS = (query.flatten(2, 3) @ text_keys.mT).unflatten(2, (-1, queries))
    if visible_BPS is not None:
        scores_BAPQS = scores_BAPQS.masked_fill(~visible_BPS[:, None, :, None], -torch.inf)
    scores = torch.cat([scores_BAPQS, query @ keys.mT], dim=-1)
    shares = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    of_text, of_block = shares.split([text_keys.shape[2], queries], dim=-1)
    return of_text.flatten(2, 3) @ text_values + (of_block @ values).flatten(2, 3)
