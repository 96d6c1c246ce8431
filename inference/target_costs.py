"""What verification alone costs here, for drafters whose own work is next to nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from medusa_heads.compiled import CompiledTarget
from medusa_heads.inference.step_costs import StepCosts
from medusa_heads.inference.step_seconds import DEFAULT_CONTEXT, SIZES, last_row, room, step_seconds
from medusa_heads.target import TargetModel
from medusa_heads.tree import TokenTree, TreeShape, cartesian_choices

if TYPE_CHECKING:
    from medusa_heads.inference.drafters.base import Drafter
    from medusa_heads.inference.state import DecodingState

_COMPILED_NODES = 15


def target_costs(target: TargetModel, batch_size: int = 1, beside: int = 0) -> StepCosts:
    """Measured seconds of steps that verify chains of each size, and draft them for nothing.

    Args:
        target: the target.
        batch_size: rows decoded together.
        beside: nodes that every step verifies besides.
    """
    if isinstance(target, CompiledTarget):
        return StepCosts({_COMPILED_NODES: 1.0}, fixed=True)  # every size would be another graph
    sizes = [n for n in (0, *SIZES) if n + beside < room(target)]
    chains: dict[str, Drafter] = {f"chain:{n}": RootChain(n + beside) for n in sizes}
    kind = {"kind": "root"} | ({"beside": beside} if beside else {})
    seconds = step_seconds(target, chains, kind, DEFAULT_CONTEXT, batch_size)
    measured = {n: seconds[f"chain:{n}"].step for n in sizes}
    return StepCosts(measured, waits=last_row(batch_size), learns=batch_size == 1)


class RootChain:
    """A chain of the last committed token, again and again: costs what any chain costs."""

    reads_prompt = False

    def __init__(self, num_drafted: int) -> None:
        self._shape = TreeShape.from_choices(cartesian_choices([1] * num_drafted))

    @property
    def num_nodes(self) -> int:
        """Nodes of every tree, the root included."""
        return self._shape.num_nodes

    def propose(self, state: DecodingState) -> TokenTree:
        """The same chain for every row."""
        return self._shape.tree(state.roots_B[:, None].repeat(1, self.num_nodes))
