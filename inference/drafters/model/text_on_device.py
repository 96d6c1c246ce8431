"""What a draft model has read of the texts, between steps that are one graph.

A row's text lies in the slots in which the target keeps it. Behind all texts is room for what one
step reads: the last two tokens of a text, and the drafts behind them. The next step moves that to
its place in the text, all of it: what the target refused is never seen there, and written over.

Two tokens, because the last draft of a chain is not read: where it was accepted, it is the last but
one.

Shapes: B rows, F tokens read at once, P tokens that a step has read before, S slots, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from medusa_heads.inference.drafters.base import OnDevice
from medusa_heads.target.attention import TreeMask
from medusa_heads.target.graphs.static_cache import StaticRowCache, explicit_inputs
from medusa_heads.target.target import TargetModel

if TYPE_CHECKING:
    from medusa_heads.inference.drafters.model.drafted_text import DraftedText
    from medusa_heads.inference.engine.device_state import DeviceState


class DraftedTextOnDevice(OnDevice):
    """The same as DraftedText, of a chain of drafts, for as many rows as `like` has.

    Args:
        draft: the draft model, which has the target's vocabulary.
        like: what was read of such a text.
        capacity: slots of the texts.

    Attributes:
        beside: slots behind them.
    """

    def __init__(self, draft: TargetModel, like: DraftedText, capacity: int) -> None:
        self._draft, self._capacity, self.beside = draft, capacity, like.beside
        self._cache = StaticRowCache(draft.config, capacity + self.beside)
        with torch.inference_mode(False):
            zeros_B = torch.zeros(len(like.rows), dtype=torch.long, device=draft.device)
            # The last token but one; where texts begin and end.
            self._before_B, self._padding_B, self._ends_B = (zeros_B.clone() for _ in range(3))
            self._room_P = capacity + torch.arange(self.beside, device=draft.device)
        for kept in (self._before_B, self._padding_B, self._ends_B, self._room_P):
            torch._dynamo.mark_static_address(kept)

    def begin(self, memory: DraftedText) -> None:
        """Go on with what was read of this text."""
        last = [row.ids_1T()[0, -2:].tolist() for row in memory.rows]
        ends = [row.length for row in memory.rows]
        self._before_B.copy_(torch.tensor([before for before, _ in last], device="cpu"))
        self._ends_B.copy_(torch.tensor(ends, device="cpu"))
        self._cache.copy_rows(memory.cache, max(memory.lengths))

    def catch_up(self, state: DeviceState) -> Tensor:
        """Logits [B, V] of every row's next token."""
        self._move_in()
        fresh_B1 = state.fresh_B[:, None]
        committed_B1 = state.following_BP.gather(1, (fresh_B1 - 2).clamp_min(0))
        before_B1 = committed_B1.where(fresh_B1 > 1, self._before_B[:, None])
        # No plain copy: Inductor would take it at the end of the step, of the roots to come.
        self._before_B.copy_(state.roots_B.clamp_min(0))
        self._ends_B.copy_(state.lengths_B + 1)
        self._padding_B.copy_(state.padding_B)
        return self._read(torch.cat([before_B1, state.roots_B[:, None]], dim=1), 0)[:, -1]

    def write(self, tokens_BF: Tensor, above_BF: Tensor, level: int) -> Tensor:
        """Logits [B, F, V] behind the one token that was drafted last."""
        return self._read(tokens_BF, level + 1)

    def _read(self, tokens_BF: Tensor, written: int) -> Tensor:
        new, device = tokens_BF.shape[1], self._room_P.device
        begins_B1, padding_B1 = self._ends_B[:, None] - 2, self._padding_B[:, None]
        order_P = torch.arange(written + new, device=device)
        positions_BP = self._draft.within(begins_B1 - padding_B1 + order_P)
        slots_S = torch.arange(self._capacity + self.beside, device=device)
        text_BS = (slots_S >= padding_B1) & (slots_S < begins_B1)
        behind_S = slots_S - self._capacity
        drafts_FS = (behind_S >= 0) & (behind_S <= order_P[written:, None])
        mask = TreeMask(
            text_BS[:, None] | drafts_FS,
            positions_BP[:, written:],
            self._capacity + written,
            self._padding_B,
            written_positions_BP=positions_BP[:, :written],
        )
        tokens_BF = tokens_BF.clamp_max(self._draft.get_input_embeddings().num_embeddings - 1)
        with self._cache.written_at(self._room_P[written : written + new]):
            given = explicit_inputs(self._draft, tokens_BF, self._cache, mask)
            logits_BFV: Tensor = self._draft.model(**given).logits
        return logits_BFV

    def _move_in(self) -> None:
        """What the last step read, to its place behind the text that it knew."""
        source_P = self._room_P
        places_BP = self._ends_B[:, None] - 2 + torch.arange(self.beside, device=source_P.device)
        places_BP = places_BP.where(places_BP < self._capacity, source_P)
        self._cache.move_rows(source_P.expand_as(places_BP), places_BP)
