"""Where decoding stands: the text of every row, and what the target holds of it.

Shapes: B active rows, T tokens, N tree nodes, S cache slots, A accepted nodes, D hidden.

Cache layout: row b's tokens lie in slots [padding_b, length_b), one slot a token, so that a slot's
position in its text is slot - padding_b. All rows write a tree at one common slot, the longest
row's length; accepted rows then move down to their own row's end. Rows so never grow holes,
however unequal their luck.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import LogitsProcessorList

from medusa_heads.inference.engine.noise import Noise
from medusa_heads.inference.engine.rows import Row
from medusa_heads.target.attention import TreeMask, additive, slots_from
from medusa_heads.target.cache import RowCache
from medusa_heads.target.positions import PositionRule
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.tree import TokenTree

# How the target's tokens come about: the likeliest are taken, or they are drawn, or drawn by keyed
# noise, which drafters know.
Drawing = Literal["greedy", "drawn", "keyed"]

if TYPE_CHECKING:  # which read the state
    from medusa_heads.inference.drafters.base import Drafter


class DecodingState:
    """The active rows, and what the target holds of them."""

    fixed_shapes = False  # whether a step is one graph, or is prepared to be

    def __init__(
        self,
        rows: list[Row],
        cache: RowCache,
        padding: Sequence[int],
        max_length: int | None = None,
        *,
        keeps_fresh: bool = False,
    ) -> None:
        self.rows = rows  # those still being decoded
        self.cache = cache  # the target's; holds every committed token but the last
        self.lengths = [row.length for row in rows]  # slots in use, by row
        self.padding = list(padding)  # slots of left padding, by row
        self.ahead = [0] * len(rows)  # positions of each before its tokens: an image may take fewer
        self.roots_B: Tensor  # the last committed token, the next tree's node 0
        self.hidden_BD: Tensor  # the target's hidden state that yielded it
        self.memories: dict[Any, Any] = {}  # what drafters keep between two steps, by their keys
        self.warpers: LogitsProcessorList | None = None  # of logits, where a token is drawn
        self.noise: Noise | None = None  # what decides the draws, where drafters may know it
        self.position_rule: PositionRule | None = None  # of a limit that the text may reach
        self.room: list[int] | None = None  # nodes that each row's next tree may have at most
        self._fresh: list[tuple[Tensor, list[list[int]]]] = []
        self._fresh_was_read, self._keeps_fresh = True, keeps_fresh
        # No node beyond the text's last position can be committed, and models that learn their
        # positions have none there: such nodes are verified at the last one.
        self.last_position = None if max_length is None else max_length - 1
        self._buffers: list[Tensor] | None = None  # of the masks of rows in step
        self._written = 0  # nodes of the last tree there

    def move_to(self, cache: RowCache) -> None:
        """Go on in this empty cache, of the same target."""
        self.cache.set_length(max(self.lengths))
        cache.take_over(self.cache)
        self.cache = cache

    @property
    def on_host(self) -> bool:
        """Whether the host may look at tensors between products, and waits for no device."""
        return not self.fixed_shapes and self.roots_B.device.type == "cpu"

    @property
    def drawing(self) -> Drawing:
        """How the target's tokens come about."""
        if self.warpers is None:
            return "greedy"
        return "drawn" if self.noise is None else "keyed"

    @property
    def is_read_again(self) -> bool:
        """Whether the target reads its one row's whole text anew before the next tree."""
        return self.position_rule is not None and self.position_rule.is_read_again(self.lengths)

    @property
    def again(self) -> int:
        """Tokens that the target reads besides the next trees, in front of them."""
        return 0

    def draft(self, drafter: Drafter) -> TokenTree | None:
        """The tree to verify next; None where the target has to read what is committed first."""
        return drafter.propose(self)

    def verify(self, target: TargetModel, tree: TokenTree) -> Tensor:
        """Logits [B, N, V] of every node, in one forward; `keep` says what becomes of them."""
        return target.verify(tree, self.cache, self.tree_mask(tree))

    def of_nodes(self, of_tokens: Tensor, num_nodes: int) -> Tensor:
        """Of what the last verification says of its last tokens [B, T, ..] what it says of so many
        nodes."""
        return of_tokens

    def tree_mask(self, tree: TokenTree) -> TreeMask:
        """What the tree's nodes see, once they are appended at the common slot."""
        past, device = max(self.lengths), tree.tokens_BN.device
        self.cache.set_length(past)
        capacity = self.cache.fixed_capacity
        moved = any(self.padding) or any(self.ahead)
        if capacity is None and min(self.lengths) == past and not moved:
            return self._mask_in_step(tree, past)
        # Made on the host: a transfer each, and not a kernel for each operation.
        padding_B1, lengths_B1 = np.array(self.padding)[:, None], np.array(self.lengths)[:, None]
        slots_S = np.arange(capacity or past + tree.num_nodes)
        valid_BS = torch.from_numpy((slots_S >= padding_B1) & (slots_S < lengths_B1)).to(device)
        # Where each row's positions begin: windows go by their differences, which stay the same.
        first_B1 = padding_B1 - np.array(self.ahead)[:, None]
        positions_B1 = torch.from_numpy(lengths_B1 - first_B1).to(device)
        first_B, last_B = torch.from_numpy(first_B1[:, 0]).to(device), None
        if self.last_position is not None:
            last_B = self.last_position - first_B
        return padded_mask(tree, valid_BS, positions_B1, last_B, past, first_B)

    def _mask_in_step(self, tree: TokenTree, past: int) -> TreeMask:
        """Of unpadded rows of one length."""
        (batch, nodes), device = tree.tokens_BN.shape, tree.tokens_BN.device
        visible, bias = self._buffers_for(batch, nodes, past + nodes, device)
        edge = visible.shape[2] - past - nodes
        if nodes > 1:
            visible[:, :, -nodes:] = tree.ancestors_BNN
            bias[:, :, -nodes:] = additive(tree.ancestors_BNN, bias.dtype)
        bias_BNS = bias[:, :, edge:]
        if device.type != "cpu":
            bias_BNS = bias_BNS.clone()  # GPU kernels want an aligned beginning
        positions_BN = tree.depth_BN + past
        if self.last_position is not None:
            positions_BN = positions_BN.clamp_max(self.last_position)
        return TreeMask(visible[:, :, edge:], positions_BN, past, bias_BNS=bias_BNS)

    def _buffers_for(self, batch: int, nodes: int, slots: int, device: Any) -> list[Tensor]:
        """One pair serves all steps, the tree's own block at its right edge: a longer text is a
        wider slice, and of the past only what the last tree covered is written again."""
        known, before = self._buffers, self._written
        rows = known[0].shape[1] if known and len(known[0]) == batch else 0
        if known is None or rows < nodes or known[0].shape[2] < slots:
            shape = (batch, rows if rows >= nodes else max(nodes, 2 * rows), 2 * slots)
            visible = torch.ones(shape, dtype=torch.bool, device=device)
            known = self._buffers = [visible, visible.new_zeros(shape, dtype=self.hidden_BD.dtype)]
        elif before != nodes:
            known[0][:, :before, -before:] = True
            known[1][:, :before, -before:] = 0.0
        self._written = nodes
        return [buffer[:, :nodes] for buffer in known]

    def forget(self) -> None:
        """Of the tree just verified nothing is kept, as if it had never been read."""

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Of the tree just verified, keep each row's accepted path (node 0 first)."""
        self.lengths = self.cache.keep_paths(paths, self.lengths)

    def advance(self, hidden_BND: Tensor, paths: Sequence[Sequence[int]]) -> None:
        """Take each path's last node as the new state, and let finished rows go."""
        device = hidden_BND.device
        # Rows that have ended and stay stand still: nobody reads what is made of them.
        nodes_B = [list(path) or [0] for path in paths]
        if hidden_BND.shape[1] == 1:
            accepted_BAD = hidden_BND
        else:
            # Shorter paths repeat their last node, so that the last column is every row's last.
            longest = max(map(len, nodes_B))
            nodes_BA = torch.tensor(
                [[*nodes, *nodes[-1:] * (longest - len(nodes))] for nodes in nodes_B], device=device
            )
            batch_B1 = torch.arange(len(paths), device=device)[:, None]
            # Taken out at once, or every tree that is not drafted from would stay in memory.
            accepted_BAD = hidden_BND[batch_B1, nodes_BA]
        # Only a drafter that reads the whole text will ask for what it was not asked to draft from.
        if self._fresh_was_read or not self._keeps_fresh:
            self._fresh.clear()
        self._fresh.append((accepted_BAD, [list(range(len(nodes))) for nodes in nodes_B]))
        self._fresh_was_read = False
        self.hidden_BD = accepted_BAD[:, -1].contiguous()
        self.roots_B = torch.tensor([row.tokens[-1] for row in self.rows], device=device)
        self.let_go()

    def let_go(self) -> None:
        """Finished rows leave with what is kept of them; of a fixed shape all at once, at last."""
        for i, row in enumerate(self.rows):
            if row.done and row.leaves is not None:
                leaves, row.leaves = row.leaves, None
                leaves(row, self.cache, i, self.lengths[i])
        active = [i for i, row in enumerate(self.rows) if not row.done]
        if active and self.cache.fixed_capacity is not None:
            return
        if active and len(active) < len(self.rows):
            self.cache.select_batch(active)
            self._fresh = [
                (hidden[active], [by_row[i] for i in active]) for hidden, by_row in self._fresh
            ]
            self.hidden_BD, self.roots_B = self.hidden_BD[active], self.roots_B[active]
            self.lengths = [self.lengths[i] for i in active]
            self.padding = [self.padding[i] for i in active]
            self.ahead = [self.ahead[i] for i in active]
        self.rows = [self.rows[i] for i in active]

    def join(self, other: DecodingState) -> None:
        """Take in the rows of another state, behind the own ones: of the same target and drafter,
        drawn in the same way, which have read their prompts and drafted nothing. Their indices
        change to such as no own row has."""
        assert self.drawing == other.drawing and not other.memories
        taken = {row.index for row in self.rows}
        free = (index for index in count() if index not in taken)
        for row, index in zip(other.rows, free, strict=False):
            if self.noise is not None and other.noise is not None:
                self.noise.take(index, other.noise, row.index)
            row.index = index
        self.cache.join(other.cache, other.lengths)
        if self._keeps_fresh:
            (mine_BAD, own), (theirs_BAD, new) = self._all_fresh(), other._all_fresh()
            longest = max(mine_BAD.shape[1], theirs_BAD.shape[1])
            filled = [pad(of, (0, 0, 0, longest - of.shape[1])) for of in (mine_BAD, theirs_BAD)]
            self._fresh = [(torch.cat(filled), own + new)]
        else:
            self._fresh = []
        self.hidden_BD = torch.cat([self.hidden_BD, other.hidden_BD])
        self.roots_B = torch.cat([self.roots_B, other.roots_B])
        self.rows = self.rows + other.rows
        self.lengths = self.lengths + other.lengths
        self.padding = self.padding + other.padding
        self.ahead = self.ahead + other.ahead
        self._buffers = None  # of a batch that may not come again
        self.position_rule = self.position_rule or other.position_rule
        if self.last_position is not None and other.last_position is not None:
            self.last_position = max(self.last_position, other.last_position)

    def take_prompt(self, hidden_BTD: Tensor) -> None:
        """Count the whole prompt as fresh: its hidden states, or those of its end."""
        if not self.rows:
            return
        end = hidden_BTD.shape[1]
        missing = self.rows[0].length - len(self.rows[0].tokens) - end
        starts = [max(padding - missing, 0) for padding in self.padding]
        batch = [row.index for row in self.rows]
        self._fresh = [(hidden_BTD[batch], [list(range(start, end)) for start in starts])]

    def fresh(self) -> tuple[Tensor, list[list[int]]]:
        """What was committed since this was last asked: the target's hidden states [B, A, D] of the
        accepted nodes, and each row's own among them, as many as tokens were committed."""
        self._fresh_was_read = True
        return self._all_fresh()

    def _all_fresh(self) -> tuple[Tensor, list[list[int]]]:
        if len(self._fresh) > 1:
            nodes_B: list[list[int]] = [[] for _ in self.rows]
            offset = 0
            for hidden_BAD, paths in self._fresh:
                for nodes, path in zip(nodes_B, paths, strict=True):
                    nodes += [offset + node for node in path]
                offset += hidden_BAD.shape[1]
            self._fresh = [(torch.cat([hidden for hidden, _ in self._fresh], dim=1), nodes_B)]
        return self._fresh[0]


def padded_mask(
    tree: TokenTree,
    valid_BS: Tensor,
    positions_B1: Tensor,
    last_B: Tensor | None,
    first: int | Tensor,
    padding_B: Tensor,
) -> TreeMask:
    """What the nodes of a tree see, which is written from slot `first` on.

    Args:
        valid_BS: slots that hold each row's own text.
        positions_B1: where the roots stand in their texts.
        last_B: the last position that a node of each row may have; None where nothing limits it.
        padding_B: slots before the first position.
    """
    visible_BNS = valid_BS[:, None].repeat(1, tree.num_nodes, 1)
    slots_N = slots_from(first, tree.num_nodes)
    if isinstance(slots_N, slice):
        visible_BNS[:, :, slots_N] = tree.ancestors_BNN
    else:  # of which a compiler makes one kernel with what is before
        visible_BNS = visible_BNS.index_copy(2, slots_N, tree.ancestors_BNN)
    positions_BN = positions_B1 + tree.depth_BN
    if last_B is not None:
        positions_BN = positions_BN.minimum(last_B[:, None])
    return TreeMask(visible_BNS, positions_BN, first, padding_B)
