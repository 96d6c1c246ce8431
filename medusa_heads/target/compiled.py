"""A target whose verification is compiled: fixed shapes, one graph, no recompilation as text grows.

Every forward of a tree sees the same number of nodes, the whole cache (of a fixed capacity) and an
explicit mask over it. What changes from step to step is the content of tensors alone, so that the
graph compiled in the first step serves all others; on a GPU it is replayed as a CUDA graph.

Shapes: B batch, N tree nodes, C capacity in slots, H key-value heads, X head dimension.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.target.attention import TreeMask, explicit_masks
from medusa_heads.target.cache import RowCache, RowLayer
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.tree import TokenTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CAPACITY_STEP = 512  # capacities are rounded up, so that few of them, and few graphs, exist
# What caches of other shapes than the last one may hold together. Each belongs to a graph that
# would have to be compiled anew.
_BYTES_KEPT = 2 << 30


class _Slots:
    """Where the nodes of the tree being verified are written; None outside of a verification."""

    def __init__(self) -> None:
        self.nodes_N: Tensor | None = None


class StaticRowLayer(DynamicLayer):
    """One layer's keys and values, in buffers that never grow."""

    is_sliding = False
    is_compileable = True

    def __init__(self, slots: _Slots, capacity: int) -> None:
        self.slots = slots
        self.capacity = capacity
        self.length = 0
        self.buffers: tuple[Tensor, Tensor] | None = None
        super().__init__()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        made = []
        for like in (key_states, value_states):
            batch, heads, _, width = like.shape
            with torch.inference_mode(False):  # whoever comes first, all may write to it
                buffer_BHCX = like.new_zeros(batch, heads, self.capacity, width)
            # CUDA graphs then read and write it where it lies.
            torch._dynamo.mark_static_address(buffer_BHCX)
            made.append(buffer_BHCX)
        self.buffers = (made[0], made[1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write rows in place. A tree's forward gets whole buffers, a prefill what is in use."""
        if self.buffers is None:
            self.lazy_initialization(key_states, value_states)
        assert self.buffers is not None
        keys_BHCX, values_BHCX = self.buffers
        nodes_N = self.slots.nodes_N
        if nodes_N is not None:
            keys_BHCX.index_copy_(2, nodes_N, key_states)
            values_BHCX.index_copy_(2, nodes_N, value_states)
            return keys_BHCX, values_BHCX
        start, end = self.length, self.length + key_states.shape[-2]
        keys_BHCX[:, :, start:end] = key_states
        values_BHCX[:, :, start:end] = value_states
        self.length = end
        return keys_BHCX[:, :, :end], values_BHCX[:, :, :end]

    @property
    def keys(self) -> Tensor | None:
        """[B, H, length, X], a view."""
        return None if self.buffers is None else self.buffers[0][:, :, : self.length]

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        assert value is None, "rows are written by update()"

    @property
    def values(self) -> Tensor | None:
        """[B, H, length, X], a view."""
        return None if self.buffers is None else self.buffers[1][:, :, : self.length]

    @values.setter
    def values(self, value: Tensor | None) -> None:
        assert value is None, "rows are written by update()"

    def get_seq_length(self) -> int:
        # A length that changes would be compiled into the graph: positions are explicit there.
        return self.length if self.slots.nodes_N is None else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.slots.nodes_N is not None:
            return self.capacity, 0
        return self.length + query_length, 0


class StaticRowCache(RowCache):
    """A RowCache of fixed capacity.

    Args:
        config: the target's text configuration.
        capacity: slots of every row.

    Raises:
        UnsupportedArchitecture: as RowCache.
    """

    def __init__(self, config: Any, capacity: int) -> None:
        super().__init__(config)
        self.fixed_capacity = capacity
        self._slots = _Slots()
        # One buffer for each size of tree, for good: graphs know where it lies.
        self._nodes: dict[int, Tensor] = {}
        self.layers = [
            StaticRowLayer(self._slots, capacity) if isinstance(layer, RowLayer) else layer
            for layer in self.layers
        ]

    @property
    def row_layers(self) -> list[Any]:
        """The layers that hold rows of their own."""
        return [layer for layer in self.layers if isinstance(layer, StaticRowLayer)]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers; 0 before the first forward."""
        return sum(buffer.nbytes for layer in self.row_layers for buffer in layer.buffers or ())

    @contextmanager
    def tree_slots(self, first: int, nodes: int, device: torch.device) -> Iterator[None]:
        """Within the block, forwards write `nodes` rows from slot `first` on."""
        if nodes not in self._nodes:
            with torch.inference_mode(False):
                self._nodes[nodes] = torch.empty(nodes, dtype=torch.long, device=device)
            torch._dynamo.mark_static_address(self._nodes[nodes])
        nodes_N = self._nodes[nodes]
        torch.arange(first, first + nodes, out=nodes_N)
        self._slots.nodes_N = nodes_N
        try:
            yield
        finally:
            self._slots.nodes_N = None

    def move_rows(self, source_BA: Tensor, destination_BA: Tensor) -> None:
        """Copy, in every layer, row b's slots `source_BA[b]` to `destination_BA[b]`."""
        rows_B1 = torch.arange(len(source_BA), device=source_BA.device)[:, None]
        for layer in self.row_layers:
            for buffer_BHCX in layer.buffers or ():
                buffer_BHCX[rows_B1, :, destination_BA] = buffer_BHCX[rows_B1, :, source_BA]

    def select_batch(self, rows: Sequence[int]) -> None:
        """Not here: finished rows stay, because another batch size would be another graph."""
        raise AssertionError("rows do not leave a static cache")

    def handed_out(self, config: Any) -> RowCache:
        """A copy of the rows in use: this cache serves the next text."""
        copy = RowCache(config)
        copy.take_over(self)
        return copy


class _Captured:
    """What the lm_head read last, within a block that asks for it."""

    def __init__(self) -> None:
        self.wanted = False
        self.hidden: list[Tensor] = []

    def take(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.wanted:
            self.hidden[:] = [args[0]]


class CompiledTarget(TargetModel):
    """A target that verifies trees through torch.compile.

    Args:
        model: the causal LM; it is not modified, but has a forward hook on its lm_head as long as
            this object lives.
        backend: of torch.compile.

    Raises:
        UnsupportedArchitecture: at the first verification, if the model's forward is not one graph.
    """

    def __init__(
        self, model: PreTrainedModel, backend: str | Callable[..., Any] = "inductor"
    ) -> None:
        super().__init__(model)
        self._caches: dict[tuple[int, int], StaticRowCache] = {}
        self._captured = _Captured()
        # One hook for all texts: registering it anew for each would invalidate the graph.
        hook = self.get_output_embeddings().register_forward_pre_hook(self._captured.take)
        weakref.finalize(self, hook.remove)
        self._forward: Callable[..., Any] = torch.compile(
            self.model.forward,
            fullgraph=True,
            dynamic=False,
            backend=backend,
            # CUDA graphs are Inductor's.
            mode="reduce-overhead"
            if self.device.type == "cuda" and backend == "inductor"
            else None,
        )

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Within the block, the same forward with the same masks and cache, without the graph."""
        compiled, self._forward = self._forward, self.model.forward
        try:
            yield
        finally:
            self._forward = compiled

    @contextmanager
    def capture_hidden(self) -> Iterator[Callable[[], Tensor]]:
        """Within the block, the returned function gives what the lm_head last read [B, T, D]."""
        wanted, self._captured.wanted = self._captured.wanted, True
        try:
            # A copy: a replayed CUDA graph writes the next step's where these lie, and drafters may
            # read those of several steps at once.
            yield lambda: self._captured.hidden[0].clone()
        finally:
            self._captured.wanted = wanted
            self._captured.hidden.clear()

    def new_cache(self, batch_size: int = 1, slots: int = 0) -> RowCache:
        """An empty cache with room for `slots`; kept and used again, since the graph knows it."""
        super().new_cache()
        capacity = -(-max(slots, 1) // _CAPACITY_STEP) * _CAPACITY_STEP
        cache = self._caches.pop((batch_size, capacity), None)
        room = _BYTES_KEPT
        for other in reversed(list(self._caches)):  # those used last first
            weight = self._caches[other].nbytes
            if weight > room:
                del self._caches[other]
            else:
                room -= weight
        if cache is None:
            cache = StaticRowCache(self.config, capacity)
        self._caches[batch_size, capacity] = cache
        cache.set_length(0)
        return cache

    def verify(self, tree: TokenTree, cache: RowCache, mask: TreeMask) -> Tensor:
        """As TargetModel.verify, through the graph."""
        assert isinstance(cache, StaticRowCache)
        if self.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        with cache.tree_slots(mask.first_slot, tree.num_nodes, tree.tokens_BN.device):
            # Batch sizes, capacities and tree sizes are graphs of their own, and all wanted.
            many = torch._dynamo.config.patch(recompile_limit=256)
            try:
                logits_BNV: Tensor = many(self._forward)(
                    input_ids=tree.tokens_BN.contiguous(),
                    position_ids=mask.query_positions_BN,
                    attention_mask=explicit_masks(self.config, mask, self.dtype),
                    past_key_values=cache,
                    use_cache=True,
                ).logits
            except torch._dynamo.exc.Unsupported as error:
                reason = " ".join(str(error).split())[:160]
                raise UnsupportedArchitecture(
                    f"{self.config.model_type} cannot be compiled in one graph ({reason})",
                    "leave compile out",
                ) from error
        return logits_BNV
