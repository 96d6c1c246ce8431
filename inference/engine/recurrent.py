"""Where decoding stands on a target with a recurrent state, which cannot drop what it has read.

The states are held before a chain of drafts is read. Where all of it is accepted they stand as they
are. Else they are put back, and what was accepted is read again, in front of the next drafts and in
the same forward; so the state may stand behind fewer tokens than are committed. Where those become
many, one forward without drafts reads them for good, and commits a token of its own.

Shapes: B rows (one, for now), F tokens read again, N nodes of a chain, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from medusa_heads.inference.engine.rows import Row
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.target.cache import RowCache
from medusa_heads.target.recurrent import RecurrentCache, time_steps_of_one_token
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.tree import TokenTree

if TYPE_CHECKING:  # which read the state
    from medusa_heads.inference.drafters.base import Drafter


class RecurrentState(DecodingState):
    """A row, and what the target's states hold of it: its first `lengths[0]` tokens."""

    cache: RecurrentCache
    _most: int | None = None  # tokens that are read again in front of a tree

    def __init__(self, rows: list[Row], cache: RecurrentCache, *options: Any, **more: Any) -> None:
        super().__init__(rows, cache, *options, **more)
        cache.move_on()  # what an earlier text held is not where this one begins

    @property
    def again(self) -> list[int]:
        # What is committed and not in the states, but for the next tree's root.
        return self.rows[0].behind(self.lengths[0])[:-1]

    def draft(self, drafter: Drafter) -> TokenTree | None:
        if self._most is None:
            self._most = drafter.most_again
        if len(self.again) > self._most:
            drafter.rest(self)
            return None
        return drafter.propose(self).leading_chain()

    def verify(self, target: TargetModel, tree: TokenTree) -> Tensor:
        if tree.num_nodes > 1:
            self.cache.hold()
        fed = tree.behind(tree.tokens_BN.new_tensor([self.again]))
        self._nodes, self._end = tree.num_nodes, self.lengths[0] + fed.num_nodes
        with time_steps_of_one_token(target.model):
            mask = self.tree_mask(fed)
            return target.read(fed.tokens_BN, self.cache, mask, last=tree.num_nodes)

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Where every node is accepted the states stand behind them, else where they stood."""
        if len(paths[0]) == self._nodes:
            self.lengths = [self._end]
            self.cache.move_on()
            self.cache.set_length(self._end)
        else:
            self.forget()

    def forget(self) -> None:
        if self.cache.is_held:
            self.cache.put_back()
        self.cache.set_length(self.lengths[0])


def decoding_state(rows: list[Row], cache: RowCache, *options: Any, **more: Any) -> DecodingState:
    """Where these rows stand, of the kind that their cache asks for; options are of the class."""
    if isinstance(cache, RecurrentCache):
        return RecurrentState(rows, cache, *options, **more)
    return DecodingState(rows, cache, *options, **more)
