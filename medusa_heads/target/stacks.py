"""Buffers of many layers in few tensors, which grow together.

Buffers of one shape lie in stacked tensors, so that moving rows is one gather and one scatter, or
one kernel on a GPU, for many layers at once. They grow by half, up to the length that was
announced. A large cache has several stacks, which grow one after the other: the copy of one is all
that growing holds beside it.

Shapes: G stacked buffers (keys and values of several layers), B batch, H key-value heads, C
capacity in slots, A rows to move, T tokens, X head dimension.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from medusa_heads.machine.kernels import Tried, operator, triton_operator

_INITIAL_SLACK = 256  # slots beyond the prompt before the first growth
_STACK_BYTES = 1 << 28  # of a stack as it is made, or an eighth of all layers where that is more
_FEWEST_STACKS = 8  # of a large cache

Member = tuple[int, int]  # a stack, and the place in it


def held_at_most(prompt: int, announced: int, slot_bytes: int) -> int:
    """Bytes of the buffers of a text of at most so many tokens, while they grow behind its prompt
    too."""
    whole = announced * slot_bytes
    if _near(prompt, announced):
        return whole
    stack = min(whole, max(_STACK_BYTES, whole // _FEWEST_STACKS))
    return whole + stack * 2 // 3  # what grows by half, before it has


def _near(first: int, announced: int) -> bool:
    """Whether all is taken at once, since it is not much more: a text need not become as long as
    it may."""
    return first <= announced <= 2 * (first + _INITIAL_SLACK)


def put_rows(buffer: Tensor, dim: int, places_A: Tensor, rows: Tensor) -> None:
    """Write rows of X numbers to these places of an earlier dimension, as index_copy_ does."""
    if buffer.is_cuda:
        _put_wide(buffer, dim, places_A, rows)
    else:
        buffer.index_copy_(dim, places_A, rows)


def _wide(buffer: Tensor, dim: int, places_A: Tensor, rows: Tensor) -> None:
    # A GPU writes number by number: four of 16 bits are written as one of 64.
    whole = buffer.shape[-1] * buffer.element_size() % 8 == 0
    if whole and rows.dtype == buffer.dtype:
        buffer, rows = buffer.view(torch.int64), rows.contiguous().view(torch.int64)
    buffer.index_copy_(dim, places_A, rows)


# One operation to those who watch: they compare what is written as the numbers that they are.
_put_wide: Any = operator(
    "put_rows(Tensor(a!) buffer, int dim, Tensor places, Tensor rows) -> ()",
    _wide,
    lambda *_: None,
    ("CPU", "CUDA"),
)


_move_rows: Any = triton_operator(
    "move_rows(Tensor(a!) stack, Tensor source, Tensor destination) -> ()",
    "target.triton_rows.move_rows",
    lambda *_: None,
)


def _agree(device: torch.device) -> bool:
    """Whether the kernel moves rows as torch does."""
    stack = torch.arange(2 * 2 * 3 * 6 * 4, device=device).view(2, 2, 3, 6, 4)
    source_BA = torch.tensor([[2, 4, 3], [1, 5, 3]], device=device)
    destination_BA = torch.tensor([[1, 2, 3], [0, 1, 3]], device=device)
    expected = stack.clone()
    _move_gathered(expected, source_BA, destination_BA)
    _move_rows(stack, source_BA, destination_BA)
    if not torch.equal(stack, expected):
        raise ArithmeticError("a kernel of this package does not move rows as torch does")
    return True


_tried = Tried(_agree, "rows of caches are moved by torch's own kernels")


def _move_gathered(stack: Tensor, source_BA: Tensor, destination_BA: Tensor) -> None:
    if source_BA.shape[0] == 1:
        # One row: plain index operations are several times faster than a scatter.
        rows = stack.index_select(3, source_BA[0])
        put_rows(stack, 3, destination_BA[0], rows)
    else:
        # Whole rows of X numbers by their place in the flattened stack: gather and scatter would
        # read an index for every number, and took 300 times as long on a CPU.
        groups, batch, heads, capacity, width = stack.shape
        first = torch.arange(groups * batch * heads, device=stack.device) * capacity
        first_GBH1 = first.view(groups, batch, heads, 1)
        source, place = (
            (first_GBH1 + slots_BA[:, None]).flatten() for slots_BA in (source_BA, destination_BA)
        )
        rows = stack.view(-1, width)
        put_rows(rows, 0, place, rows.index_select(0, source))


class Stacks:
    """The stacked buffers."""

    def __init__(self) -> None:
        self.stacks: list[Tensor] = []  # each [G, B, H, C, X]
        self.expected_layers = 0  # how many will be added
        self.capacity = 0  # C
        self.announced = 0  # slots that will be asked for at most, 0 if nobody knows
        self._signatures: list[tuple[Any, ...]] = []
        self._used: Counter[int] = Counter()
        self._layers_added = 0

    def buffer(self, member: Member) -> Tensor:
        stack, place = member
        return self.stacks[stack][place]

    @torch.inference_mode(False)  # whoever comes first, all may write to it
    def add(self, *new: Tensor) -> list[Member]:
        """Places for one more layer: for its keys and its values, or for both at once. A new stack
        has room for layers still to come, since in most models they are alike; what stays unused is
        given back behind the last one."""
        alike = len({_signature(tensor) for tensor in new}) == 1
        found = [self.add_beside(tensor, len(new) if alike else 1) for tensor in new]
        self._layers_added += 1
        if self._layers_added == self.expected_layers:
            for stack, used in self._used.items():
                if used < self.stacks[stack].shape[0]:
                    self.stacks[stack] = self.stacks[stack][:used].clone()
        return found

    @torch.inference_mode(False)
    def add_beside(self, like: Tensor, a_layer: int = 1) -> Member:
        """A place for something else that a layer keeps of every token; of its kind, so many are
        kept in a layer."""
        first = like.shape[-2]
        usual = self.announced if _near(first, self.announced) else first + _INITIAL_SLACK
        self.capacity = self.capacity or usual
        remaining = max(self.expected_layers - self._layers_added, 1)
        return self._place(like, remaining * a_layer)

    def _place(self, like: Tensor, room: int) -> Member:
        signature = _signature(like)
        for stack, known in enumerate(self._signatures):
            if known == signature and self._used[stack] < self.stacks[stack].shape[0]:
                break
        else:
            stack = len(self.stacks)
            batch, heads, _, width = like.shape
            buffer_bytes = batch * heads * self.capacity * width * like.element_size()
            share = -(-2 * self.expected_layers // _FEWEST_STACKS)
            room = max(1, min(room, max(share, _STACK_BYTES // buffer_bytes)))
            self.stacks.append(like.new_zeros(room, batch, heads, self.capacity, width))
            self._signatures.append(signature)
        place = self._used[stack]
        self._used[stack] += 1
        return stack, place

    @torch.inference_mode(False)  # a cache outlives the loop that lets it grow
    def reserve(self, slots: int) -> None:
        """Make room, if only for more than there is."""
        grown = max(slots, self.capacity + self.capacity // 2)
        if slots <= self.announced:
            grown = min(grown, self.announced)
        for i in range(len(self.stacks)):  # by index: each is let go before the next is copied
            used = self.stacks[i]
            slots = used.shape[3]  # more than the capacity where growing broke off before
            if slots < grown:
                longer = used.new_empty(*used.shape[:3], grown, used.shape[4])
                longer[:, :, :, :slots] = used
                longer[:, :, :, slots:] = 0
                self.stacks[i] = longer
                del longer
            del used
        self.capacity = grown

    def move_rows(self, source_BA: Tensor, destination_BA: Tensor) -> None:
        for stack in self.stacks:
            given = source_BA.to(stack.device), destination_BA.to(stack.device)
            whole = stack.shape[-1] * stack.element_size() % 8 == 0
            if whole and _tried.serve(stack.device):
                _move_rows(stack, *given)
            else:
                _move_gathered(stack, *given)

    @torch.inference_mode(False)
    def select_batch(self, rows: Sequence[int]) -> None:
        for i in range(len(self.stacks)):  # by index: each is let go before the next is copied
            index = torch.tensor(list(rows), dtype=torch.long, device=self.stacks[i].device)
            self.stacks[i] = self.stacks[i].index_select(1, index)

    @torch.inference_mode(False)
    def join(self, other: Stacks, members: Sequence[tuple[Member, Member]], slots: int) -> None:
        """Take in all rows of other stacks, so many slots of them, behind the own ones; `members`
        pairs each own buffer with the other's."""
        if slots > self.capacity:
            self.reserve(slots)
        for i in range(len(self.stacks)):  # by index: each is let go before the next is copied
            used = self.stacks[i]
            groups, batch, heads, capacity, width = used.shape
            pairs = [(mine[1], other.buffer(theirs)) for mine, theirs in members if mine[0] == i]
            more = pairs[0][1].shape[0]
            longer = used.new_zeros(groups, batch + more, heads, capacity, width)
            longer[:, :batch] = used
            for place, theirs_BHCX in pairs:
                longer[place, batch:, :, :slots] = theirs_BHCX[:, :, :slots]
            self.stacks[i] = longer
            del used, longer

    @torch.inference_mode(False)
    def cut(self, slots: int) -> None:
        """Give back what lies behind so many slots."""
        for i in range(len(self.stacks)):
            self.stacks[i] = self.stacks[i][:, :, :, :slots].clone()
        self.capacity = min(self.capacity, slots)


def _signature(tensor: Tensor) -> tuple[Any, ...]:
    batch, heads, _, width = tensor.shape
    return batch, heads, width, tensor.dtype, tensor.device
