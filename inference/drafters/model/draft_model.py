"""Drafts from a small language model: of the tokens that the target has as well.

Chosen tokens are verified by sample-then-match, without loss also where the target samples. A drawn
token is accepted with the whole overlap of both models' distributions, sum min(p, q), a chosen one
with p of that token alone; each sibling is a second chance at what the first one missed.

Shapes: B active rows, F nodes read at once, J tokens of a path, R ranks, C tokens drafted at once,
V vocabulary.
Sources: Leviathan et al. 2022, "Fast inference from transformers via speculative decoding",
arXiv:2211.17192, algorithm 1 and section 3.4; trees in the manner of EAGLE-2 (Li et al. 2024,
arXiv:2406.16858, section 4.1); siblings without putting back: Jeon et al. 2024, "Recursive
speculative decoding", arXiv:2402.14160.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.growing import by_drawing
from medusa_heads.inference.drafters.model.choice import DraftChoice
from medusa_heads.inference.drafters.model.drafted_tree import MOST_RANKS, DraftedTree, Experience
from medusa_heads.inference.drafters.model.vocabulary import ForeignDraft
from medusa_heads.inference.drafters.model.walk import Walk, draw_different
from medusa_heads.inference.engine.capability import capability
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.dynamic_tree import DYNAMIC_RANKS, best_first_tree
from medusa_heads.trees.on_host import best_first_on_host
from medusa_heads.trees.tree import TokenTree, TreeShape, cartesian_choices


class DraftModelDrafter(Drafter):
    """Trees of one size: a chain of `depth` likeliest tokens; with `branching`, so many tokens
    behind every node of each level, drawn where the target's are drawn, under the same warpers; or
    at `width` above 1 the best tree of `num_drafted` nodes.

    The best tree is grown level by level: the `width` likeliest paths of a level are read by the
    draft model together; of all that they offer next, the likeliest nodes are proposed.

    Each level is one forward of the frozen draft model, whose token ids are the target's, or which
    `vocabulary.py` has fitted to it. Where its vocabulary matrix is padded to more rows than
    `vocab_size`, those are left out. Raises ValueError: a size below 1, more nodes than the draft
    model will offer, or more children than the vocabulary; UnsupportedArchitecture: the draft model
    cannot go back on what it has read, or reads only chains and a tree was asked for."""

    def __init__(
        self,
        draft: TargetModel,
        vocab_size: int,
        *,
        depth: int = 4,
        width: int = 1,
        num_drafted: int | None = None,
        branching: Sequence[int] | None = None,
    ) -> None:
        if depth < 1 or width < 1:
            raise ValueError(
                f"drafts are at least 1 token deep and wide, got depth {depth} and width {width}"
            )
        levels = [1] * depth if branching is None else list(branching)
        if not levels or min(levels) < 1 or max(levels) > vocab_size:
            raise ValueError(
                f"every level of a drawn tree has 1 to {vocab_size} tokens behind each node, got "
                f"{levels}"
            )
        if not _reads_trees(draft) and max(width, *levels) > 1:
            raise UnsupportedArchitecture(
                f"the draft model ({draft.config.model_type}) reads one path at a time",
                "let it draft a chain",
            )
        self._draft, self._vocab_size = draft, vocab_size
        self._draws, self._levels = branching is not None, levels
        self._depth, self._width = depth, width
        if max(width, *levels) == 1 and _reads_trees(draft) and not isinstance(draft, ForeignDraft):
            self.levels = len(levels)
        # In the order of the levels, as the nodes are drafted.
        self._shape = TreeShape(cartesian_choices(levels))
        self.num_nodes = self._shape.num_nodes
        if width > 1:
            self._ranks, most, read = min(DYNAMIC_RANKS, vocab_size), 0, 1
            for _ in range(depth):
                offered = read * self._ranks
                most, read = most + offered, min(width, offered)
            num_drafted = depth * width if num_drafted is None else num_drafted
            if not 1 <= num_drafted <= most:
                raise ValueError(
                    f"a tree of depth {depth} and width {width} has 1 to {most} nodes, "
                    f"got {num_drafted}"
                )
            self.num_nodes = num_drafted + 1

    def prepare(self, state: DecodingState) -> None:
        assert self.levels is not None
        walk = Walk(self._draft, self.number, state, self._vocab_size, None)
        walk.read(None)
        walk.text.beside = self.levels + 1
        self._shape.tree(state.roots_B[:, None].expand(-1, self.num_nodes))  # keeps its numbers

    def propose(self, state: DecodingState) -> TokenTree:
        keyed = state.drawing == "keyed"
        warpers = state.warpers if self._draws or keyed else None
        walk = Walk(self._draft, self.number, state, self._vocab_size, warpers)
        if self._width > 1:
            return self._best_tree(state, walk)
        above_BF, first, width = None, 0, 1
        for children in self._levels:
            probs_BFV = walk.read(above_BF)
            if warpers is None or keyed:
                tokens_BFR = probs_BFV.topk(children, dim=-1).indices
            else:
                tokens_BFR = draw_different(probs_BFV, children)
                walk.drawn_from |= {first + f: probs_BFV[:, f] for f in range(width)}
            probs_BC = probs_BFV.gather(2, tokens_BFR).flatten(1)
            above_BCJ = walk.paths_BFJ[:, :, None].expand(-1, -1, children, -1).flatten(1, 2)
            walk.add(tokens_BFR.flatten(1), probs_BC, above_BCJ)
            first, width = first + width, width * children
            above_BF = torch.arange(width, device=probs_BC.device) // children
            above_BF = above_BF.expand(len(probs_BC), -1)
        return walk.tree(self._shape)

    def _best_tree(self, state: DecodingState, walk: Walk) -> TokenTree:
        def guess(level: int, paths_BFJ: Tensor, above_BF: Tensor) -> tuple[Tensor, Tensor]:
            walk.paths_BFJ = paths_BFJ[..., 1:]
            best = walk.read(above_BF if level else None).topk(self._ranks, dim=-1)
            return best.indices, best.values.clamp_min(torch.finfo(torch.float32).tiny).log()

        grow = best_first_on_host if state.on_host else best_first_tree
        return grow(state.roots_B, guess, self.num_nodes - 1, self._depth, self._width)


class AdaptiveTree:
    """A tree that grows as long as its next tokens gain more than they cost: drawn where the
    target's tokens are drawn, under the same warpers; else the likeliest.

    After each forward of the draft model as many tokens are drafted as are worth their
    verification: one behind each node where that is dear, several where it is cheap. Another
    forward is made where the next level promises more tokens than its seconds are worth. What
    tokens promise is known from how sure the draft model is, and how often it was right when it was
    so sure.

    Whether a token is drafted is settled before it is drawn, and once drawn it is verified: to drop
    it for what it turned out to be would bend the law of the text.

    The clock knows the seconds of the draft model's forwards, and learns from every one. Raises
    UnsupportedArchitecture: the draft model cannot go back on what it has read."""

    def __init__(
        self, draft: TargetModel, vocab_size: int, clock: Clock, *, chain_only: bool = False
    ) -> None:
        chain_only = not _reads_trees(draft) or chain_only
        self._draft, self._vocab_size, self._clock = draft, vocab_size, clock
        self._ranks = 1 if chain_only else min(MOST_RANKS, vocab_size)
        self._experience = by_drawing(Experience)

    def draft(self, state: DecodingState, choice: DraftChoice) -> TokenTree:
        """A tree for every active row, all of one shape."""
        drawn, device = state.drawing == "drawn", state.roots_B.device
        drafted = DraftedTree(state.rows, self._experience[state.drawing], choice, self._clock)
        state.memories[self, "last"] = drafted
        walk = Walk(self._draft, self, state, self._vocab_size, state.warpers)
        places = [0]
        while places:
            started = time.perf_counter()
            above_F = torch.tensor(drafted.read_below, device=device)
            probs_BFV = walk.read(above_F.expand(len(state.rows), -1))
            sure_BFR, best_BFR = self._sureness(probs_BFV, drawn)
            slots, ranks = drafted.grow(sure_BFR.tolist())
            places = []
            if slots:
                if drawn:
                    best_BFR = draw_different(probs_BFV, max(ranks) + 1)
                    walk.drawn_from |= {drafted.read[slot]: probs_BFV[:, slot] for slot in slots}
                slots_C, ranks_C = torch.tensor([slots, ranks], device=device)
                probs_BC = probs_BFV.gather(2, best_BFR)[:, slots_C, ranks_C]
                walk.add(best_BFR[:, slots_C, ranks_C], probs_BC, walk.paths_BFJ[:, slots_C])
                places = drafted.read_on()
                walk.paths_BFJ = walk.paths_BFJ[:, places]
            seconds = time.perf_counter() - started
            self._clock.learn(len(state.rows) * walk.text.fed, seconds, max(walk.text.lengths))
        tree = walk.tree(TreeShape(drafted.paths[1:]))
        drafted.tokens_BN = tree.tokens_BN
        return tree

    def learn(self, state: DecodingState) -> None:
        """Compare what was drafted last with what was committed since."""
        last: DraftedTree | None = state.memories.pop((self, "last"), None)
        if last is not None:
            last.learn()

    def _sureness(self, probs_BFV: Tensor, drawn: bool) -> tuple[Tensor, Tensor]:
        """What is known of each node's first, second, .. token before it is drafted [B, F, R], and
        the likeliest ones [B, F, R]. Of one that will be drawn, how likely the likeliest is; of one
        that is chosen, how likely it is itself where those before it were wrong."""
        best = probs_BFV.topk(self._ranks, dim=-1)
        if drawn:  # of fewer tokens that can be, no others are drawn
            likeliest_BFR = best.values[..., :1].expand(-1, -1, self._ranks)
            return likeliest_BFR.where(best.values > 0, -1.0), best.indices
        before_BFR = best.values.cumsum(dim=-1) - best.values
        return best.values / (1 - before_BFR).clamp_min(1e-6), best.indices


def _reads_trees(draft: TargetModel) -> bool:
    """Whether the draft model reads any of the tokens it drafts in any order, or only one path.
    Raises UnsupportedArchitecture: it cannot go back on what it has read."""
    trusted = capability(draft)
    if trusted == "recurrent":
        raise UnsupportedArchitecture(
            f"the draft model ({draft.config.model_type}) keeps a recurrent state, which cannot "
            "go back to where the target refuses a draft",
            "draft with a model of attention layers alone",
        )
    return trusted == "tree"
