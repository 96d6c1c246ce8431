"""What the text, heads and recycling offer, merged into one tree on the target's device: the host
is asked nothing, so that a whole step can be one graph.

Shapes: B active rows, C slots, P fresh tokens, L tokens of a continuation, M lengths of a match, F
paths, J tokens of a path, R ranks of all offers together, G groups of evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from medusa_heads.inference.drafters.base import Drafter, Memory
from medusa_heads.inference.drafters.text import BOUNDS, PRIOR, chance_copied
from medusa_heads.inference.engine.state import DecodingState, Drawing
from medusa_heads.trees.dynamic_tree import (
    DYNAMIC_WIDTH,
    NEVER,
    Guess,
    Tail,
    best_chain,
    best_first_tree,
)
from medusa_heads.trees.tree import TokenTree, chain_shape

if TYPE_CHECKING:
    from medusa_heads.inference.engine.device_state import DeviceState

_LOOKED_BACK = 16  # tokens of a match that are compared; a longer one is believed as much
_BUSHY = 6  # levels on which the tree branches off the text's own continuation
_WEIGHT, _KEPT = 4.0, 1.0 - 1 / 200  # of a prior, in drafts; and of what is known, draft by draft
_SUREST = 0.999  # no draft is certain


class Part(Protocol):
    """A drafter whose guesses can be merged with others'.

    Attributes:
        depth: levels that it guesses at.
    """

    depth: int
    reads_prompt: bool

    def guess(self, state: DecodingState) -> Guess:
        """What it takes to follow, in this step."""

    def observe(self, tree: TokenTree, logits_BNV: Tensor) -> None:
        """See Drafter."""


class Continuation(NamedTuple):
    """What followed where the text's end occurred before.

    Attributes:
        tokens_BL: of every row; whatever stands there where nothing is known.
        groups_BL: the group of evidence that each belongs to; -1 where nothing is known.
    """

    tokens_BL: Tensor
    groups_BL: Tensor


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


class MergedTrees(Drafter):
    """Trees of the same size at every step, by tensors on the target's device alone: the likeliest
    nodes of what all parts guess, and the text's own continuation as far as it goes.

    Args:
        parts: which guess besides the text; may be none.
        num_drafted: nodes besides the root.
        sizes: see Drafter; none is larger than that.
        chain_only: never more than one token behind another; then all have one size.

    Raises:
        ValueError: no node.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        num_drafted: int,
        sizes: Sequence[int] = (),
        *,
        chain_only: bool = False,
    ) -> None:
        assert not (chain_only and sizes)
        if num_drafted < 1:
            raise ValueError(f"a merged tree drafts at least 1 token, got {num_drafted}")
        self._parts, self.num_nodes = list(parts), num_drafted + 1
        self.levels, self.sizes = num_drafted, sizes
        self._bushy = min(_BUSHY, num_drafted) if parts else num_drafted
        self._chain = chain_shape(self.num_nodes) if chain_only else None
        self.reads_prompt = any(part.reads_prompt for part in parts)
        # Tokens of the text that were accepted, and that were drafted where they counted.
        self._counts: dict[Drawing, Tensor] = {}

    def propose(self, state: DecodingState) -> TokenTree:
        memory = state.memories.get(self)
        if memory is None:
            memory = state.memories[self] = _Texts(state, self.num_nodes - 1)
        counts_2G = self._counts_of(state)
        found = memory.advance(state, counts_2G)
        chances_BL = (counts_2G[0] / counts_2G[1])[found.groups_BL.clamp_min(0)]
        if state.noise is not None:
            chances_BL = self._drawn(state, found.tokens_BL, chances_BL)
        log_chances_BL = chances_BL.clamp(1e-9, _SUREST).log()
        log_chances_BL = log_chances_BL.where(found.groups_BL >= 0, NEVER)
        guesses = [(part.depth, part.guess(state)) for part in self._parts]

        def guess(level: int, paths_BFJ: Tensor, above_BF: Tensor) -> tuple[Tensor, Tensor]:
            own_BJ = torch.cat([state.roots_B[:, None], found.tokens_BL[:, :level]], dim=1)
            along_BF = (paths_BFJ == own_BJ[:, None]).all(dim=-1)
            token_BF = found.tokens_BL[:, level, None].expand_as(along_BF)
            chance_BF = log_chances_BL[:, level, None].where(along_BF, NEVER)
            offers = [(token_BF[..., None], chance_BF[..., None])]
            offers += [of(level, paths_BFJ, above_BF) for depth, of in guesses if level < depth]
            return merged(*(torch.cat(each, dim=-1) for each in zip(*offers, strict=True)))

        if self._chain is not None:
            return best_chain(state.roots_B, guess, self._chain)
        most = self.num_nodes - 1
        tail = Tail(found.tokens_BL, log_chances_BL)
        return best_first_tree(state.roots_B, guess, most, self._bushy, DYNAMIC_WIDTH, tail)

    def observe(self, tree: TokenTree, logits_BNV: Tensor) -> None:
        for part in self._parts:
            part.observe(tree, logits_BNV)

    def _counts_of(self, state: DecodingState) -> Tensor:
        """Accepted and drafted tokens [2, G] of texts that come about like this one."""
        counts_2G = self._counts.get(state.drawing)
        if counts_2G is None or counts_2G.device != state.roots_B.device:
            with torch.inference_mode(False):
                drafted_G = torch.full((len(PRIOR),), _WEIGHT)
                counts_2G = torch.stack([drafted_G * torch.tensor(PRIOR), drafted_G])
                counts_2G = counts_2G.to(state.roots_B.device)
            torch._dynamo.mark_static_address(counts_2G)
            self._counts[state.drawing] = counts_2G
        return counts_2G

    def _drawn(self, state: DecodingState, tokens_BL: Tensor, chances_BL: Tensor) -> Tensor:
        """How likely the tokens are to be drawn where their own noise is known. See
        `chance_drawn`."""
        assert state.noise is not None
        ahead = list(range(tokens_BL.shape[1]))
        luck_BL = (-state.noise.of(state.rows, ahead, tokens_BL[..., None])[..., 0]).exp()
        drawn_BL = (-luck_BL * (1.0 - chances_BL) / chances_BL.clamp_min(1e-9)).exp()
        return chance_copied(chances_BL, drawn_BL)


def merged(tokens_BFR: Tensor, log_chances_BFR: Tensor) -> tuple[Tensor, Tensor]:
    """The same offers with each token once: sources that agree are right more often."""
    # What is no number would leave none of what others offer.
    log_chances_BFR = log_chances_BFR.nan_to_num(nan=NEVER)
    same_BFRR = tokens_BFR[..., :, None] == tokens_BFR[..., None, :]
    first_BFR = ~same_BFRR.tril(-1).any(dim=-1)  # none of the earlier ones is this token
    missed_BFR = torch.log1p(-log_chances_BFR.exp().clamp_max(_SUREST))
    both_BFR = -torch.expm1((missed_BFR[..., None, :] * same_BFRR).sum(dim=-1))
    total_BF1 = both_BFR.where(first_BFR, 0.0).sum(dim=-1, keepdim=True)
    logs_BFR = (both_BFR / total_BF1.clamp_min(1.0)).clamp_min(1e-30).log()
    # What nobody offers stays so, and still comes before what is there already.
    logs_BFR = logs_BFR.where(both_BFR > 0, log_chances_BFR)
    return tokens_BFR, logs_BFR.where(first_BFR, 2 * NEVER)


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


class _Texts(Memory):
    """The texts of rows that the host knows, and what was drafted from them last."""

    def __init__(self, state: DecodingState, most: int) -> None:
        super().__init__(state.rows)
        self._most = most
        self._last: Continuation | None = None
        self.ids_BS = torch.empty(0)

    def advance(self, state: DecodingState, counts_2G: Tensor) -> Continuation:
        """Learn from what was committed since last time; what may follow now."""
        kept, device = self.follow(state.rows), state.roots_B.device
        if self._last is not None:
            if kept is not None:
                self._last = Continuation(*(of[kept] for of in self._last))
            committed = self.committed()
            longest = max(map(len, committed))
            filled = [tokens + [0] * (longest - len(tokens)) for tokens in committed]
            fresh_B = torch.tensor([len(tokens) for tokens in committed], device=device)
            _learn(counts_2G, self._last, torch.tensor(filled, device=device), fresh_B)
        self.lengths = [row.length for row in state.rows]
        self.ids_BS = torch.zeros(len(state.rows), max(self.lengths), dtype=torch.long)
        for ids_S, row in zip(self.ids_BS, state.rows, strict=True):
            ids_S[: row.length] = row.ids_1T()[0]
        self.ids_BS = self.ids_BS.to(device)
        ends_B = torch.tensor(self.lengths, device=device) - 1
        padding_B = torch.tensor(state.padding, device=device)
        self._last = continuation(self.ids_BS, ends_B, padding_B, self._most)
        return self._last

    def on_device(self, capacity: int) -> _TextsOnDevice:
        """The same of rows on the device, up to a capacity; empty."""
        return _TextsOnDevice(self.ids_BS, capacity, self._most)


class _TextsOnDevice:
    """The same between steps that are one graph. What stands in the last column is of no text."""

    beside = 0

    def __init__(self, like_BS: Tensor, capacity: int, most: int) -> None:
        self._capacity, self._most, batch = capacity, most, len(like_BS)
        with torch.inference_mode(False):
            self._ids_BC = like_BS.new_zeros(batch, capacity + 1)
            self._last = Continuation(*(like_BS.new_zeros(batch, most) for _ in range(2)))
        for kept in (self._ids_BC, *self._last):
            torch._dynamo.mark_static_address(kept)

    def begin(self, memory: _Texts) -> None:
        """Go on with these texts, which have drafted nothing."""
        self._ids_BC[:, : memory.ids_BS.shape[1]] = memory.ids_BS
        self._last.groups_BL.fill_(-1)

    def advance(self, state: DeviceState, counts_2G: Tensor) -> Continuation:
        """See _Texts."""
        following_BP, fresh_B1 = state.following_BP, state.fresh_B[:, None]
        _learn(counts_2G, self._last, following_BP, state.fresh_B)
        ahead_P = torch.arange(following_BP.shape[1], device=following_BP.device)
        places_BP = state.lengths_B[:, None] + 1 - fresh_B1 + ahead_P
        new_BP = ahead_P < fresh_B1
        places_BP, ids_BP = places_BP.where(new_BP, self._capacity), following_BP.where(new_BP, 0)
        self._ids_BC.scatter_(1, places_BP, ids_BP)
        found = continuation(self._ids_BC, state.lengths_B, state.padding_B, self._most)
        for kept, new in zip(self._last, found, strict=True):
            kept.copy_(new)
        return found
