"""Where decoding stands on a target with a recurrent state, which cannot drop what it has read.

The states are held before chains of drafts are read. Where all of a row's chain is accepted its
states stand as they are. Else they are put back, and what was accepted is read again, in front of
the next drafts and in the same forward; so the states may stand behind fewer tokens than are
committed. Where those become many, the row reads them without drafts, for good, and commits a token
of its own.

A forward reads equally many tokens of every row. Those who have fewer are filled up behind their
drafts, where nothing of theirs looks, and their states are put back, which have read what fills
them up. So no row needs padding within its text, and none waits for the others: while one of them
reads without drafts, the others draft as much as there is room for.

Shapes: B rows, F tokens read in front of a root, N nodes of chains, T tokens of a forward, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medusa_heads.inference.engine.rows import Row
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.target.cache import RowCache
from medusa_heads.target.recurrent import RecurrentCache
from medusa_heads.target.scans import time_steps_of_one_token
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.tree import TokenTree, chain_shape

if TYPE_CHECKING:  # which read the state
    from medusa_heads.inference.drafters.base import Drafter


class RecurrentState(DecodingState):
    """The rows, and what the target's states hold of each: its first `lengths[b]` tokens."""

    cache: RecurrentCache

    def __init__(self, rows: list[Row], cache: RecurrentCache, *options: Any, **more: Any) -> None:
        super().__init__(rows, cache, *options, **more)
        cache.move_on()  # what an earlier text held is not where this one begins
        self._most: dict[int, int] = {}  # tokens read again in front of trees, by rows
        self._sizes: list[int] = []  # tokens of a row in a forward, where shapes are fixed
        self._tokens = 0  # of each row in the last forward
        self._roots: list[int] = []  # where the roots stood there, counted from its end

    def _front(self) -> list[list[int]]:
        """What is committed and not in the states, by row, but for the next tree's root."""
        each = zip(self.rows, self.lengths, strict=True)
        return [[] if row.done else row.behind(length)[:-1] for row, length in each]

    @property
    def again(self) -> int:
        return len(self.rows) * max(map(len, self._front()))

    def draft(self, drafter: Drafter) -> TokenTree | None:
        lengths, batch = [len(tokens) for tokens in self._front()], len(self.rows)
        longest = max(lengths)
        if batch not in self._most:
            self._most[batch] = drafter.most_again(batch)
        self.room, most = None, longest + 1 if longest > self._most[batch] else None
        if self.cache.fixed_capacity is not None:
            self._sizes = self._sizes or graph_sizes(drafter, batch)
            # A text that was begun without a graph may have more to read once.
            most = max(self._sizes[-1], longest + 1)
        if most is not None and longest + drafter.num_nodes > most:
            self.room = [most - length for length in lengths]
            if max(self.room) == 1:
                drafter.rest(self)
                return None
        return drafter.propose(self).leading_chains(self.room)

    def verify(self, target: TargetModel, tree: TokenTree) -> Tensor:
        front = self._front()
        longest, shortest = max(map(len, front)), min(map(len, front))
        each = zip(front, tree.chain_lengths(), strict=True)
        self._tokens = max(len(ids) + nodes for ids, nodes in each)
        self._tokens = next((size for size in self._sizes if size >= self._tokens), self._tokens)
        self._roots = [len(ids) - self._tokens for ids in front]
        # What is read without drafts is kept; of rows that have ended nothing is.
        if min(self._roots) < -1 or any(row.done for row in self.rows):
            self.cache.hold()
        front_BF = tree.tokens_BN.new_tensor([[0] * (longest - len(ids)) + ids for ids in front])
        starts = [longest - len(ids) for ids in front]
        fed_BT = _columns(torch.cat([front_BF, tree.tokens_BN], dim=1), starts, self._tokens)
        mask = self.tree_mask(chain_shape(self._tokens).tree(fed_BT))
        with time_steps_of_one_token(target.model):
            logits_BTV = target.read(fed_BT, self.cache, mask, last=self._tokens - shortest)
        return self.of_nodes(logits_BTV, tree.num_nodes)

    def of_nodes(self, of_tokens: Tensor, num_nodes: int) -> Tensor:
        width = of_tokens.shape[1]
        return _columns(of_tokens, [width + root for root in self._roots], num_nodes)

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Where all that was read of a row is accepted its states stand behind it, else where they
        stood."""
        each = zip(paths, self._roots, strict=True)
        refused = [b for b, (path, root) in enumerate(each) if len(path) < -root]
        if len(refused) == len(paths):
            self.forget()
            return
        if refused:
            self.cache.put_back(refused)
        self.cache.move_on()
        kept = [() if b in refused else range(self._tokens) for b in range(len(paths))]
        self.lengths = self.cache.keep_paths(kept, self.lengths)
        self.cache.set_length(max(self.lengths))

    def forget(self) -> None:
        if self.cache.is_held:
            self.cache.put_back()
        self.cache.set_length(max(self.lengths))


def graph_sizes(drafter: Drafter, rows: int) -> list[int]:
    """How many tokens of each of so many rows a compiled forward reads: a root alone, a tree, or
    one with as much in front of it as there ever is. Each is a graph of its own."""
    tree = drafter.num_nodes
    return sorted({1, tree, tree + drafter.most_again(rows)})


def _columns(of_tokens: Tensor, starts: Sequence[int], count: int) -> Tensor:
    """Of what each row [B, T, ..] has of its tokens so many, from its start on; behind the end the
    last one again."""
    start, width = starts[0], of_tokens.shape[1]
    if start + count <= width and min(starts) == max(starts):
        return of_tokens[:, start : start + count]
    starts_B1 = torch.tensor(starts, device=of_tokens.device)[:, None]
    columns_BN = starts_B1 + torch.arange(count, device=of_tokens.device)
    batch_B1 = torch.arange(len(starts), device=of_tokens.device)[:, None]
    return of_tokens[batch_B1, columns_BN.clamp_max(width - 1)]


def decoding_state(rows: list[Row], cache: RowCache, *options: Any, **more: Any) -> DecodingState:
    """Where these rows stand, of the kind that their cache asks for; options are of the class."""
    if isinstance(cache, RecurrentCache):
        return RecurrentState(rows, cache, *options, **more)
    return DecodingState(rows, cache, *options, **more)
