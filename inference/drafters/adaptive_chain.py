"""A draft model's chain that ends where the next token's expected gain is below its cost.

Shapes: B active rows, J tokens of a path behind the committed text, V vocabulary.
Source: the optimal length of Leviathan et al. 2022, arXiv:2211.17192, section 3.4, with acceptance
as it turns out to be and costs as they are measured, asked anew before every token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import mean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from medusa_heads.inference.capability import capability
from medusa_heads.inference.drafters.draft_trust import DraftTrust
from medusa_heads.inference.drafters.drafted_text import drafted_text
from medusa_heads.inference.drafters.drawing import draft_probs, draw_different
from medusa_heads.target import TargetModel
from medusa_heads.tree import TokenTree, TreeShape, cartesian_choices

if TYPE_CHECKING:
    from medusa_heads.inference.draft_costs import DraftCosts
    from medusa_heads.inference.row import Row
    from medusa_heads.inference.state import DecodingState


class AdaptiveChainDrafter:
    """Tokens drawn where the target's are drawn, under the same warpers; else the likeliest.

    A second is worth the tokens that this drafter commits in one on the whole. The next token is
    drafted where it, or it with those behind it, promises more tokens than its seconds are worth.
    What it promises is known from how sure the draft model is there, and how often it was right
    when it was so sure. Where not even the first token pays, the draft model rests, and is tried
    again ever more rarely.

    Whether a token is drafted is settled before it is drawn, and once drawn it is verified: to drop
    it for what it turned out to be would bend the law of the text.

    Args:
        draft: the draft model, frozen; its token ids are the target's.
        vocab_size: of the target.
        costs: what the parts of a step cost here.

    Raises:
        UnsupportedArchitecture: the draft model cannot go back on what it has read.
    """

    reads_prompt = False

    def __init__(self, draft: TargetModel, vocab_size: int, costs: DraftCosts) -> None:
        capability(draft)
        self._draft, self._vocab_size, self._costs = draft, vocab_size, costs
        chains = (cartesian_choices([1] * n) for n in range(costs.most + 1))
        self._shapes = [TreeShape(chain) for chain in chains]
        # Of tokens that were drawn, and of those that were chosen.
        self._trusts = {drawn: DraftTrust(costs) for drawn in (True, False)}

    @property
    def num_nodes(self) -> int:
        """The most nodes that a proposed tree has, the root included."""
        return self._costs.most + 1

    def propose(self, state: DecodingState) -> TokenTree:
        """A chain for every active row, all of one length."""
        self.learn(state)
        trust = self._trusts[state.warpers is not None]
        batch, device = len(state.rows), state.roots_B.device
        paths_BJ = state.roots_B[:, None][:, :0]
        chances = [1.0] * batch
        log_probs = [torch.zeros(batch, device=device)]
        sureness: list[list[float]] = []
        probs: list[Tensor] = []
        forwards = 0
        while len(probs) < self._costs.most and trust.worth_reading(len(probs), mean(chances)):
            next_BV = self._next(state, paths_BJ)
            forwards += 1
            sure = next_BV.amax(dim=-1).tolist()
            chances = [chance * trust.chance(s) for chance, s in zip(chances, sure, strict=True)]
            if not trust.worth_verifying(len(probs), mean(chances)):
                break
            if state.warpers is None:
                tokens_B1 = next_BV.argmax(dim=-1, keepdim=True)
            else:
                tokens_B1 = draw_different(next_BV, 1)
            paths_BJ = torch.cat([paths_BJ, tokens_B1], dim=1)
            log_probs.append(next_BV.gather(1, tokens_B1)[:, 0].log())
            sureness.append(sure)
            probs.append(next_BV)
        seconds = self._costs.seconds(len(probs), forwards)
        lengths = [row.length for row in state.rows]
        drafted = _Drafted(list(state.rows), lengths, paths_BJ.tolist(), sureness, seconds)
        state.memories[self, "last"] = drafted
        tokens_BN = torch.cat([state.roots_B[:, None], paths_BJ], dim=1)
        tree = self._shapes[len(probs)].tree(tokens_BN, torch.stack(log_probs, dim=1))
        drawn = state.warpers is not None
        return replace(tree, drawn_from=dict(enumerate(probs)) if drawn else {})

    def learn(self, state: DecodingState) -> None:
        """Compare what was drafted last with what was committed since. Before the next proposal
        this is done anyway; whoever lets another drafter propose in between does it before that."""
        last: _Drafted | None = state.memories.pop((self, "last"), None)
        if last is not None:
            last.teach(self._trusts[state.warpers is not None])

    def _next(self, state: DecodingState, paths_BJ: Tensor) -> Tensor:
        """The draft model's distribution [B, V] behind each row's path, after one more forward."""
        text, drafted = drafted_text(self._draft, state, self), paths_BJ.shape[1]
        if drafted:
            last_B1 = paths_BJ[:, -1:]
            logits_B1V = text.write(last_B1, torch.zeros_like(last_B1), drafted)
        else:
            logits_B1V = text.catch_up(state)[:, None]
        return draft_probs(
            logits_B1V.to(paths_BJ.device),
            paths_BJ[:, None],
            state.rows,
            state.warpers,
            self._vocab_size,
        )[:, 0]


@dataclass(frozen=True)
class _Drafted:
    """One step's chains, by row.

    Attributes:
        rows: those drafted for.
        lengths: of their texts by then.
        tokens: drafted, by row and depth.
        sureness: of the draft model, by depth and row.
        seconds: what the step takes by the measured costs.
    """

    rows: list[Row]
    lengths: list[int]
    tokens: list[list[int]]
    sureness: list[list[float]]
    seconds: float

    def teach(self, trust: DraftTrust) -> None:
        """Compare with what was committed since."""
        for b, (row, length) in enumerate(zip(self.rows, self.lengths, strict=True)):
            trust.learn(self.tokens[b], [sure[b] for sure in self.sureness], row.behind(length))
        gained = [row.length - before for row, before in zip(self.rows, self.lengths, strict=True)]
        trust.learn_step(mean(gained), self.seconds)
