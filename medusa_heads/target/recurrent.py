"""A RowCache some of whose layers keep a state of all they have read, which has no rows to keep or
drop: a recurrent or convolution state, or tokens compressed into common entries.

What a token has done to such a state cannot be taken back. So the states are copied before drafts
are read, and the copy is put back where one of them is refused; what was accepted is then read
again (inference/engine/recurrent.py). The copy is of one size, however long the text is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer

from medusa_heads.target.cache import RowCache, RowLayer
from medusa_heads.target.stacks import Stacks

_COMPRESSED_LAYERS = ("DeepseekV4HCACache", "DeepseekV4CSACache")


def _is_compressed(layer: Any) -> bool:
    return type(layer).__name__ in _COMPRESSED_LAYERS


def is_recurrent(config: Any) -> bool:
    """Whether a target of this text configuration keeps such a state."""
    return any(
        isinstance(layer, LinearAttentionLayer) or _is_compressed(layer)
        for layer in DynamicCache(config=config).layers
    )


class StateLayer(LinearAttentionLayer):
    """One layer's recurrent and convolution states."""

    def states(self) -> list[Tensor]:
        """Those that the target has made so far."""
        made = (*self.conv_states.values(), *self.recurrent_states.values())
        return [state for state in made if state is not None]

    @torch.inference_mode(False)  # whoever comes first, all may write to it
    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        super().lazy_initialization(*args, **kwargs)

    def take_states(self, layer: StateLayer) -> None:
        """Copy those of another cache's layer into this empty one."""
        for i, conv in layer.conv_states.items():
            if conv is not None:
                self.update_conv_state(conv, i)
        for i, recurrent in layer.recurrent_states.items():
            if recurrent is not None:
                self.update_recurrent_state(recurrent, i)
        self.has_previous_state.update(layer.has_previous_state)

    def select_batch(self, rows: Sequence[int]) -> None:
        """Keep only the states of these rows."""
        for by_name in (self.conv_states, self.recurrent_states):
            by_name.update({i: s[list(rows)] for i, s in by_name.items() if s is not None})

    def join(self, other: StateLayer) -> None:
        """Take in the states of another cache's layer, behind the own ones."""
        for mine, theirs in (
            (self.conv_states, other.conv_states),
            (self.recurrent_states, other.recurrent_states),
        ):
            for i, state in mine.items():
                if state is not None and (more := theirs[i]) is not None:
                    mine[i] = torch.cat([state, more])


class StateAndRowLayer(StateLayer, RowLayer):  # type: ignore[misc, override]
    """One layer's states, and its keys and values, views into the stacks of its RowCache."""

    is_compileable = False

    def __init__(self, stacks: Stacks, number_of_states: int) -> None:
        RowLayer.__init__(self, stacks)
        StateLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        # As transformers tells them apart: keys and values come without names, states with theirs.
        if args:
            RowLayer.lazy_initialization(self, *args, **kwargs)
        else:
            StateLayer.lazy_initialization(self, **kwargs)

    def reset(self) -> None:
        StateLayer.reset(self)
        RowLayer.reset(self)


class CompressedRowLayer(RowLayer):
    """One layer's keys and values, and the entries into which it compresses every few tokens. Those
    are kept by the layer of transformers' own cache, which adds tensors and never changes one."""

    def __init__(self, stacks: Stacks, own: Any) -> None:
        super().__init__(stacks)
        self._own = own
        self.hold()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # not here yet, or nobody's
            raise AttributeError(name)
        return getattr(self._own, name)  # what attention asks of the entries

    def entries(self) -> list[Tensor]:
        """Those made so far, and the tokens that wait for theirs."""
        kept = [tensor for by_name in self._copies().values() for tensor in by_name.values()]
        return [tensor for tensor in kept if isinstance(tensor, Tensor)]

    def _copies(self) -> dict[str, dict[str, Any]]:
        own = vars(self._own).items()
        return {name: dict(by_name) for name, by_name in own if isinstance(by_name, dict)}

    def hold(self) -> None:
        """Remember the entries as they are."""
        self._held = self._copies()

    def put_back(self) -> None:
        """The entries as they were held."""
        vars(self._own).update({name: dict(by_name) for name, by_name in self._held.items()})

    def reset(self) -> None:
        self._own.reset()
        super().reset()


class RecurrentCache(RowCache):
    """Rows of attention layers as in any RowCache, and the states of the others with a copy of what
    they were before the drafts that are being verified."""

    can_go_back = False
    state_and_row_kind = StateAndRowLayer
    is_held = False  # whether the states can be put back

    def __init__(self, config: Any, slots: int = 0, **options: Any) -> None:
        self._held: list[Tensor] = []
        self._length = 0
        super().__init__(config, slots, **options)
        self.rows_stand_alone = not self._compressed()

    def make_layer(self, layer: Any) -> Any:
        if _is_compressed(layer):
            return CompressedRowLayer(self._stacks, layer)
        if not isinstance(layer, LinearAttentionLayer):
            return super().make_layer(layer)
        states = layer.number_of_states
        if hasattr(layer, "update"):  # keys and values besides
            return self.state_and_row_kind(self._stacks, states)
        return StateLayer(states)

    def states(self) -> list[Tensor]:
        """Those of all layers that the target has made so far."""
        return [
            state
            for layer in self.layers
            if isinstance(layer, StateLayer)
            for state in layer.states()
        ]

    def holds_something(self) -> bool:
        """Whether the target has made any state here."""
        return bool(self.states() or any(layer.entries() for layer in self._compressed()))

    def _compressed(self) -> list[CompressedRowLayer]:
        return [layer for layer in self.layers if isinstance(layer, CompressedRowLayer)]

    @torch.no_grad()
    def hold(self) -> None:
        """Copy the states, unless they were copied as they are."""
        if not self.is_held:
            states = self.states()
            if not self._held:
                with torch.inference_mode(False):  # it may outlive the loop
                    self._held = [torch.empty_like(state) for state in states]
                for held in self._held:
                    torch._dynamo.mark_static_address(held)  # as the states themselves
            _copy(self._held, states)
            for layer in self._compressed():
                layer.hold()
            self.is_held = True

    @torch.no_grad()
    def put_back(self, batch: Sequence[int] | None = None) -> None:
        """The states as they were held, of all rows of the batch or of these; what attention
        layers keep of tokens stays."""
        assert self.is_held
        if batch is None:
            _copy(self.states(), self._held)
            for layer in self._compressed():
                layer.put_back()
            return
        for state, held in zip(self.states(), self._held, strict=True):
            state[batch] = held[batch]

    def move_on(self) -> None:
        """What was read since the states were held is part of the text."""
        self.is_held = False

    def set_length(self, length: int) -> None:
        """The states stand behind so many tokens, and rows from that slot on are free."""
        self._length = length
        # transformers 5.19 keeps here where in the text the keys of Qwen4's index stand.
        if (positions := vars(self).get("position_ids")) is not None:
            vars(self)["position_ids"] = positions[..., :length]
        super().set_length(length)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read; without any attention layer, those of the last `set_length`."""
        return super().get_seq_length(layer_idx) if self.row_layers else self._length

    def take_over(self, cache: Cache) -> None:
        """Copy rows and states of a cache of this kind into this empty one; nothing, from an empty
        cache of another. Raises ValueError: the cache holds states, of which nobody can say what
        they have read."""
        if isinstance(cache, RecurrentCache):
            super().take_over(cache)
            for mine, theirs in zip(self.layers, cache.layers, strict=True):
                if isinstance(mine, StateLayer) and isinstance(theirs, StateLayer):
                    mine.take_states(theirs)
            self._length = cache._length
            return
        layers: Any = cache.layers
        states = [layer for layer in layers if hasattr(layer, "has_previous_state")]
        has_read = any(any(layer.has_previous_state.values()) for layer in states)
        if not has_read and not (any(map(_is_compressed, layers)) and cache.get_seq_length()):
            return
        raise _other_states()

    @torch.inference_mode(False)
    def select_batch(self, rows: Sequence[int]) -> None:
        assert self.rows_stand_alone
        super().select_batch(rows)
        for layer in self.layers:
            if isinstance(layer, StateLayer):
                layer.select_batch(rows)
        self._held = []
        self.move_on()

    @torch.inference_mode(False)
    def join(self, other: RowCache, lengths: Sequence[int]) -> None:
        assert self.rows_stand_alone
        super().join(other, lengths)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            if isinstance(mine, StateLayer) and isinstance(theirs, StateLayer):
                mine.join(theirs)
        self._held = []
        self.move_on()


def refuse_states_alone(cache: Cache) -> None:
    """Raises ValueError: a cache of states without attention layers, which say how much was
    read."""
    if isinstance(cache, RecurrentCache) and not cache.row_layers and cache.holds_something():
        raise _other_states()


def _other_states() -> ValueError:
    return ValueError(
        "the given cache holds recurrent states, which are taken on from this decoder's own "
        "caches alone, if they have attention layers besides: pass the whole text without a cache"
    )


def _copy(to: list[Tensor], states: list[Tensor]) -> None:
    if states:
        torch._foreach_copy_(to, states)
