"""What all kinds of heads have in common: their target's vocabulary, whole or reduced.

Shapes: R rows (any leading dimensions), B batch, T tokens, F paths, J tokens of a path, K heads, D
hidden, E what `encode` leaves of it (mostly D), X columns with features (D without), V vocabulary
(of the heads, may be the smaller one).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medusa_heads.config import IGNORED, HeadsConfig
from medusa_heads.heads.correction import LIKELY, AfterPaths, Correction
from medusa_heads.heads.fusion import Fusion
from medusa_heads.heads.near import NearLinear
from medusa_heads.heads.text.induction import InductionLayer
from medusa_heads.heads.text.prefix import PrefixLayer
from medusa_heads.heads.vocabulary import HasVocabulary, embeddings, scaled, vocabulary

if TYPE_CHECKING:  # it makes views of these heads
    from medusa_heads.heads.preview import VocabularyPreview

AnyHeads = TypeVar("AnyHeads", bound="DraftHeads")

After = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""Logits [B, F, C] of a head after each of F drafted paths, roots included: of the head's number i,
paths_BFJ of J = i + 1 tokens, and above_BF: behind which of the paths that head i - 1 was asked of
each stands. C are all tokens that the heads can draft, or those at the places [B, C] that are
returned as well."""


def product_dtype(weight: Tensor) -> torch.dtype:
    """The dtype in which autocast, or its absence, has products with this weight computed."""
    device = weight.device.type
    if torch.is_autocast_enabled(device) and weight.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return weight.dtype


class DraftHeads(nn.Module, ABC):
    """K heads over a frozen target. Head i predicts token t + 2 + i from h_t.

    Fresh heads, but for a block, predict what the target's lm_head does. The state dict holds what
    is trained and nothing of the target: `{i}.{l}...` of each head's blocks, with own matrices
    `{i}.{L}.weight` [V, D] (and `{i}.{L}.bias` [V] where the target's lm_head has one), with a
    prefix layer or induction `prefix.*`, with a correction `correction.*`, with features
    `fusion.linear.weight` [D, F * D], and with a reduced vocabulary `draft_tokens` [V].

    Where heads read tokens, they read the target's own embeddings, brought to unit scale: beside a
    normalised hidden state the often tiny vectors would be learnt from far too slowly.

    Attributes:
        config: the heads' shape.
        draft_tokens: token id of each entry of a reduced vocabulary, ascending; else None.
    """

    kind: str
    previews: Sequence[VocabularyPreview] | None = None  # of each vocabulary matrix, for drafting
    near_vocabulary: tuple[NearLinear, ...] = ()  # for drafting, where the matrix is shared
    reads_drafts = False  # whether the blocks of a head read the tokens drafted before its own
    one_module = False  # whether one module stands for all heads, none for each
    draft_tokens: Tensor | None

    def __init__(self, config: HeadsConfig) -> None:
        if config.hidden_size is None or config.vocab_size is None:
            raise ValueError(
                "the heads' hidden_size and vocab_size are not known yet: "
                f"{type(self).__name__}.from_target(target, config) reads them off the target"
            )
        if config.kind != self.kind:
            raise ValueError(f"{config.kind} heads are made by medusa_heads.heads.new_heads")
        super().__init__()
        self.config = config
        self._shared: tuple[Tensor, Tensor | None] | None = None
        self._embeddings_VD: Tensor | None = None
        self._embedding_scale = 1.0
        size = config.draft_vocab_size
        self.register_buffer("draft_tokens", None if size is None else torch.arange(size))
        for i in range(0 if self.one_module else config.num_heads):
            blocks = self._blocks(i)
            if config.vocab_matrix == "own":
                blocks.append(nn.Linear(config.hidden_size, config.num_candidates, bias=False))
            # Named "0", "1", ... as in FasterDecoding's checkpoints.
            self.add_module(str(i), nn.Sequential(*blocks))
        fused = () if self.one_module else config.features or ()
        self.fusion = Fusion(config.hidden_size, len(fused)) if fused else None
        self.prefix: Any = PrefixLayer(config.hidden_size) if config.prefix_attention else None
        if config.induction:
            both = config.hidden_size, config.num_heads
            self.prefix = InductionLayer(*both, reads_token=not self.reads_drafts)
        self.correction = None
        if config.correction_rank is not None:
            sizes = (config.vocab_size, config.num_candidates, config.correction_rank)
            self.correction = Correction(*sizes)

    @property
    def sequential(self) -> bool:
        """Whether what a head says depends on the tokens drafted before its own."""
        return self.reads_drafts or self.correction is not None

    @property
    def num_matrices(self) -> int:
        """How many vocabulary matrices there are: one for each head, or one for all."""
        own = self.config.vocab_matrix == "own" and not self.one_module
        return self.config.num_heads if own else 1

    @abstractmethod
    def _blocks(self, head: int) -> list[nn.Module]:
        """The residual blocks of a head: `config.num_blocks` of them."""

    @classmethod
    def from_target(
        cls: type[AnyHeads],
        target: HasVocabulary,
        config: HeadsConfig | None = None,
        draft_tokens: Tensor | None = None,
    ) -> AnyHeads:
        """Fresh fp32 heads on the target's device, as the class describes them. Of a
        reduced vocabulary `draft_tokens` are the ids, as of `frequent_tokens`.

        Raises:
            ValueError: `config` or `draft_tokens` do not fit the target or each other.
        """
        weight_VD, bias_V = vocabulary(target)
        vocab_size, hidden_size = weight_VD.shape
        config = (config or HeadsConfig(kind=cls.kind)).for_target(hidden_size, vocab_size)  # type: ignore[arg-type]
        heads = cls(config).to(device=weight_VD.device, dtype=torch.float32)
        heads._choose(draft_tokens)
        heads.share(target)
        if config.vocab_matrix == "own":
            for i in range(heads.num_matrices):
                out = heads._own(i)
                with torch.no_grad():
                    out.weight.copy_(heads._drafted(weight_VD))
                if bias_V is not None:
                    own_V = scaled(heads._drafted(bias_V), config.logit_scale)
                    out.bias = nn.Parameter(own_V.to(out.weight.dtype, copy=True))
        return heads

    def _choose(self, draft_tokens: Tensor | None) -> None:
        size = self.config.draft_vocab_size
        if size is None and draft_tokens is None:
            return
        if size is None or draft_tokens is None or draft_tokens.shape != (size,):
            got = None if draft_tokens is None else list(draft_tokens.shape)
            raise ValueError(
                f"a reduced vocabulary needs draft_vocab_size and as many draft_tokens, got {size} "
                f"and {got}: choose them with frequent_tokens"
            )
        ordered_V, vocab_size = draft_tokens.to(torch.long).unique(), self.config.vocab_size or 0
        if len(ordered_V) < size or ordered_V[0] < 0 or ordered_V[-1] >= vocab_size:
            raise ValueError(
                f"draft_tokens must be {size} different ids from 0 to {vocab_size - 1}"
            )
        assert self.draft_tokens is not None
        self.draft_tokens.copy_(ordered_V)

    def share(self, target: HasVocabulary) -> None:
        """Project with this target's vocabulary matrix, and read its token embeddings: neither are
        parameters of the heads. ValueError: its sizes or embeddings are not those that they need.
        """
        weight_VD, bias_V = vocabulary(target)
        self.config = self.config.for_target(*reversed(weight_VD.shape))
        if self.config.vocab_matrix == "shared":
            if bias_V is not None:
                bias_V = scaled(self._drafted(bias_V), self.config.logit_scale)
            self._shared = (self._drafted(weight_VD), bias_V)
        if self.reads_drafts or self.config.reads_text:
            self._embeddings_VD = every_VD = embeddings(target, weight_VD.shape[1])
            if not self.config.raw_embeddings:
                precise = torch.promote_types(every_VD.dtype, torch.float32)
                norm = torch.linalg.vector_norm(every_VD, dtype=precise).clamp_min(1e-6)
                self._embedding_scale = float(every_VD.numel() ** 0.5 / norm)

    def set_vocab_bias(self, has_bias: bool) -> None:
        """Give own vocabulary matrices a bias each, zero as yet, or take it from them: what heads
        learnt does not depend on whether their target's lm_head has one."""
        if self.config.vocab_matrix != "own":
            return
        for i in range(self.num_matrices):
            out = self._own(i)
            zeros_V = out.weight.new_zeros(self.config.num_candidates)
            out.register_parameter("bias", nn.Parameter(zeros_V) if has_bias else None)

    def embed(self, tokens: Tensor) -> Tensor:
        """The target's embeddings of tokens, at unit scale unless raw: (...) -> (..., D)."""
        assert self._embeddings_VD is not None, "share(target) comes first"
        return F.embedding(tokens, self._embeddings_VD) * self._embedding_scale

    def fuse(self, hidden_RX: Tensor) -> Tensor:
        """Hidden states, and features fused into them: (..., X) -> (..., D). All begins with it."""
        return hidden_RX if self.fusion is None else self.fusion(hidden_RX)

    def encode(
        self, hidden_BTX: Tensor, input_ids_BT: Tensor, position_ids_BT: Tensor | None = None
    ) -> Tensor:
        """What stands for the hidden states of whole texts before heads see them, [B, T, D]: fused,
        and what a layer makes of these and of the tokens behind them, with induction [B, T, E]. At
        the last position, with no token behind it, that is of no use. Texts are padded on the
        right; of several documents packed in a row, positions count each from 0."""
        hidden_BTD = self.fuse(hidden_BTX)
        if self.prefix is None:
            return hidden_BTD
        following_BTD = self.embed(F.pad(input_ids_BT[:, 1:], (0, 1)))
        return self.prefix(hidden_BTD, following_BTD, position_ids_BT)

    def encoder(self) -> nn.Module | None:
        """What `encode` runs over whole texts behind `fuse`, where anything does."""
        return self.prefix

    @abstractmethod
    def features(self, hidden_RD: Tensor, tokens_RK: Tensor | None = None) -> Tensor:
        """What the vocabulary matrices read, `logit_scale` times what the residual blocks put out:
        (..., D) -> (..., K, D), of h_t as `encode` left it. `tokens[..., j]` is token t + 1 + j; a
        sequential head i sees those up to j = i."""

    def forward(self, hidden_RD: Tensor, tokens_RK: Tensor | None = None) -> Tensor:
        """Logits of every head over its own vocabulary: (..., D) -> (..., K, V). ValueError:
        sequential heads, and no `tokens_RK`."""
        if self.sequential and tokens_RK is None:
            raise ValueError(f"{self.kind} heads see the tokens between: pass tokens_RK")
        logits_RKV = self._project_all(self.features(hidden_RD, tokens_RK))
        return logits_RKV if tokens_RK is None else self.corrected(logits_RKV, tokens_RK)

    def after_paths(self, hidden_BD: Tensor, likely: int | None = LIKELY) -> After:
        """What follows drafts from hidden states as `encode` left them. A correction chooses among
        so many `likely` tokens of each head's own, by default fewer than all."""
        logits_BKV = self._project_all(self.features(hidden_BD))
        return AfterPaths(self.correction, logits_BKV, likely)

    def corrected(self, logits_RV: Tensor, before_R: Tensor) -> Tensor:
        """Logits after the token that stands before each, t + 1 + i for head i."""
        return logits_RV if self.correction is None else self.correction.add_to(logits_RV, before_R)

    def _project_all(self, features_RKD: Tensor) -> Tensor:
        if self.num_matrices == 1:
            return self.project(0, features_RKD)
        return torch.stack(
            [self.project(i, features_RKD[..., i, :]) for i in range(self.config.num_heads)], dim=-2
        )

    def project(self, head: int, features_RD: Tensor) -> Tensor:
        """Logits of head `head` from its features, not corrected: (..., D) -> (..., V)."""
        if self.previews is not None:
            preview = self.previews[head if self.num_matrices > 1 else 0]
            if preview.pays(features_RD):
                return preview.logits(features_RD)
        own = self.config.vocab_matrix == "own"
        for near in (self._own(head),) if own else self.near_vocabulary:
            if isinstance(near, NearLinear):
                return near.rows(features_RD)
        weight_VD, bias_V = self.vocab_matrix(head)
        # In two dimensions: with odd strides in three, a product takes a far slower path.
        flat_ND = features_RD.flatten(0, -2).to(weight_VD.dtype)
        return F.linear(flat_ND, weight_VD, bias_V).unflatten(0, features_RD.shape[:-1])

    def vocab_matrix(self, head: int) -> tuple[Tensor, Tensor | None]:
        """Weight [V, D] and bias [V] or None with which head `head` projects."""
        if self.config.vocab_matrix == "own":
            out = self._own(head)
            return out.weight, out.bias
        if self._shared is None:
            raise ValueError(
                "these heads share their target's vocabulary matrix: call heads.share(target) first"
            )
        return self._shared

    def draft_ids(self, tokens: Tensor) -> Tensor:
        """Where token ids stand in the heads' vocabulary, IGNORED where they do not."""
        if self.draft_tokens is None:
            return tokens
        places = torch.searchsorted(self.draft_tokens, tokens.contiguous())
        places = places.clamp_max(len(self.draft_tokens) - 1)
        return places.where(self.draft_tokens[places] == tokens, IGNORED)

    def token_ids(self, draft_ids: Tensor) -> Tensor:
        """The target's token ids of places in the heads' vocabulary."""
        return draft_ids if self.draft_tokens is None else self.draft_tokens[draft_ids]

    def heads(self) -> Iterator[Any]:
        """The heads in order: sequences of blocks."""
        return (self._modules[str(i)] for i in range(self.config.num_heads))

    def _own(self, head: int) -> nn.Linear:
        out = self.get_submodule(f"{head}.{self.config.num_blocks}")
        assert isinstance(out, nn.Linear)
        return out

    def _drafted(self, of_all: Tensor) -> Tensor:
        """Of the target's rows, one a token, those of the heads' vocabulary."""
        if self.draft_tokens is None:
            return of_all
        return of_all[self.draft_tokens.to(of_all.device)]
