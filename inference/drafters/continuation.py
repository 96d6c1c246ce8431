"""What followed where a text's end occurred before, by tensors on the target's device alone.

Shapes: B active rows, C slots, P fresh tokens, L tokens of a continuation, M lengths of a match, G
groups of evidence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from medusa_heads.inference.adapt.buckets import Paced
from medusa_heads.inference.drafters.base import Memory, OnDevice
from medusa_heads.inference.drafters.text import BOUNDS
from medusa_heads.inference.engine.state import DecodingState

if TYPE_CHECKING:
    from medusa_heads.inference.engine.device_state import DeviceState

_LOOKED_BACK = 16  # tokens of a match that are compared; a longer one is believed as much
_KEPT = 1.0 - 1 / 200  # of what is known, draft by draft


class Continuation(NamedTuple):
    """What followed where the text's end occurred before."""

    tokens_BL: Tensor  # of every row; whatever stands there where nothing is known
    groups_BL: Tensor  # the group of evidence that each belongs to; -1 where nothing is known


def continuation(ids_BC: Tensor, ends_B: Tensor, padding_B: Tensor, most: int) -> Continuation:
    """At most so many tokens behind the latest of the longest earlier occurrences of each text's
    end.

    Args:
        ids_BC: the texts, whatever stands behind their ends.
        ends_B: the slot of each row's last token.
        padding_B: slots of left padding.
    """
    slots_C = torch.arange(ids_BC.shape[1], device=ids_BC.device)
    back_M = torch.arange(_LOOKED_BACK - 1, -1, -1, device=ids_BC.device)
    ends_B1 = ends_B[:, None]
    own_BM = ids_BC.gather(1, (ends_B1 - back_M).clamp_min(0))
    before_BMC = pad(ids_BC, (_LOOKED_BACK - 1, 0)).unfold(1, len(slots_C), 1)
    length_BC = torch.full_like(ids_BC, _LOOKED_BACK)
    same_BMC = before_BMC == own_BM[..., None]
    for place, same_BC in enumerate(same_BMC.unbind(1)):  # a nearer one that differs counts
        length_BC = length_BC.where(same_BC, _LOOKED_BACK - 1 - place)
    inside_BC = (slots_C + 1 - padding_B[:, None]).clamp_min(0)
    length_BC = length_BC.minimum(inside_BC).where(slots_C < ends_B1, 0)
    found_BC = length_BC * len(slots_C) + slots_C  # of equally long ones the latest
    place_B1 = found_BC.argmax(dim=1, keepdim=True)
    length_B1 = length_BC.gather(1, place_B1)
    ahead_L = torch.arange(most, device=ids_BC.device)
    from_BL = place_B1 + 1 + ahead_L
    known_BL = (from_BL <= ends_B1) & (length_B1 > 0)
    tokens_BL = ids_BC.gather(1, from_BL.minimum(ends_B1))
    # With each token that is right, the match is one longer.
    reached_BL = length_B1 + ahead_L
    groups_BL = sum((reached_BL >= bound for bound in BOUNDS), 0 * ahead_L)
    return Continuation(tokens_BL, groups_BL.where(known_BL, -1))


class Texts(Memory):
    """The texts of rows that the host knows, and what was drafted from them last.

    Attributes:
        accepted: drafts, whatever they were, in the last step, of a mean row that went on in it.
        paced: which chooses how many the next one verifies.
    """

    def __init__(self, state: DecodingState, most: int) -> None:
        super().__init__(state.rows)
        self._most, self.accepted = most, 0.0
        self.paced = Paced()
        self._last: Continuation | None = None
        self.ids_BS = torch.empty(0)

    def advance(self, state: DecodingState, counts_2G: Tensor) -> Continuation:
        """Learn from what was committed since last time; what may follow now."""
        kept, device = self.follow(state.rows), state.roots_B.device
        if self._last is not None:
            if kept is not None:
                self._last = Continuation(*(of[kept] for of in self._last))
            committed = self.committed()
            going = [len(tokens) - 1.0 for tokens in committed if tokens]  # others have ended
            self.accepted = sum(going) / max(len(going), 1)
            longest = max(map(len, committed))
            filled = [tokens + [0] * (longest - len(tokens)) for tokens in committed]
            fresh_B = torch.tensor([len(tokens) for tokens in committed], device=device)
            _learn(counts_2G, self._last, torch.tensor(filled, device=device), fresh_B)
        self.lengths = [row.length for row in state.rows]
        shape = len(state.rows), max(self.lengths)
        self.ids_BS = torch.zeros(shape, dtype=torch.long, device="cpu")
        for ids_S, row in zip(self.ids_BS, state.rows, strict=True):
            ids_S[: row.length] = row.ids_1T()[0]
        self.ids_BS = self.ids_BS.to(device)
        ends_B = torch.tensor(self.lengths, device=device) - 1
        padding_B = torch.tensor(state.padding, device=device)
        self._last = continuation(self.ids_BS, ends_B, padding_B, self._most)
        return self._last

    def on_device(self, capacity: int) -> TextsOnDevice:
        """The same of rows on the device, up to a capacity; empty."""
        return TextsOnDevice(self.ids_BS, capacity, self._most)


class TextsOnDevice(OnDevice):
    """The same between steps that are one graph. What stands in the last column is of no text."""

    def __init__(self, like_BS: Tensor, capacity: int, most: int) -> None:
        self._capacity, self._most, batch = capacity, most, len(like_BS)
        with torch.inference_mode(False):
            self._ids_BC = like_BS.new_zeros(batch, capacity + 1)
            self._last_2BL = like_BS.new_zeros(2, batch, most)
        for kept in (self._ids_BC, self._last_2BL):
            torch._dynamo.mark_static_address(kept)

    def begin(self, memory: Texts) -> None:
        """Go on with these texts, which have drafted nothing."""
        self._ids_BC[:, : memory.ids_BS.shape[1]] = memory.ids_BS
        self._last_2BL.fill_(-1)

    def advance(self, state: DeviceState, counts_2G: Tensor) -> Continuation:
        following_BP, fresh_B1 = state.following_BP, state.fresh_B[:, None]
        _learn(counts_2G, Continuation(*self._last_2BL), following_BP, state.fresh_B)
        ahead_P = torch.arange(following_BP.shape[1], device=following_BP.device)
        places_BP = state.lengths_B[:, None] + 1 - fresh_B1 + ahead_P
        new_BP = ahead_P < fresh_B1
        places_BP, ids_BP = places_BP.where(new_BP, self._capacity), following_BP.where(new_BP, 0)
        self._ids_BC.scatter_(1, places_BP, ids_BP)
        found = continuation(self._ids_BC, state.lengths_B, state.padding_B, self._most)
        self._last_2BL.copy_(torch.stack(found))
        return found


def _learn(counts_2G: Tensor, drafted: Continuation, following_BP: Tensor, fresh_B: Tensor) -> None:
    """Compare what was drafted from the text with what was committed, as far as it was right."""
    most = min(drafted.tokens_BL.shape[1], following_BP.shape[1])
    groups_BP, following_BP = drafted.groups_BL[:, :most], following_BP[:, :most]
    right_BP = drafted.tokens_BL[:, :most] == following_BP
    ahead_P = torch.arange(most, device=fresh_B.device)
    counts_BP = (groups_BP >= 0) & (ahead_P < fresh_B[:, None])
    counts_BP = counts_BP & ((~right_BP).cumsum(dim=1) - (~right_BP).long() == 0)
    groups_G = torch.arange(counts_2G.shape[1], device=fresh_B.device)
    drafted_BPG = (groups_BP[..., None] == groups_G) & counts_BP[..., None]
    drafted_G = drafted_BPG.sum(dim=(0, 1))
    accepted_G = (drafted_BPG & right_BP[..., None]).sum(dim=(0, 1))
    counts_2G.copy_(counts_2G * _KEPT**drafted_G + torch.stack([accepted_G, drafted_G]))
