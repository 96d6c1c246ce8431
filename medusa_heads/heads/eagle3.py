"""EAGLE-3's head: one decoder layer, read again and again on its own output.

At position t it reads the target's hidden state and the embedding of token t + 1, and attends over
what it read before; what comes out yields token t + 2. For a later token it reads what it put out
in place of the hidden state. It learns that way too, and is given no other example of what it
should put out: training-time test. With norm_output (EAGLE-3.1) it reads what stands behind the
last norm, whose size does not grow from step to step.

The layer is a Llama layer of transformers whose projections take two inputs side by side, and has
the names that EAGLE-3's checkpoints have.

Shapes: B batch, T tokens, F paths, J tokens of a path, S slots, K steps, D hidden, E = K * D,
N features, X columns of hidden states with features, V vocabulary.
Source: Li et al. 2025, "EAGLE-3: scaling up inference acceleration of large language models via
training-time test", arXiv:2503.01840, section 3; of norm_output vLLM's pull request 42764.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from medusa_heads.cache_names import cache_argument
from medusa_heads.config import HeadsConfig
from medusa_heads.decoder_shape import DecoderShape
from medusa_heads.heads.base import After
from medusa_heads.heads.chains import Chains
from medusa_heads.heads.decoder import DecoderHeads, RotaryLayers, settings_of
from medusa_heads.heads.vocabulary import scaled


class Eagle3Layer(RotaryLayers):
    """The decoder layer; fresh, it hands the hidden state on."""

    def __init__(self, hidden_size: int, shape: DecoderShape) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import (
            LlamaAttention,
            LlamaMLP,
            LlamaRotaryEmbedding,
        )

        super().__init__()
        self.config, rotary = settings_of(shape, LlamaConfig, LlamaRotaryEmbedding, hidden_size)
        self.keep_rotary(rotary)
        self._norm_before_residual = shape.norm_before_residual
        self.self_attn = LlamaAttention(self.config, layer_idx=0)
        self._cache_argument = cache_argument(LlamaAttention.forward)
        for name in ("q_proj", "k_proj", "v_proj"):
            plain = getattr(self.self_attn, name)
            wide = nn.Linear(2 * hidden_size, plain.out_features, bias=plain.bias is not None)
            setattr(self.self_attn, name, wide)
        self.mlp = LlamaMLP(self.config)
        self.hidden_norm = nn.RMSNorm(hidden_size, eps=shape.rms_norm_eps)
        self.input_layernorm = nn.RMSNorm(hidden_size, eps=shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden_size, eps=shape.rms_norm_eps)
        for zeroed in (self.self_attn.o_proj, self.mlp.down_proj):
            nn.init.zeros_(zeroed.weight)

    def forward(
        self,
        hidden_BTD: Tensor,
        embedded_BTD: Tensor,
        positions_BT: Tensor,
        visible_BTS: Tensor,
        cache: Any,
    ) -> Tensor:
        """What comes out [B, T, D]; keys and values are appended to the cache, of whose S slots,
        the new ones included, each position sees the visible ones."""
        normed_BTD = self.hidden_norm(hidden_BTD)
        residual_BTD = normed_BTD if self._norm_before_residual else hidden_BTD
        both = torch.cat([self.input_layernorm(embedded_BTD), normed_BTD], dim=-1)
        mixed_BTD, _ = self.self_attn(
            both,
            position_embeddings=self._rotary[0](both, positions_BT),
            attention_mask=visible_BTS[:, None],
            **{self._cache_argument: cache},
        )
        x_BTD = residual_BTD + mixed_BTD
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))

    def keys_and_values(
        self, hidden_BTD: Tensor, embedded_BTD: Tensor, positions_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """All that later positions need of these."""
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        attention, normed_BTD = self.self_attn, self.hidden_norm(hidden_BTD)
        both = torch.cat([self.input_layernorm(embedded_BTD), normed_BTD], dim=-1)
        keys, values = (
            project(both).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for project in (attention.k_proj, attention.v_proj)
        )
        _, keys = apply_rotary_pos_emb(keys, keys, *self._rotary[0](both, positions_BT))
        return keys, values


class Eagle3Decoder(nn.Module):
    """The layer, the norm before the vocabulary, and before the layer what makes one state of N
    features: norms and a product, fresh the last of them."""

    def __init__(self, hidden_size: int, shape: DecoderShape, num_features: int) -> None:
        super().__init__()
        self.midlayer = Eagle3Layer(hidden_size, shape)
        self.norm = nn.RMSNorm(hidden_size, eps=shape.rms_norm_eps)
        self._norm_output = shape.norm_output
        if not num_features:
            return
        norm, wide = partial(nn.RMSNorm, eps=shape.rms_norm_eps), num_features * hidden_size
        self.input_norm = norm(wide) if shape.feature_norm == "all" else None
        self.fc_norm = None
        if shape.feature_norm == "each":
            self.fc_norm = nn.ModuleList(norm(hidden_size) for _ in range(num_features))
        self.fc = nn.Linear(wide, hidden_size, bias=False)
        nn.init.zeros_(self.fc.weight)
        with torch.no_grad():
            self.fc.weight[:, -hidden_size:].fill_diagonal_(1.0)

    def handed_on(self, out_RD: Tensor) -> Tensor:
        """What the next step reads of what came out of the layer."""
        return self.norm(out_RD) if self._norm_output else out_RD

    def normed(self, state_RD: Tensor) -> Tensor:
        """What the vocabulary matrix reads of what the next step reads: normalised once."""
        return state_RD if self._norm_output else self.norm(state_RD)

    def fuse(self, features_RX: Tensor) -> Tensor:
        """One state of the features, side by side: (..., N * D) -> (..., D)."""
        if self.input_norm is not None:
            features_RX = self.input_norm(features_RX)
        if self.fc_norm is not None:
            parts = zip(self.fc_norm, features_RX.chunk(len(self.fc_norm), dim=-1), strict=True)
            features_RX = torch.cat([norm(part_RD) for norm, part_RD in parts], dim=-1)
        return self.fc(features_RX)


class Eagle3Heads(DecoderHeads):
    """K steps of one layer: `decoder.midlayer.*`, `decoder.norm.weight` [D], with features
    `decoder.fc.weight` [D, N * D] and its norms.

    Without features, fresh heads rank tokens as the target's lm_head does. With features, they read
    these in place of the last hidden state, and begin with the last of them.
    """

    kind = "eagle3"
    reads_drafts = True

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        assert config.hidden_size is not None
        shape = config.decoder or DecoderShape.of_width(config.hidden_size)
        assert isinstance(shape, DecoderShape)
        self.decoder = Eagle3Decoder(config.hidden_size, shape, len(config.features or ()))

    def encoder(self) -> nn.Module:
        """See DraftHeads; `fuse` is part of it."""
        return self.decoder

    def encode(
        self, hidden_BTX: Tensor, input_ids_BT: Tensor, position_ids_BT: Tensor | None = None
    ) -> Tensor:
        """What every step says at every position, [B, T, E], when the true tokens were drafted; see
        DraftHeads."""
        from transformers import DynamicCache

        cache, chains = DynamicCache(), Chains(input_ids_BT, position_ids_BT)
        x_BTD, out = self.fuse(hidden_BTX), []
        for step in range(self.config.num_heads):
            x_BTD = self.read(
                x_BTD,
                chains.following(step),
                chains.positions_BT + step,
                chains.visible(step),
                cache,
            )
            out.append(self.decoder.normed(x_BTD))
        return torch.cat(out, dim=-1)

    def read(
        self,
        hidden_BTD: Tensor,
        following_BT: Tensor,
        positions_BT: Tensor,
        visible_BTS: Tensor,
        cache: Any,
    ) -> Tensor:
        """What the next step reads in place of the hidden states; see Eagle3Layer."""
        dtype = self.dtype
        out_BTD: Tensor = self.decoder.midlayer(
            hidden_BTD.to(dtype),
            self.embed(following_BT).to(dtype),
            positions_BT,
            visible_BTS,
            cache,
        )
        return self.decoder.handed_on(out_BTD)

    def keys_and_values(
        self, hidden_BTD: Tensor, following_BT: Tensor, positions_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        embedded_BTD = self.embed(following_BT).to(self.dtype)
        hidden_BTD = hidden_BTD.to(self.dtype)
        return self.decoder.midlayer.keys_and_values(hidden_BTD, embedded_BTD, positions_BT)

    def after_text(
        self,
        hidden_BTX: Tensor,
        input_ids_BT: Tensor,
        position_ids_BT: Tensor | None,
        places_R: Tensor,
    ) -> After:
        """What follows drafts at R places of whole texts, counted over B * T; arguments as those of
        `encode`."""
        from transformers import DynamicCache

        cache, chains = DynamicCache(), Chains(input_ids_BT, position_ids_BT)
        visible_BTT = chains.visible(0).expand(len(input_ids_BT), -1, -1)
        read = (chains.following(0), chains.positions_BT, visible_BTT, cache)
        out_BTD = self.read(self.fuse(hidden_BTX), *read)
        # Every place drafts for itself, on a copy of its text's keys and values.
        cache.batch_select_indices(places_R // input_ids_BT.shape[1])
        found = (out_BTD, chains.positions_BT.expand_as(input_ids_BT), visible_BTT)
        ends_RD, at_R, visible_RS = (of.flatten(0, 1)[places_R] for of in found)
        return Branches(self, cache, ends_RD, at_R, visible_RS)


class Branches:
    """Drafted paths of B rows, read level by level; each sees its row's text and its own nodes.

    Args:
        cache: holds the text, and takes the nodes behind it.
        ends_BD: what `read` gave at the text's end.
        positions_B: where that stands in the text.
        visible_BS: which of the cache's slots are the row's text.
    """

    def __init__(
        self,
        heads: Eagle3Heads,
        cache: Any,
        ends_BD: Tensor,
        positions_B: Tensor,
        visible_BS: Tensor,
    ) -> None:
        self._heads, self._cache, self._positions_B = heads, cache, positions_B
        self._out_BFD, self._sees_BFS = ends_BD[:, None], visible_BS[:, None]

    def __call__(self, head: int, paths_BFJ: Tensor, above_BF: Tensor) -> tuple[Tensor, None]:
        heads = self._heads
        if head:
            own_FF = torch.eye(paths_BFJ.shape[1], dtype=torch.bool, device=paths_BFJ.device)
            own_BFF = own_FF.expand(len(paths_BFJ), -1, -1)
            out_BFD, sees_BFS = (
                of.gather(1, above_BF[:, :, None].expand(-1, -1, of.shape[2]))
                for of in (self._out_BFD, self._sees_BFS)
            )
            self._sees_BFS = torch.cat([sees_BFS, own_BFF], dim=2)
            positions_BF = (self._positions_B[:, None] + head).expand_as(above_BF)
            self._out_BFD = heads.read(
                out_BFD, paths_BFJ[:, :, -1], positions_BF, self._sees_BFS, self._cache
            )
        normed_BFD = heads.decoder.normed(self._out_BFD)
        return heads.project(0, scaled(normed_BFD, heads.config.logit_scale)), None
