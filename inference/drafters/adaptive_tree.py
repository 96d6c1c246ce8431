"""A draft model's tree that grows as long as its next tokens gain more than they cost.

Shapes: B active rows, F nodes read at once, R ranks (a node's first, second, .. token), C tokens
drafted behind them, J tokens of a path behind the committed text, V vocabulary.
Source: the optimal length of Leviathan et al. 2022, arXiv:2211.17192, section 3.4, with acceptance
as it turns out to be and costs as they are measured, asked anew before every forward; of several
drawn tokens behind a node, Jeon et al. 2024, "Recursive speculative decoding", arXiv:2402.14160.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from medusa_heads.inference.capability import capability
from medusa_heads.inference.drafters.draft_trust import MOST_RANKS, DraftTrust
from medusa_heads.inference.drafters.drafted_text import drafted_text
from medusa_heads.inference.drafters.drafted_tree import DraftedTree
from medusa_heads.inference.drafters.drawing import draft_probs, draw_different
from medusa_heads.target import TargetModel
from medusa_heads.tree import TokenTree, TreeShape

if TYPE_CHECKING:
    from medusa_heads.inference.draft_costs import DraftCosts
    from medusa_heads.inference.state import DecodingState

_SEVERAL = 8  # larger trees have a multiple of so many nodes, where a node is cheap:
_CHEAP = 0.01  # of what a step of plain decoding takes


class AdaptiveTreeDrafter:
    """Tokens drawn where the target's are drawn, under the same warpers; else the likeliest.

    A second is worth the tokens that this drafter commits in one on the whole. Another level is
    drafted where it, or it with those behind it, promises more tokens than its seconds are worth,
    and of every level as many tokens as are worth their verification: one behind each node where
    that is dear, several where it is cheap. What they promise is known from how sure the draft
    model is there, and how often it was right when it was so sure. Where not even the first token
    pays, the draft model rests, and is tried again ever more rarely.

    Whether a token is drafted is settled before it is drawn, and once drawn it is verified: to drop
    it for what it turned out to be would bend the law of the text.

    Args:
        draft: the draft model, frozen; its token ids are the target's.
        vocab_size: of the target.
        costs: what the parts of a step cost here.
        chain_only: never more than one token behind another.

    Raises:
        UnsupportedArchitecture: the draft model cannot go back on what it has read.
    """

    reads_prompt = False

    def __init__(
        self, draft: TargetModel, vocab_size: int, costs: DraftCosts, *, chain_only: bool = False
    ) -> None:
        chain_only = capability(draft) == "chain" or chain_only
        self._draft, self._vocab_size, self._costs = draft, vocab_size, costs
        self._ranks = 1 if chain_only else min(MOST_RANKS, vocab_size)
        each = (costs.verification[-1] - costs.verification[0]) / max(costs.most, 1)
        self._spares = self._ranks > 1 and each <= _CHEAP * costs.verification[0]
        # Of tokens that were drawn, and of those that were chosen.
        self._trusts = {drawn: DraftTrust(costs, self._ranks) for drawn in (True, False)}

    @property
    def num_nodes(self) -> int:
        """The most nodes that a proposed tree has, the root included."""
        return self._verified(self._costs.most + 1)

    def propose(self, state: DecodingState) -> TokenTree:
        """A tree for every active row, all of one shape."""
        self.learn(state)
        drawn = state.warpers is not None
        trust = self._trusts[drawn]
        drafted = state.memories[self, "last"] = DraftedTree(state.rows)
        paths_BFJ = state.roots_B[:, None, None][..., :0]
        log_probs = [torch.zeros(state.roots_B[:, None].shape, device=state.roots_B.device)]
        tokens = [state.roots_B[:, None]]
        drawn_from: dict[int, Tensor] = {}
        while drafted.levels < self._costs.deepest and trust.worth_reading(
            drafted.levels, drafted.chance, nodes=drafted.num_drafted
        ):
            probs_BFV = self._next(state, paths_BFJ, drafted)
            sure_BFR, best_BFR = self._sureness(probs_BFV, drawn)
            slots, ranks = drafted.grow(trust, sure_BFR.tolist())
            if not slots:
                break
            if drawn:
                best_BFR = draw_different(probs_BFV, max(ranks) + 1)
                drawn_from |= {drafted.read[slot]: probs_BFV[:, slot] for slot in slots}
            slots_C, ranks_C = torch.tensor([slots, ranks], device=best_BFR.device)
            tokens.append(best_BFR[:, slots_C, ranks_C])
            log_probs.append(probs_BFV.gather(2, best_BFR)[:, slots_C, ranks_C].log())
            paths_BCJ = torch.cat([paths_BFJ[:, slots_C], tokens[-1][..., None]], dim=2)
            paths_BFJ = paths_BCJ[:, drafted.read_on(trust)]
        tree = TreeShape(drafted.paths[1:]).tree(
            torch.cat(tokens, dim=1), torch.cat(log_probs, dim=1)
        )
        drafted.tokens_BN = tree.tokens_BN
        tree = tree.with_spare(self._verified(tree.num_nodes))
        return replace(tree, drawn_from=drawn_from)

    def learn(self, state: DecodingState) -> None:
        """Compare what was drafted last with what was committed since. Before the next proposal
        this is done anyway; whoever lets another drafter propose in between does it before that."""
        last: DraftedTree | None = state.memories.pop((self, "last"), None)
        if last is not None:
            last.teach(self._trusts[state.warpers is not None], self._costs)

    def _verified(self, nodes: int) -> int:
        """Nodes that are verified, spare ones included. What a CPU has to prepare once for every
        number of them costs more than a few spare ones."""
        if nodes <= _SEVERAL or not self._spares:
            return nodes
        return -(-nodes // _SEVERAL) * _SEVERAL

    def _next(self, state: DecodingState, paths_BFJ: Tensor, drafted: DraftedTree) -> Tensor:
        """The draft model's distributions [B, F, V] behind these nodes, after one more forward."""
        text = drafted_text(self._draft, state, self)
        if drafted.levels:
            above_F = torch.tensor(drafted.read_below, device=paths_BFJ.device)
            above_BF = above_F.expand(len(state.rows), -1)
            logits_BFV = text.write(paths_BFJ[..., -1], above_BF, drafted.levels)
        else:
            logits_BFV = text.catch_up(state)[:, None]
        logits_BFV = logits_BFV.to(paths_BFJ.device)
        return draft_probs(logits_BFV, paths_BFJ, state.rows, state.warpers, self._vocab_size)

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
