"""Where decoding stands, on the device: what changes from step to step is the content of tensors.

Shapes: B rows, N tree nodes, C capacity of the cache in slots, A = one more than the levels of a
tree, X columns of hidden states, E tokens that end a row.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from medusa_heads.inference.acceptance.at_once import DeepestPath, ProcessorsOnDevice, kinds
from medusa_heads.inference.acceptance.base import ignored, is_penalty
from medusa_heads.inference.engine.noise import NO_TOKEN, NoiseOnDevice
from medusa_heads.inference.engine.rows import Ends
from medusa_heads.inference.engine.state import DecodingState, padded_mask
from medusa_heads.target.attention import TreeMask
from medusa_heads.target.graphs.compiled import CompiledTarget
from medusa_heads.target.graphs.static_cache import StaticRecurrentCache, StaticRowCache
from medusa_heads.trees.tree import TokenTree

if TYPE_CHECKING:  # which read the state
    from medusa_heads.inference.drafters.base import Drafter

# Of a state, what no step depends on, or by what stands beside it.
_OTHERS = {"cache", "_processors", "_seen_BV"}
ENDS = 8  # tokens that may end a row, in one graph


def fixed_zeros(device: torch.device, *shape: int, dtype: torch.dtype = torch.long) -> Tensor:
    """Zeros that lie where they are for good, as a graph knows them."""
    with torch.inference_mode(False):
        made = torch.zeros(shape, dtype=dtype, device=device)
    torch._dynamo.mark_static_address(made)
    return made


class DeviceState(DecodingState):
    """Rows of one batch size in one cache; made once, and then used for text after text, since a
    graph knows where its tensors lie.

    Args:
        like: the state of such a text, in a cache of fixed capacity.
        levels: how deep the trees are at most.
        nodes: of the largest tree.
    """

    cache: StaticRowCache
    fixed_shapes = True

    def __init__(self, like: DecodingState, levels: int, nodes: int, vocab_size: int) -> None:
        super().__init__([], like.cache, [])
        batch, device = len(like.rows), like.roots_B.device
        capacity = like.cache.fixed_capacity
        assert capacity is not None
        self._capacity, self._levels, self._vocab_size = capacity, levels, vocab_size
        numbers = partial(fixed_zeros, device)
        self.hidden_BD = numbers(*like.hidden_BD.shape, dtype=like.hidden_BD.dtype)
        self.roots_B, self.lengths_B, self.padding_B = (numbers(batch) for _ in range(3))
        self.last_B, self.keys_B = numbers(batch), numbers(batch)
        # New tokens of each row, those that may still come, and the tokens themselves; what stands
        # in the last column is of no row.
        self.written_B, self.room_B = numbers(batch), numbers(batch)
        self.out_BT = numbers(batch, capacity + 1)
        self.ends_E = numbers(ENDS)
        # What the last step committed: as many hidden states of each row, and the tokens behind;
        # beyond those, what earlier ones did.
        self.fresh_BPX = numbers(
            batch, levels + 1, like.hidden_BD.shape[1], dtype=like.hidden_BD.dtype
        )
        self.following_BP, self.fresh_B = numbers(batch, levels + 1), numbers(batch)
        # How many steps committed 1, 2, .. tokens; steps with any row.
        self.steps_A, self.forwards = numbers(levels + 1), numbers(1)
        # What the host reads, see `Figures`.
        self.figures = numbers(5 + levels + nodes, dtype=torch.float)
        tokens_V = numbers(vocab_size)
        tokens_V.copy_(torch.arange(vocab_size, device=device))
        self._noise = NoiseOnDevice(self.keys_B, self.written_B, tokens_V)
        self.noise_on_device: NoiseOnDevice | None = None
        self.processors: LogitsProcessorList
        self._processors: dict[tuple[Any, ...], ProcessorsOnDevice] = {}  # by their kinds
        # Which tokens are in each row's text, where a processor asks: V, and all ids beyond.
        self.seen_BV: Tensor | None = None
        self._seen_BV: Tensor | None = None
        del self.cache  # which lives as long as the target keeps it

    def begin(self, state: DecodingState, ends: Ends, processors: LogitsProcessorList) -> None:
        """Go on with this text, whose prompt has been read, by processors that look at tokens
        alone."""
        rows, device = state.rows, self.roots_B.device
        room = [0 if row.done else ends.max_length - row.length for row in rows]
        ending = [*ends.tokens, *[NO_TOKEN] * (ENDS - len(ends.tokens))]
        noise, last = state.noise, state.last_position
        assert last is not None
        for of_rows, values in (
            (self.lengths_B, state.lengths),
            (self.padding_B, state.padding),
            (self.last_B, [last - padding for padding in state.padding]),
            (self.keys_B, [0] * len(rows) if noise is None else noise.keys(rows)),
            (self.written_B, [len(row.tokens) for row in rows]),
            (self.room_B, room),
            (self.ends_E, ending),
        ):
            of_rows.copy_(torch.tensor(values, device=device))
        self.hidden_BD.copy_(state.hidden_BD)
        self.roots_B.copy_(state.roots_B)
        self.fresh_BPX.copy_(state.hidden_BD[:, None].expand_as(self.fresh_BPX))
        self.following_BP.copy_(state.roots_B[:, None].expand_as(self.following_BP))
        self.fresh_B.fill_(1)
        for heads, memory in state.memories.items():
            known = self.memories.get(heads)
            if known is None or known.beside < memory.beside:
                self.memories[heads] = memory.on_device(self._capacity)
            self.memories[heads].begin(memory)
            self.memories[heads].follow(self, 1)
        for of_steps in (self.steps_A, self.forwards, self.figures):
            of_steps.zero_()
        self.figures[0] = sum(map(bool, room))
        of_kinds = kinds(processors)
        if of_kinds not in self._processors:
            self._processors[of_kinds] = ProcessorsOnDevice(processors, device)
        self._processors[of_kinds].take(processors)
        self.processors = self._processors[of_kinds].copies
        self.seen_BV = (
            self._seen(state, processors) if self._processors[of_kinds].look_at_text else None
        )
        self.warpers = None if state.warpers is None else self.processors
        self.noise = self.noise_on_device = None if noise is None else self._noise
        assert isinstance(state.cache, StaticRowCache)
        self.cache = state.cache  # at last: whoever has begun lets go of it

    def _seen(self, state: DecodingState, processors: LogitsProcessorList) -> Tensor:
        if self._seen_BV is None:
            shape = len(self.roots_B), self._vocab_size + 1
            self._seen_BV = fixed_zeros(self.roots_B.device, *shape, dtype=torch.bool)
        (penalty,) = filter(is_penalty, processors)
        self._seen_BV.zero_()
        for seen_V, row in zip(self._seen_BV, state.rows, strict=True):
            ids_T = row.ids_1T()[0, ignored(penalty, row) :].clamp_max(self._vocab_size)
            seen_V.index_fill_(0, ids_T, True)
        return self._seen_BV

    @property
    def parts(self) -> list[Any]:
        """What a recorded step depends on of this state, and of its cache what lies there for good:
        how long a text is, it is not told by numbers."""
        cache = self.cache
        states = cache.states() if isinstance(cache, StaticRecurrentCache) else []
        own = [value for name, value in sorted(vars(self).items()) if name not in _OTHERS]
        return [*own, *states, *cache.row_buffers]

    @property
    def last_fresh_B1(self) -> Tensor:
        """Where the last of what the last step committed stands."""
        return (self.fresh_B[:, None] - 1).clamp_min(0)

    @property
    def held_B(self) -> Tensor:
        """Tokens of each row that the cache holds."""
        return self.lengths_B

    @property
    def again_B(self) -> Tensor:
        """Tokens that the target reads again in front of each row's next tree."""
        return torch.zeros_like(self.padding_B)  # which no step writes

    @property
    def most_B(self) -> Tensor:
        """Tokens that each row may commit in this step."""
        return self.room_B

    def tree_mask(self, tree: TokenTree) -> TreeMask:
        """See DecodingState; the cache's slots for the tree are set as well."""
        first, slots_N = self.held_B.amax(), self.cache.slots_N
        slots_N.copy_(first + torch.arange(tree.num_nodes, device=slots_N.device))
        slots_C = torch.arange(self._capacity, device=slots_N.device)
        valid_BC = (slots_C >= self.padding_B[:, None]) & (slots_C < self.held_B[:, None])
        positions_B1 = (self.held_B - self.padding_B)[:, None]
        return padded_mask(tree, valid_BC, positions_B1, self.last_B, first, self.padding_B)

    def width(self, nodes: int, again: int | None) -> int:
        """How many tokens of each row a step reads that verifies so many nodes; `again` as in
        Figures, if it is known."""
        return nodes

    def read(self, target: CompiledTarget, tree: TokenTree) -> tuple[Tensor, Tensor]:
        """Logits [B, N, V] of every node, and hidden states [B, N, X]."""
        return target.read_within(tree.tokens_BN, self.cache, self.tree_mask(tree))

    def take(
        self, path: DeepestPath, hidden_BNX: Tensor, expected_BN: Tensor | None = None
    ) -> None:
        """Commit each row's path, up to the token that ends the row or the last that it may have;
        keep the path's rows of the cache, and go on behind its last node. The figures tell of it,
        and of what was expected where 0, 1, 2, .. nodes are verified."""
        nodes_BA, tokens_BA, length_B1 = path
        most = nodes_BA.shape[1]  # of a small tree no more is kept, nor moved
        columns_A = torch.arange(most, device=nodes_BA.device)
        room_B1, written_B1 = self.room_B[:, None], self.written_B[:, None]
        ends_BA = (tokens_BA[..., None] == self.ends_E).any(dim=-1) | (tokens_BA == NO_TOKEN)
        open_BA = ends_BA.long().cumsum(dim=1) - ends_BA.long() == 0
        taken_BA = open_BA & (columns_A < length_B1.minimum(self.most_B[:, None]))
        count_B1 = taken_BA.sum(dim=1, keepdim=True)
        place_BA = (written_B1 + columns_A).where(taken_BA, self._capacity)
        # What is of no row is one number, or which of them stands there nobody could tell.
        self.out_BT.scatter_(1, place_BA, tokens_BA.where(taken_BA, NO_TOKEN))
        if self.seen_BV is not None:
            new_BA = tokens_BA.clamp_min(0).where(taken_BA, self.roots_B[:, None])
            self.seen_BV.scatter_(1, new_BA, True)
        self.steps_A[:most].add_((columns_A == count_B1 - 1).sum(dim=0))
        self.forwards.add_((count_B1 > 0).any())

        self._keep(nodes_BA, taken_BA)
        last_B1 = (count_B1 - 1).clamp_min(0)
        root_B1 = tokens_BA.gather(1, last_B1).clamp_min(0)  # one that could not be drawn is none
        node_B1X = nodes_BA.gather(1, last_B1)[..., None].expand(-1, -1, hidden_BNX.shape[2])
        moves_B1 = count_B1 > 0
        root_B1 = root_B1.where(moves_B1, self.roots_B[:, None])
        hidden_BX = hidden_BNX.gather(1, node_B1X)[:, 0]
        self.hidden_BD.copy_(hidden_BX.where(moves_B1, self.hidden_BD))
        nodes_BPX = nodes_BA[..., None].expand(-1, -1, hidden_BNX.shape[2])
        self.fresh_BPX[:, :most].copy_(hidden_BNX.gather(1, nodes_BPX))
        self.following_BP[:, :most].copy_(tokens_BA.clamp_min(0))
        left_B1 = (room_B1 - count_B1).where(~(ends_BA & taken_BA).any(1, True), 0)
        of_rows = {
            self.roots_B: root_B1,
            self.fresh_B: count_B1,
            self.room_B: left_B1,
            self.lengths_B: self.lengths_B[:, None] + count_B1,
            self.written_B: written_B1 + count_B1,
        }
        torch._foreach_copy_([*of_rows], [new_B1[:, 0] for new_B1 in of_rows.values()])
        moved_B = moves_B1[:, 0]
        counts = [(left_B1 > 0).sum(), moved_B.sum(), count_B1.sum(), self.again_B.amax()]
        told = [torch.cat([torch.stack(counts), tokens_BA[0]]).float()]
        if expected_BN is not None:
            own_BN = expected_BN.where(moves_B1, 0.0)
            told.append(own_BN.new_zeros(self._levels + 1 - most))
            told.append(own_BN.sum(dim=0) / moved_B.sum().clamp_min(1))
        told_F = torch.cat(told)
        self.figures[: len(told_F)] = told_F
        for memory in self.memories.values():
            memory.follow(self, most)

    def _keep(self, nodes_BA: Tensor, taken_BA: Tensor) -> None:
        """Of the tree just read, keep in the cache what is taken."""
        # What is not taken moves onto itself, into slots that are free.
        columns_A = torch.arange(nodes_BA.shape[1], device=nodes_BA.device)
        first, to_BA = self.lengths_B.amax(), self.lengths_B[:, None] + columns_A
        self.cache.move_rows((first + nodes_BA).where(taken_BA, to_BA), to_BA)

    def compared(self, target: CompiledTarget, drafter: Drafter) -> AbstractContextManager[None]:
        """For the block that is a compiled step. Raises UnsupportedArchitecture: it is one of the
        first of its graph, and leaves other states than the model's own forward."""
        return nullcontext()

    def is_compared(self, drafter: Drafter) -> bool:
        """Whether steps of this graph have been compared as often as they are."""
        return True

    def end(self) -> list[int]:
        """The text is over: how many tokens of each row the cache holds."""
        return self.held_B.tolist()

    def written(self) -> list[list[int]]:
        """All new tokens of each row."""
        counts: list[int] = self.written_B.tolist()
        texts: list[list[int]] = self.out_BT[:, : max(counts)].tolist()
        return [text[:count] for text, count in zip(texts, counts, strict=True)]
