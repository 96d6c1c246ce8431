"""A draft model's tree that grows as long as its next tokens gain more than they cost.

Shapes: B active rows, F nodes read at once, R ranks (a node's first, second, .. token), C tokens
drafted behind them, J tokens of a path behind the committed text, V vocabulary.
Source: the optimal length of Leviathan et al. 2022, arXiv:2211.17192, section 3.4, with acceptance
as it turns out to be and costs as they are measured, asked anew before every forward; of several
drawn tokens behind a node, Jeon et al. 2024, "Recursive speculative decoding", arXiv:2402.14160.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from medusa_heads.inference.drafters.model.drafted_text import drafted_text
from medusa_heads.inference.drafters.model.drafted_tree import MOST_RANKS, DraftedTree, Experience
from medusa_heads.inference.drafters.model.drawing import draft_probs, draw_different
from medusa_heads.inference.engine.capability import capability
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.tree import TokenTree, TreeShape

if TYPE_CHECKING:
    from medusa_heads.inference.adapt.clock import Clock
    from medusa_heads.inference.drafters.model.choice import DraftChoice
    from medusa_heads.inference.engine.state import DecodingState


class AdaptiveTree:
    """Tokens drawn where the target's are drawn, under the same warpers; else the likeliest.

    After each forward of the draft model as many tokens are drafted as are worth their
    verification: one behind each node where that is dear, several where it is cheap. Another
    forward is made where the next level promises more tokens than its seconds are worth. What
    tokens promise is known from how sure the draft model is, and how often it was right when it was
    so sure.

    Whether a token is drafted is settled before it is drawn, and once drawn it is verified: to drop
    it for what it turned out to be would bend the law of the text.

    Args:
        draft: the draft model, frozen; its token ids are the target's.
        vocab_size: of the target.
        clock: seconds of the draft model's forwards; learns from every one.
        chain_only: never more than one token behind another.

    Raises:
        UnsupportedArchitecture: the draft model cannot go back on what it has read.
    """

    def __init__(
        self, draft: TargetModel, vocab_size: int, clock: Clock, *, chain_only: bool = False
    ) -> None:
        chain_only = capability(draft) == "chain" or chain_only
        self._draft, self._vocab_size, self._clock = draft, vocab_size, clock
        self._ranks = 1 if chain_only else min(MOST_RANKS, vocab_size)
        # Of tokens that were drawn, and of those that were chosen.
        self._experience = {drawn: Experience() for drawn in (True, False)}

    def draft(self, state: DecodingState, choice: DraftChoice) -> TokenTree:
        """A tree for every active row, all of one shape."""
        drawn = state.warpers is not None
        experience = self._experience[drawn]
        drafted = DraftedTree(state.rows, experience, choice, self._clock)
        state.memories[self, "last"] = drafted
        text = drafted_text(self._draft, state, self)
        paths_BFJ = state.roots_B[:, None, None][..., :0]
        log_probs = [torch.zeros(state.roots_B[:, None].shape, device=state.roots_B.device)]
        tokens = [state.roots_B[:, None]]
        drawn_from: dict[int, Tensor] = {}
        places = [0]
        while places:
            started = time.perf_counter()
            if drafted.levels:
                above_F = torch.tensor(drafted.read_below, device=paths_BFJ.device)
                above_BF = above_F.expand(len(state.rows), -1)
                logits_BFV = text.write(paths_BFJ[..., -1], above_BF, drafted.levels)
            else:
                logits_BFV = text.catch_up(state)[:, None]
            logits_BFV = logits_BFV.to(paths_BFJ.device)
            probs_BFV = draft_probs(
                logits_BFV, paths_BFJ, state.rows, state.warpers, self._vocab_size
            )
            sure_BFR, best_BFR = self._sureness(probs_BFV, drawn)
            slots, ranks = drafted.grow(sure_BFR.tolist())
            if slots:
                if drawn:
                    best_BFR = draw_different(probs_BFV, max(ranks) + 1)
                    drawn_from |= {drafted.read[slot]: probs_BFV[:, slot] for slot in slots}
                slots_C, ranks_C = torch.tensor([slots, ranks], device=best_BFR.device)
                tokens.append(best_BFR[:, slots_C, ranks_C])
                log_probs.append(probs_BFV.gather(2, best_BFR)[:, slots_C, ranks_C].log())
                paths_BCJ = torch.cat([paths_BFJ[:, slots_C], tokens[-1][..., None]], dim=2)
                places = drafted.read_on()
                paths_BFJ = paths_BCJ[:, places]
            else:
                places = []
            seconds = time.perf_counter() - started
            self._clock.learn(len(state.rows) * text.fed, seconds, max(text.lengths))
        tree = TreeShape(drafted.paths[1:]).tree(
            torch.cat(tokens, dim=1), torch.cat(log_probs, dim=1)
        )
        drafted.tokens_BN = tree.tokens_BN
        return replace(tree, drawn_from=drawn_from)

    def learn(self, state: DecodingState) -> None:
        """Compare what was drafted last with what was committed since."""
        last: DraftedTree | None = state.memories.pop((self, "last"), None)
        if last is not None:
            last.learn()

    def _sureness(self, probs_BFV: Tensor, drawn: bool) -> tuple[Tensor, Tensor]:
        """What is known of each node's first, second, .. token before it is drafted [B, F, R], and
        the likeliest ones [B, F, R].

        Of one that will be drawn, how likely the likeliest is; of one that is chosen, how likely it
        is itself where those before it were wrong.
        """
        best = probs_BFV.topk(self._ranks, dim=-1)
        if drawn:  # of fewer tokens that can be, no others are drawn
            likeliest_BFR = best.values[..., :1].expand(-1, -1, self._ranks)
            return likeliest_BFR.where(best.values > 0, -1.0), best.indices
        before_BFR = best.values.cumsum(dim=-1) - best.values
        return best.values / (1 - before_BFR).clamp_min(1e-6), best.indices
