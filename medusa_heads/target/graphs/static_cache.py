"""Caches of fixed capacity, whose content alone changes from step to step; and what a forward over
them is given.

Shapes: B batch, N tokens of a forward, C or S capacity in slots, H key-value heads, X head
dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.target.attention import TreeMask, mask_of
from medusa_heads.target.cache import IndexedRowLayer, RowCache, RowLayer
from medusa_heads.target.positions import TEXT_SLOTS
from medusa_heads.target.recurrent import CompressedRowLayer, RecurrentCache, StateAndRowLayer
from medusa_heads.target.stacks import Member, Stacks, put_rows

if TYPE_CHECKING:
    from medusa_heads.target.target import TargetModel

_ROWS_OF = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
_WITHOUT_ROWS = {"linear_attention", "conv", "moe", "mlp"}


class StaticStacks(Stacks):
    """A buffer [B, H, C, X] for the keys and one for the values of each layer, which never grow.

    Attributes:
        nodes_N: where the nodes of the tree being verified are written; None outside of that.
        seen: so many slots, the first ones, are attended to by then; None for all.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.nodes_N: Tensor | None = None
        self.seen: int | None = None

    def buffer(self, member: Member) -> Tensor:
        return self.stacks[member[0]]

    def _place(self, like: Tensor, room: int) -> Member:
        batch, heads, _, width = like.shape
        with torch.inference_mode(False):  # whoever comes first, all may write to it
            self.stacks.append(like.new_zeros(batch, heads, self.capacity, width))
        # CUDA graphs then read and write it where it lies.
        torch._dynamo.mark_static_address(self.stacks[-1])
        return len(self.stacks) - 1, 0

    def reserve(self, slots: int) -> None:
        raise AssertionError("no text is longer than was announced")

    def write(self, members: Sequence[Member], *new: Tensor) -> None:
        """What a layer keeps of the nodes of the tree, [B, H, N, X] each."""
        assert self.nodes_N is not None
        for member, each_BHNX in zip(members, new, strict=False):  # values may be the keys
            self.buffer(member).index_copy_(2, self.nodes_N, each_BHNX)

    def move_rows(self, source_BA: Tensor, destination_BA: Tensor) -> None:
        rows_B1 = torch.arange(len(source_BA), device=source_BA.device)[:, None]
        for buffer_BHCX in self.stacks:
            buffer_BHCX[rows_B1, :, destination_BA] = buffer_BHCX[rows_B1, :, source_BA]

    def select_batch(self, rows: Sequence[int]) -> None:
        raise AssertionError("rows stay: another batch size would be another graph")


class StackedStaticStacks(StaticStacks):
    """The same of many layers in few tensors, whose rows move at once. For recordings: a compiler's
    graph that writes to one layer might copy all of them."""

    buffer = Stacks.buffer
    move_rows = Stacks.move_rows

    def write(self, members: Sequence[Member], *new: Tensor) -> None:
        """At once where keys and values lie side by side: a kernel less for each layer."""
        (stack, place), last = members[0], members[-1]
        if last != (stack, place + 1):
            return super().write(members, *new)
        assert self.nodes_N is not None
        both_2BHCX = self.stacks[stack][place : place + 2]
        put_rows(both_2BHCX, 3, self.nodes_N, torch.stack(new))

    def _place(self, like: Tensor, room: int) -> Member:
        return Stacks._place(self, like, room)


class StaticRowLayer(RowLayer):
    """One layer's keys and values, in buffers that never grow."""

    is_compileable = True
    _stacks: StaticStacks

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write rows in place. A tree's forward gets whole buffers, or as much of them as it is
        said to see; a prefill what is in use."""
        nodes_N = self._stacks.nodes_N
        if nodes_N is None:
            return super().update(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._stacks.write(self._members, key_states, value_states)
        keys_BHCX, values_BHCX = self.buffers()
        if (seen := self._stacks.seen) is None:
            return keys_BHCX, values_BHCX
        return keys_BHCX[:, :, :seen], values_BHCX[:, :, :seen]

    def get_seq_length(self) -> int:
        # A length that changes would be compiled into the graph: positions are explicit there.
        return self.length if self._stacks.nodes_N is None else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self._stacks.nodes_N is not None:
            return self._stacks.seen or self._stacks.capacity, 0
        return self.length + query_length, 0


class StaticRowCache(RowCache):
    """A RowCache of so many slots for every row, and no more; `stacked` for recordings."""

    layer_kind = StaticRowLayer
    _stacks: StaticStacks

    def __init__(self, config: Any, capacity: int, stacked: bool = False) -> None:
        kind = StackedStaticStacks if stacked else StaticStacks
        super().__init__(config, stacks=kind(capacity))
        self.fixed_capacity = capacity
        # One buffer for each size of tree, for good: graphs know where it lies.
        self._nodes: dict[int, Tensor] = {}

    def reset(self) -> None:
        """Empty it, of what is no number too: that would get into what attends to all slots."""
        super().reset()
        for stack in self._stacks.stacks:
            stack.zero_()

    @property
    def row_buffers(self) -> list[Tensor]:
        """Keys and values of all layers, as long as there is room for."""
        ready = [layer for layer in self.row_layers if layer.is_initialized]
        return [buffer for layer in ready for buffer in layer.buffers()]

    @property
    def slots_N(self) -> Tensor:
        """Within `tree_slots`, where the nodes are written."""
        assert self._stacks.nodes_N is not None
        return self._stacks.nodes_N

    @contextmanager
    def tree_slots(
        self, first: int | None, nodes: int, device: torch.device, seen: int | None = None
    ) -> Iterator[None]:
        """Within the block, forwards write `nodes` rows, from slot `first` on, or where `slots_N`
        comes to say; and attend to the first `seen` slots, or to all."""
        if nodes not in self._nodes:
            with torch.inference_mode(False):
                self._nodes[nodes] = torch.empty(nodes, dtype=torch.long, device=device)
            torch._dynamo.mark_static_address(self._nodes[nodes])
        try:
            self._stacks.nodes_N, self._stacks.seen = self._nodes[nodes], seen
            if first is not None:
                torch.arange(first, first + nodes, out=self._stacks.nodes_N, device=device)
            yield
        finally:
            self._stacks.nodes_N = self._stacks.seen = None

    @contextmanager
    def written_at(self, slots_N: Tensor) -> Iterator[None]:
        """Within the block, as a part of a graph, forwards write these slots."""
        self._stacks.nodes_N = slots_N
        yield
        self._stacks.nodes_N = None

    def copy_rows(self, cache: RowCache, length: int) -> None:
        """The first rows of another cache of this model, into the same slots of this one."""
        for own, other in zip(self.row_layers, cache.row_layers, strict=True):
            if not other.is_initialized:  # such as what would attend to a picture
                continue
            if not own.is_initialized:
                own.lazy_initialization(*other.buffers())
            for to_BHCX, from_BHCX in zip(own.buffers(), other.buffers(), strict=True):
                to_BHCX[:, :, :length] = from_BHCX[:, :, :length]

    def handed_out(self, config: Any) -> RowCache:
        """A copy of the rows in use: this cache serves the next text."""
        copy = (RowCache if self.can_go_back else RecurrentCache)(config)
        copy.take_over(self)
        return copy


class StaticStateAndRowLayer(StateAndRowLayer, StaticRowLayer):  # type: ignore[misc, override]
    """One layer's states, and its keys and values, in buffers that never grow."""

    is_compileable = True


class StaticRecurrentCache(RecurrentCache, StaticRowCache):
    """A RecurrentCache of so many slots for every row, and no more."""

    state_and_row_kind = StaticStateAndRowLayer

    @property
    def held_bytes(self) -> int:
        """What rows and states take."""
        return super().held_bytes + sum(state.nbytes for state in (*self.states(), *self._held))

    @property
    def held(self) -> list[Tensor]:
        """The states as they were held."""
        return self._held

    def settled(self, kept_B: Tensor) -> list[Tensor]:
        """The states as they are of the rows that are kept, as they were held of the others."""
        return [
            state.where(kept_B.view(-1, *[1] * (state.ndim - 1)), held)
            for state, held in zip(self.states(), self._held, strict=True)
        ]

    def settle(self, kept_B: Tensor) -> None:
        """As a part of a graph: the states are these from now on, and held as such."""
        settled = self.settled(kept_B)
        for state, held, each in zip(self.states(), self._held, settled, strict=True):
            held.copy_(each)
            state.copy_(each)

    def make_layer(self, layer: Any) -> Any:
        made = super().make_layer(layer)
        if isinstance(made, (CompressedRowLayer, IndexedRowLayer)):
            raise UnsupportedArchitecture(
                f"{self._model_type} keeps an index or compressed tokens, which grow with the text",
                "leave compile out",
            )
        return made


def explicit_inputs(
    target: TargetModel, tokens_BN: Tensor, cache: StaticRowCache, mask: TreeMask
) -> dict[str, Any]:
    """What a model's forward is given, so that nothing in it hangs on how long texts are."""
    return {
        "input_ids": tokens_BN.contiguous(),
        "position_ids": mask.query_positions_BN,
        "attention_mask": explicit_masks(target.config, mask, target.dtype),
        target.cache_argument: cache,
        "use_cache": True,
        **target.text_slots(mask),
    }


def given_to(inputs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a forward is given anew each time."""
    masks = inputs["attention_mask"]
    masks = masks.values() if isinstance(masks, dict) else [masks]
    distinct = {id(each): each for each in (*masks, inputs.get(TEXT_SLOTS)) if each is not None}
    return [inputs["input_ids"], inputs["position_ids"], *distinct.values()]


def explicit_masks(config: Any, tree: TreeMask, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """The masks that the model would build from this tree, to be passed as its attention_mask: one
    tensor [B, 1, N, S], or one for each kind of layer. Raises UnsupportedArchitecture: a kind of
    layer whose rule is not known here."""
    from transformers.masking_utils import (
        causal_mask_function,
        chunked_causal_mask_function,
        sliding_window_causal_mask_function,
    )

    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    usual = "sliding_attention" if window else "chunked_attention" if chunk else "full_attention"
    rules: dict[str, Callable[[], Any]] = {
        "full_attention": lambda: causal_mask_function,
        "sliding_attention": lambda: sliding_window_causal_mask_function(int(window or 0)),
        "chunked_attention": lambda: chunked_causal_mask_function(
            int(chunk or 0), torch.zeros_like(tree.query_positions_BN[:, 0])
        ),
    }
    masks: dict[str, Any] = {}
    kinds = set(getattr(config, "layer_types", None) or [usual])
    # A layer that keeps rows and a state takes the mask of its rows; one that keeps a state alone
    # takes what says of tokens that they are padding, which none of these is.
    with_rows = {_ROWS_OF.get(kind, kind) for kind in kinds} - _WITHOUT_ROWS
    for kind in with_rows:
        if kind not in rules:
            raise UnsupportedArchitecture(
                f"{config.model_type} has {kind} layers, whose mask is not known",
                "leave compile out",
            )
        masks[kind] = mask_of(rules[kind](), tree, dtype)
    if len(masks) > 1:
        return masks | dict.fromkeys(kinds & _WITHOUT_ROWS)
    return next(iter(masks.values()))
