"""What the text, heads and recycling offer, merged into one tree on the target's device: the host
is asked nothing, so that a whole step can be one graph.

Shapes: B active rows, C slots, P fresh tokens, L tokens of a continuation, M lengths of a match, F
paths, J tokens of a path, R ranks of all offers together, G groups of evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from medusa_heads.inference.adapt.buckets import Buckets, Paced
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.continuation import Texts
from medusa_heads.inference.drafters.text import PRIOR, chance_copied
from medusa_heads.inference.engine.state import DecodingState, Drawing
from medusa_heads.trees.dynamic_tree import (
    DYNAMIC_WIDTH,
    Guess,
    Tail,
    best_chain,
    best_first_tree,
    likeliest,
)
from medusa_heads.trees.levels import NEVER, SUREST
from medusa_heads.trees.tree import TokenTree, chain_shape

_BUSHY = 6  # levels on which the tree branches off the text's own continuation
_WEIGHT = 4.0  # of a prior, in drafts


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


class MergedTrees(Drafter):
    """Trees of the same size at every step, by tensors on the target's device alone: the likeliest
    nodes of what all parts guess, and the text's own continuation as far as it goes. Raises
    ValueError: no node.

    Args:
        parts: which guess besides the text; may be none.
        num_drafted: nodes besides the root.
        sizes: see Drafter; none is larger than that.
        chain_only: never more than one token behind another; then all have one size.
        paced: whether sizes are also chosen from where the host takes the steps. Each is a forward
            to be recorded, which costs a step, or compiled, which costs half a minute.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        num_drafted: int,
        sizes: Sequence[int] = (),
        *,
        chain_only: bool = False,
        paced: bool = False,
    ) -> None:
        assert not (chain_only and sizes)
        if num_drafted < 1:
            raise ValueError(f"a merged tree drafts at least 1 token, got {num_drafted}")
        self._parts, self.num_nodes = list(parts), num_drafted + 1
        self.levels, self.sizes, self._paces = num_drafted, sizes, paced
        self._bushy = min(_BUSHY, num_drafted) if parts else num_drafted
        self._chain = chain_shape(self.num_nodes) if chain_only else None
        self.reads_prompt = any(part.reads_prompt for part in parts)
        # Tokens of the text that were accepted, and that were drafted where they counted.
        self._counts: dict[Drawing, Tensor] = {}
        # For steps that the host takes, by their rows; and how the last one was.
        self._buckets: dict[tuple[Drawing, int], Buckets] = {}
        self._paced = Paced()

    def prepare(self, state: DecodingState) -> None:
        self._whole(state)

    def propose(self, state: DecodingState) -> TokenTree:
        tree, memory = self._whole(state), state.memories[self.number]
        if not self.sizes or not self._paces or state.fixed_shapes:  # whoever takes these chooses
            return tree
        key = state.drawing, len(state.rows)
        if key not in self._buckets:
            self._buckets[key] = Buckets(self.sizes)
        self._paced = memory.paced
        size = self._paced.next(self._buckets[key], memory.accepted)
        smaller, expected_BN = likeliest(tree, size + 1)
        going = [b for b, row in enumerate(state.rows) if not row.done]  # others stay in a batch
        self._paced.expected_N = expected_BN[going].mean(dim=0)
        return smaller

    def learn_seconds(self, nodes: int, seconds: float) -> None:
        self._paced.usual = True

    def _whole(self, state: DecodingState) -> TokenTree:
        # First, so that what heads keep comes first among the memories: a compiler that looks for
        # it compares the keys before it with heads, which it cannot do with a number.
        guesses = [(part.depth, part.guess(state)) for part in self._parts]
        memory = state.memories.get(self.number)
        if memory is None:
            memory = state.memories[self.number] = Texts(state, self.num_nodes - 1)
        counts_2G = self._counts_of(state)
        found = memory.advance(state, counts_2G)
        chances_BL = (counts_2G[0] / counts_2G[1])[found.groups_BL.clamp_min(0)]
        if state.noise is not None:
            chances_BL = self._drawn(state, found.tokens_BL, chances_BL)
        log_chances_BL = chances_BL.clamp(1e-9, SUREST).log()
        log_chances_BL = log_chances_BL.where(found.groups_BL >= 0, NEVER)

        # Which paths of a level are the text's own.
        along_BF = torch.ones_like(state.roots_B[:, None], dtype=torch.bool)

        def guess(level: int, paths_BFJ: Tensor, above_BF: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal along_BF
            if level:
                own_B1 = found.tokens_BL[:, level - 1, None]
                along_BF = along_BF.gather(1, above_BF) & (paths_BFJ[:, :, -1] == own_B1)
            token_BF = found.tokens_BL[:, level, None].expand_as(along_BF)
            chance_BF = log_chances_BL[:, level, None].where(along_BF, NEVER)
            offers = [(token_BF[..., None], chance_BF[..., None])]
            offers += [of(level, paths_BFJ, above_BF) for depth, of in guesses if level < depth]
            tokens, log_chances = zip(*offers, strict=True)
            return torch.cat(tokens, dim=-1), torch.cat(log_chances, dim=-1)

        if self._chain is not None:
            return best_chain(state.roots_B, guess, self._chain, merges=True)
        most = self.num_nodes - 1
        tail = Tail(found.tokens_BL, log_chances_BL)
        limits = most, self._bushy, DYNAMIC_WIDTH
        return best_first_tree(state.roots_B, guess, *limits, tail, merges=True)

    def observe(self, tree: TokenTree, logits_BNV: Tensor) -> None:
        for part in self._parts:
            part.observe(tree, logits_BNV)

    def _counts_of(self, state: DecodingState) -> Tensor:
        """Accepted and drafted tokens [2, G] of texts that come about like this one."""
        counts_2G = self._counts.get(state.drawing)
        if counts_2G is None or counts_2G.device != state.roots_B.device:
            with torch.inference_mode(False):
                device = state.roots_B.device
                prior_G = torch.tensor(PRIOR, dtype=torch.float, device=device)
                drafted_G = torch.full_like(prior_G, _WEIGHT)
                counts_2G = torch.stack([drafted_G * prior_G, drafted_G])
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
