"""Drafts of whichever of several draft models has turned out to be the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING

from medusa_heads.inference.drafters.adaptive_tree import AdaptiveTreeDrafter
from medusa_heads.inference.drafters.draft_choice import DraftChoice
from medusa_heads.inference.drafters.drafted_text import forwards, unread

if TYPE_CHECKING:
    from medusa_heads.inference.draft_costs import DraftCosts
    from medusa_heads.inference.drafters.base import Drafter
    from medusa_heads.inference.row import Row
    from medusa_heads.inference.state import DecodingState
    from medusa_heads.tree import TokenTree


class ChosenDraftDrafter:
    """Before every step one of several drafters is chosen, each with a draft model of its own.

    One that was left aside reads what it has missed when its turn comes; the choice counts that.

    Args:
        drafters: of one draft model each.
        costs: what the parts of a step cost with each, in the same order.

    Attributes:
        steps: that each of them has drafted for.
    """

    reads_prompt = False

    def __init__(self, drafters: Sequence[Drafter], costs: Sequence[DraftCosts]) -> None:
        assert len(drafters) == len(costs) > 1
        assert not any(drafter.reads_prompt for drafter in drafters)
        self._drafters, self._costs = list(drafters), list(costs)
        self.steps = [0] * len(self._drafters)
        # Where the target's tokens are drawn, another draft model may be the best.
        self._choices = {drawn: DraftChoice(costs) for drawn in (True, False)}

    @property
    def num_nodes(self) -> int:
        """The most nodes that a proposed tree has, the root included."""
        return max(drafter.num_nodes for drafter in self._drafters)

    def propose(self, state: DecodingState) -> TokenTree:
        """A tree of the chosen drafter for every active row."""
        choice = self._choices[state.warpers is not None]
        last: _Step | None = state.memories.pop((self, "last"), None)
        if last is None:
            choice.begin_text()
        else:
            last.teach(choice)
            drafter = self._drafters[last.which]
            if isinstance(drafter, AdaptiveTreeDrafter):
                drafter.learn(state)
        to_read = [unread(state, drafter) for drafter in self._drafters]
        active = [row for row in state.rows if not row.done]  # a compiled batch keeps the others
        which = choice.pick(to_read, mean(len(row.tokens) for row in active))
        self.steps[which] += 1
        drafter = self._drafters[which]
        forwards_before, beside_before = forwards(state, drafter)
        tree = drafter.propose(state)
        forwards_now, beside_now = forwards(state, drafter)
        state.memories[self, "last"] = _Step(
            which,
            active,
            [row.length for row in active],
            self._costs[which].seconds(
                tree.num_nodes - 1, forwards_now - forwards_before, beside_now - beside_before
            ),
        )
        return tree


@dataclass(frozen=True)
class _Step:
    """One step.

    Attributes:
        which: drafter it was.
        rows: those drafted for.
        lengths: of their texts by then.
        seconds: what it takes by the measured costs.
    """

    which: int
    rows: list[Row]
    lengths: list[int]
    seconds: float

    def teach(self, choice: DraftChoice) -> None:
        """Count what was committed since."""
        gained = [row.length - before for row, before in zip(self.rows, self.lengths, strict=True)]
        choice.learn(self.which, mean(gained), self.seconds)
