"""What drafting with some of a target's layers costs on this machine, and how far it pays.

Shapes: B active rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch

from medusa_heads.inference.adapt.measure import (
    DEFAULT_CONTEXT,
    SIZES,
    RandomChain,
    room,
    step_seconds,
)
from medusa_heads.inference.drafters.early_exit import ThinnedTarget
from medusa_heads.inference.layer_stack import LayerStack
from medusa_heads.target import TargetModel
from medusa_heads.tree import TreeShape, cartesian_choices

if TYPE_CHECKING:
    from medusa_heads.inference.drafters.base import Drafter
    from medusa_heads.inference.state import DecodingState
    from medusa_heads.tree import TokenTree

_MEASURED = 3  # drafted tokens a step while measuring


@dataclass(frozen=True)
class ExitCosts:
    """Seconds.

    Attributes:
        draft: of one drafted token.
        verify: of a step by drafted tokens, 0 among them, without its drafting.
    """

    draft: float
    verify: Mapping[int, float]

    def of_verifying(self, tokens: int) -> float:
        """Seconds of a step with so many drafted tokens."""
        sizes = sorted(self.verify)
        above = min(bisect_left(sizes, tokens), len(sizes) - 1)
        if above == 0 or sizes[above] <= tokens:
            return self.verify[sizes[above]]
        low, high = sizes[above - 1], sizes[above]
        share = (tokens - low) / (high - low)
        return self.verify[low] + share * (self.verify[high] - self.verify[low])

    def speed(self, agreement: float) -> float:
        """Tokens per second of the best length, where each token agrees with this chance.

        Source: Leviathan et al. 2022, arXiv:2211.17192, equation 1 over measured costs.
        """
        return max(
            sum(agreement**i for i in range(size + 1))
            / (self.of_verifying(size) + size * self.draft)
            for size in range(max(self.verify) + 1)
        )

    def worth_another(self, chances: Sequence[Sequence[float]], mean: float) -> bool:
        """Whether one more token of every row's chain is expected to bring more than it costs.

        Args:
            chances: of every row, that the first 1, 2, .. tokens of its chain are right.
            mean: how often a token is right behind others that are.
        """
        length, rows = len(chances[0]), len(chances)
        if length >= max(self.verify):
            return False
        expected = sum(1.0 + sum(chain) for chain in chances) / rows
        gain = mean * sum(chain[-1] for chain in chances) / rows
        seconds = self.of_verifying(length) + length * self.draft
        longer = self.of_verifying(length + 1) + (length + 1) * self.draft
        return (expected + gain) / longer > expected / seconds


def exit_costs(
    target: TargetModel, stack: LayerStack, skipped: Collection[int], batch_size: int = 1
) -> ExitCosts:
    """Measured, or as measured before; of a number of layers, whichever they are."""
    sizes = [n for n in (0, *SIZES) if n < room(target)]
    drafters: dict[str, Drafter] = {f"chain:{n}": RandomChain(n, target.vocab_size) for n in sizes}
    # What a layer takes is the same for all of them: with the least and the most of them measured,
    # every set is known, and a search needs to measure nothing.
    few, all_of_them = range(1, len(stack)), range(0)
    drafters["few"] = _ThinnedChain(ThinnedTarget(target, stack, few))
    drafters["all"] = _ThinnedChain(ThinnedTarget(target, stack, all_of_them))
    seconds = step_seconds(target, drafters, {"kind": "early exit"}, DEFAULT_CONTEXT, batch_size)
    least, most = seconds["few"].drafting / _MEASURED, seconds["all"].drafting / _MEASURED
    share = (len(stack) - len(set(skipped)) - 1) / (len(stack) - 1)
    return ExitCosts(
        draft=least + share * max(most - least, 0.0),
        verify={n: seconds[f"chain:{n}"].step for n in sizes},
    )


class _ThinnedChain:
    """A chain of a fixed length."""

    reads_prompt = False

    def __init__(self, thinned: ThinnedTarget) -> None:
        self._thinned = thinned
        self._shape = TreeShape.from_choices(cartesian_choices([1] * _MEASURED))

    @property
    def num_nodes(self) -> int:
        """Nodes of every tree, the root included."""
        return self._shape.num_nodes

    def propose(self, state: DecodingState) -> TokenTree:
        """The same chain shape for every row."""
        with closing(self._thinned.continuation(state)) as continuation:
            drafted = [tokens for tokens, _ in islice(continuation, _MEASURED)]
        device = state.roots_B.device
        drafted_BN = torch.tensor(drafted, device=device).T
        return self._shape.tree(torch.cat([state.roots_B[:, None], drafted_BN], dim=1))
