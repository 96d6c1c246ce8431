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

from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.target.attention import TreeMask, explicit_masks
from medusa_heads.target.cache import RowCache, RowLayer
from medusa_heads.target.stacks import Member, Stacks
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.tree import TokenTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CAPACITY_STEP = 512  # capacities are rounded up, so that few of them, and few graphs, exist
# What caches of other shapes than the last one may hold together. Each belongs to a graph that
# would have to be compiled anew.
_BYTES_KEPT = 2 << 30


class StaticStacks(Stacks):
    """A buffer [B, H, C, X] for the keys and one for the values of each layer, which never grow.

    Attributes:
        nodes_N: where the nodes of the tree being verified are written; None outside of that.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.nodes_N: Tensor | None = None

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

    def move_rows(self, source_BA: Tensor, destination_BA: Tensor) -> None:
        rows_B1 = torch.arange(len(source_BA), device=source_BA.device)[:, None]
        for buffer_BHCX in self.stacks:
            buffer_BHCX[rows_B1, :, destination_BA] = buffer_BHCX[rows_B1, :, source_BA]

    def select_batch(self, rows: Sequence[int]) -> None:
        raise AssertionError("rows stay: another batch size would be another graph")


class StaticRowLayer(RowLayer):
    """One layer's keys and values, in buffers that never grow."""

    is_compileable = True
    _stacks: StaticStacks

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write rows in place. A tree's forward gets whole buffers, a prefill what is in use."""
        nodes_N = self._stacks.nodes_N
        if nodes_N is None:
            return super().update(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys_BHCX, values_BHCX = self.buffers()
        keys_BHCX.index_copy_(2, nodes_N, key_states)
        values_BHCX.index_copy_(2, nodes_N, value_states)
        return keys_BHCX, values_BHCX

    def get_seq_length(self) -> int:
        # A length that changes would be compiled into the graph: positions are explicit there.
        return self.length if self._stacks.nodes_N is None else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self._stacks.nodes_N is not None:
            return self._stacks.capacity, 0
        return self.length + query_length, 0


class StaticRowCache(RowCache):
    """A RowCache of so many slots for every row, and no more."""

    layer_kind = StaticRowLayer
    _stacks: StaticStacks

    def __init__(self, config: Any, capacity: int) -> None:
        super().__init__(config, stacks=StaticStacks(capacity))
        self.fixed_capacity = capacity
        # One buffer for each size of tree, for good: graphs know where it lies.
        self._nodes: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers; 0 before the first forward."""
        return sum(buffer.nbytes for buffer in self._stacks.stacks)

    @contextmanager
    def tree_slots(self, first: int, nodes: int, device: torch.device) -> Iterator[None]:
        """Within the block, forwards write `nodes` rows from slot `first` on."""
        if nodes not in self._nodes:
            with torch.inference_mode(False):
                self._nodes[nodes] = torch.empty(nodes, dtype=torch.long, device=device)
            torch._dynamo.mark_static_address(self._nodes[nodes])
        try:
            self._stacks.nodes_N = self._nodes[nodes]
            torch.arange(first, first + nodes, out=self._stacks.nodes_N)
            yield
        finally:
            self._stacks.nodes_N = None

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
    """A target that verifies trees through torch.compile. The model is not modified, but has a
    forward hook on its lm_head as long as this object lives. Raises UnsupportedArchitecture: at the
    first verification, if the model's forward is not one graph."""

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

    @staticmethod
    def capacity(slots: int) -> int:
        """The slots of the cache, and of the graph, that serve texts of so many."""
        return -(-max(slots, 1) // _CAPACITY_STEP) * _CAPACITY_STEP

    def new_cache(self, batch_size: int = 1, slots: int = 0) -> RowCache:
        """An empty cache with room for `slots`; kept and used again, since the graph knows it."""
        if not super().new_cache().can_go_back:
            raise UnsupportedArchitecture(
                f"{self.config.model_type} keeps a recurrent state, which is not compiled",
                "leave compile out",
            )
        capacity = self.capacity(slots)
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
