"""Where decoding stands, on the device, where the target has a recurrent state, which cannot drop
what it has read.

Each step reads equally many tokens of every row: first what the states have not read yet of its
text, then its root, then of its chain of drafts as much as there is room for. Where all of them are
accepted the states stand behind them. Else the next step puts the states back, and reads what was
accepted again, in front of its drafts. What is read again grows so, and the chain gets shorter; but
a root always has room, since a row without drafts has nothing that could be refused.

Shapes: B rows, N nodes of chains, T tokens that are read of each row, X columns of hidden states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from medusa_heads.agreement import TOLERANCE, is_half
from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.engine.device_state import DeviceState, fixed_zeros
from medusa_heads.inference.engine.rows import Ends
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.target.graphs.compiled import CompiledTarget
from medusa_heads.target.graphs.static_cache import StaticRecurrentCache, explicit_inputs
from medusa_heads.trees.tree import TokenTree, chain_shape

_COMPARED = 2  # steps of a graph: whether it puts states back, and whether it holds them


class RecurrentDeviceState(DeviceState):
    """Such rows, and what the target's states hold of each.

    Args:
        again: tokens of a row that may be read again in front of a whole chain.
        others: as of DeviceState.

    Attributes:
        kept_B: rows whose states stand where the last step has left them; those of the others go
            back to where they stood before.
        read_BT: what the last step read.
    """

    cache: StaticRecurrentCache

    def __init__(
        self, like: DecodingState, levels: int, nodes: int, vocab_size: int, again: int
    ) -> None:
        super().__init__(like, levels, nodes, vocab_size)
        device, batch = self.roots_B.device, len(self.roots_B)
        self._shapes = {width: chain_shape(width) for width in (nodes, nodes + again)}
        self._held_B = fixed_zeros(device, batch)
        self.kept_B = fixed_zeros(device, batch, dtype=torch.bool)
        self.read_BT = fixed_zeros(device, batch, nodes + again)
        for width, shape in self._shapes.items():
            shape.tree(self.read_BT[:, :width])  # what it knows of the device, no graph could make
        self._compared: WeakKeyDictionary[Drafter, Counter[Any]] = WeakKeyDictionary()

    def begin(self, state: DecodingState, ends: Ends, processors: LogitsProcessorList) -> None:
        assert isinstance(state.cache, StaticRecurrentCache)
        state.cache.hold()
        super().begin(state, ends, processors)
        self._held_B.copy_(self.lengths_B)  # the prompts were read to their ends
        self.kept_B.fill_(True)

    @property
    def held_B(self) -> Tensor:
        return self._held_B

    @property
    def again_B(self) -> Tensor:
        return (self.lengths_B - self.held_B).where(self.room_B > 0, 0)

    @property
    def most_B(self) -> Tensor:
        width = len(self.cache.slots_N)
        return self.room_B.minimum(width - self.again_B)

    def width(self, nodes: int, again: int | None) -> int:
        """As few tokens as a whole chain has room in, or all there may be."""
        least, most = min(self._shapes), max(self._shapes)
        return least if again == 0 else most

    def read(self, target: CompiledTarget, tree: TokenTree) -> tuple[Tensor, Tensor]:
        self.cache.settle(self.kept_B)
        width, again_B1 = len(self.cache.slots_N), self.again_B[:, None]
        columns_T = torch.arange(width, device=again_B1.device)
        node_BT = (columns_T - again_B1).clamp(0, tree.num_nodes - 1)
        drafted_BT = tree.tokens_BN.gather(1, node_BT)
        fed_BT = self.read_BT[:, :width].where(columns_T < again_B1, drafted_BT)
        self.read_BT[:, :width] = fed_BT
        mask = self.tree_mask(self._shapes[width].tree(fed_BT))
        logits_BTV, hidden_BTX = target.read_within(fed_BT, self.cache, mask)
        nodes_N = torch.arange(tree.num_nodes, device=again_B1.device)
        # What there is no room for is not taken.
        place_BN1 = (again_B1 + nodes_N).clamp_max(width - 1)[..., None]
        return (
            logits_BTV.gather(1, place_BN1.expand(-1, -1, logits_BTV.shape[2])),
            hidden_BTX.gather(1, place_BN1.expand(-1, -1, hidden_BTX.shape[2])),
        )

    def _keep(self, nodes_BA: Tensor, taken_BA: Tensor) -> None:
        width = len(self.cache.slots_N)
        self.kept_B.copy_(self.again_B + taken_BA.sum(dim=1) == width)
        self._move_rows(self.held_B, self.kept_B)
        self._held_B.add_(width * self.kept_B)

    def _move_rows(self, held_B: Tensor, kept_B: Tensor) -> None:
        """What attention keeps of tokens that were read and are kept, to its row's own text."""
        columns_T = torch.arange(len(self.cache.slots_N), device=held_B.device)
        to_BT = held_B[:, None] + columns_T
        self.cache.move_rows((held_B.amax() + columns_T).where(kept_B[:, None], to_BT), to_BT)

    def _graph(self) -> tuple[Any, ...]:
        return len(self.cache.slots_N), self.drawing, *map(type, self.processors)

    def is_compared(self, drafter: Drafter) -> bool:
        return self._compared.setdefault(drafter, Counter())[self._graph()] == _COMPARED

    def end(self) -> list[int]:
        self.cache.settle(self.kept_B)
        self.cache.move_on()
        return super().end()

    @contextmanager
    def compared(self, target: CompiledTarget, drafter: Drafter) -> Iterator[None]:
        if self.is_compared(drafter):
            yield
            return
        width, compared, graph = len(self.cache.slots_N), self._compared[drafter], self._graph()
        before, held_B = self.cache.settled(self.kept_B), self.held_B.clone()
        # The same, as a step finds it that puts all states back, and then one that puts none back.
        kept = compared[graph] > 0
        self.kept_B.fill_(kept)
        for state, held, each in zip(self.cache.states(), self.cache.held, before, strict=True):
            right, other = (state, held) if kept else (held, state)
            right.copy_(each)
            other.fill_(1.0)
        mask = self.tree_mask(self._shapes[width].tree(self.read_BT[:, :width]))
        try:
            yield
        except UnsupportedArchitecture:  # the step is no graph, and was not taken
            torch._foreach_copy_(self.cache.states(), before)
            torch._foreach_copy_(self.cache.held, before)
            raise
        compiled = [state.clone() for state in self.cache.states()]
        torch._foreach_copy_(self.cache.states(), before)
        inputs = explicit_inputs(target, self.read_BT[:, :width], self.cache, mask)
        target.run(target.model.forward, **inputs)
        target.forget_hidden()
        self._move_rows(held_B, self.kept_B)  # which have been written over
        all_states = zip(compiled, self.cache.states(), self.cache.held, before, strict=True)
        for of_graph, own, held, was in all_states:
            error = float((of_graph - own).float().norm() / own.float().norm().clamp_min(1e-6))
            error = error if torch.equal(held, was) else float("inf")
            if not error <= TOLERANCE[is_half(target.dtype)]:
                raise UnsupportedArchitecture(
                    f"the states of {target.config.model_type} differ by {error:.2g} of their "
                    "length where its steps are compiled",
                    "leave compile out",
                )
        compared[graph] += 1
