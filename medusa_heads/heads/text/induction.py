"""What followed the places of a text that are like the one where drafts begin.

A text repeats itself, seldom word for word. Two places are alike where the target's last hidden
states are, and the tokens behind them: attention by both cosines finds them, with nothing to learn.
Head i reads what stood as far behind those places as the token that it drafts stands behind this
one, and its own matrix makes of it the state by which the target would name that token. All of this
is known before the first draft, and so it is read once a step, whatever the tree.

Sources: induction heads (Olsson et al. 2022, arXiv:2209.11895), and attention over the states of a
text so far (Grave et al. 2017, arXiv:1612.04426), which copies tokens where this copies states.

Shapes: B batch, T tokens, P positions that are read from, S positions held, K heads, D hidden, G
what is held of a position, V = G * D.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SHARPNESS = 15.0
"""Of a cosine. Half of it, or twice, is as good (docs/benchmarks/recipes.md, "Induction")."""

NOTHING = 15.0
"""How alike two places are, of 2 * SHARPNESS, that count as much as nothing being alike."""

SCORES_AT_ONCE = 1 << 24

_AGAIN: Any = {"use_reentrant": False, "preserve_rng_state": False}


class InductionLayer(nn.Module):
    """Heads read [B, T, D + K * D]: h_t, with `token.weight` [D, D] of the token behind it for
    heads that see no drafts, and what their `matrices` [K, V, D] make of what each reads; h_t alone
    while these are fresh."""

    def __init__(self, hidden_size: int, num_heads: int, reads_token: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.token = nn.Linear(hidden_size, hidden_size, bias=False) if reads_token else None
        if self.token is not None:
            nn.init.zeros_(self.token.weight)
        self.matrices = nn.Parameter(torch.zeros(num_heads, 2 * hidden_size, hidden_size))

    @property
    def dtype(self) -> torch.dtype:
        return self.matrices.dtype

    @property
    def held_per_token(self) -> int:
        """Numbers that are kept of one position."""
        return self.matrices.shape[1]

    def read(self, hidden_BTD: Tensor, following_BTD: Tensor) -> Tensor:
        """The layer's input [B, T, D + V]: what all heads read, and by what places are known and
        read, hidden states and the embeddings of the tokens behind, each at unit scale."""
        x_BTD, following_BTD = hidden_BTD.to(self.dtype), following_BTD.to(self.dtype)
        places = [F.rms_norm(part, part.shape[-1:]) for part in (x_BTD, following_BTD)]
        if self.token is not None:
            x_BTD = x_BTD + self.token(following_BTD)
        return torch.cat([x_BTD, *places], dim=-1)

    def forward(
        self, hidden_BTD: Tensor, following_BTD: Tensor, position_ids_BT: Tensor | None = None
    ) -> Tensor:
        """Whole texts at once, each position seeing itself and what came before. Packed documents
        do not see each other."""
        x_BTW = self.read(hidden_BTD, following_BTD)
        parts = []
        for part, held_GB1SD, visible_BPS in self._parts(x_BTW, position_ids_BT):
            given = x_BTW[:, part], None, 0, held_GB1SD, visible_BPS
            whole = part.stop - part.start == x_BTW.shape[1]
            # What heads read is K * G times what they learn from: of long texts it is read anew for
            # gradients.
            parts.append(self.look(*given) if whole else checkpoint(self.look, *given, **_AGAIN))
        return torch.cat(parts, dim=1)

    def followed(
        self, hidden_BTD: Tensor, following_BTD: Tensor, position_ids_BT: Tensor | None = None
    ) -> Tensor:
        """What every head reads at every position of whole texts, [B, T, K, V]."""
        x_BTW = self.read(hidden_BTD, following_BTD)
        parts = self._parts(x_BTW, position_ids_BT)
        return torch.cat([self._read(x_BTW[:, part], *seen) for part, *seen in parts], dim=1)

    def keys_and_values(
        self, x_BTW: Tensor, positions_BT: Tensor | None = None, end: int = 0
    ) -> Tensor:
        """What is kept of what was read at some positions, wherever these are, [G, B, 1, T, D]."""
        width = x_BTW.shape[-1] // 3
        return x_BTW[..., width:].unflatten(-1, (2, width)).permute(2, 0, 1, 3)[:, :, None]

    def look(
        self,
        x_BPW: Tensor,
        positions_BP: Tensor | None,
        end: int,
        held_GB1SD: Tensor,
        visible_BPS: Tensor | None = None,
    ) -> Tensor:
        """The output at some positions from `keys_and_values` of the text, of which each sees what
        is visible to it; by default all."""
        states_BPE = self._states(self._read(x_BPW, held_GB1SD, visible_BPS))
        x_BPD = x_BPW[..., : x_BPW.shape[-1] // 3]
        return torch.cat([x_BPD, states_BPE.to(x_BPD.dtype)], dim=-1)

    def _parts(
        self, x_BTW: Tensor, position_ids_BT: Tensor | None
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """The positions of whole texts, as many at once as few scores are made for: which, what is
        held up to the last of them, and what of that each sees."""
        rows, length = x_BTW.shape[:2]
        size = max(SCORES_AT_ONCE // max(rows * length * self.num_heads, 1), 1)
        slots_T, held_GB1TD = torch.arange(length, device=x_BTW.device), self.keys_and_values(x_BTW)
        document_BT = None if position_ids_BT is None else (position_ids_BT == 0).cumsum(dim=1)
        for start in range(0, length, size):
            part = slice(start, min(start + size, length))
            visible_BPS = (slots_T[: part.stop] <= slots_T[part, None])[None]
            if document_BT is not None:
                same_BPS = document_BT[:, part, None] == document_BT[:, None, : part.stop]
                visible_BPS = visible_BPS & same_BPS
            yield part, held_GB1TD[..., : part.stop, :], visible_BPS

    @torch.no_grad()
    def _read(self, x_BPW: Tensor, held_GB1SD: Tensor, visible_BPS: Tensor | None = None) -> Tensor:
        """What every head reads [B, P, K, V] at places of a text of which all that is held, or
        visible, came before."""
        query_GBPD = self.keys_and_values(x_BPW)[:, :, 0]
        held_GBSD = held_GB1SD[:, :, 0]
        if query_GBPD.shape[2] == 1 and held_GBSD.is_cpu and held_GBSD.dtype == torch.bfloat16:
            alike_GBPS = (query_GBPD * held_GBSD).sum(dim=-1)[:, :, None]  # five times as fast
        else:
            alike_GBPS = query_GBPD @ held_GBSD.mT
        alike_BPS = alike_GBPS.sum(dim=0, dtype=torch.float32)
        # Bounded, and so no need for more than the exponential.
        weights_BPS = (alike_BPS * (SHARPNESS / held_GBSD.shape[-1]) - NOTHING).exp()
        if visible_BPS is not None:
            weights_BPS = weights_BPS * visible_BPS
        # A place counts for head i by what stands i + 1 behind it, where that is there.
        slots, heads = weights_BPS.shape[-1], self.num_heads
        behind_BPKS = F.pad(weights_BPS, (heads, 0)).unfold(-1, slots, 1)[..., :heads, :].flip(-2)
        if visible_BPS is not None:
            behind_BPKS = behind_BPKS * visible_BPS[:, :, None]
        shares_BPKS = behind_BPKS / (1 + behind_BPKS.sum(dim=-1, keepdim=True))
        shares_BXS = shares_BPKS.to(held_GBSD.dtype).flatten(1, 2)
        read_GBXD = shares_BXS @ held_GBSD
        return read_GBXD.permute(1, 2, 0, 3).flatten(2).unflatten(1, (-1, heads))

    def _states(self, read_BPKV: Tensor) -> Tensor:
        """What each head makes of what it has read, [B, P, K * D]."""
        # In one product: a row of them takes as long as its matrices take to be read.
        return torch.einsum("bpkv,kvd->bpkd", read_BPKV, self.matrices).flatten(2)


def of_each(hidden_RE: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
    """What all heads read of an `InductionLayer`'s output, (..., D), and the state that it adds to
    what each head says, (..., K, D). Hidden states without such are read as they are."""
    if hidden_RE.shape[-1] == width:
        return hidden_RE, None
    return hidden_RE[..., :width], hidden_RE[..., width:].unflatten(-1, (-1, width))
