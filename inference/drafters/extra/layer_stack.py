"""The layers of a target, any of which can be left out of a forward.

A layer that is left out hands on what it is given; the model's own forward does everything else:
embeddings, positions, masks of each kind of layer, final norm, lm_head. Whether the layers really
follow one another is not taken from names but watched in a forward.

Shapes: B batch, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.target.layers import decoder_layers
from medusa_heads.target.target import TargetModel

_OTHERWISE = "use another drafter"

# What a thread leaves out, and how many things each returns beside the hidden states.
_LEFT_OUT: ContextVar[Mapping[nn.Module, int | None]] = ContextVar("left_out")
_standing: dict[nn.Module, _StandIn] = {}  # for layers that some thread leaves out now
_lock = Lock()


class LayerStack:
    """The decoder layers of a target, in the order in which they run. It stays as it is; within
    `without`, a thread runs some of its layers not. Raises UnsupportedArchitecture: its layers
    cannot be found, or do not simply follow one another."""

    def __init__(self, target: TargetModel) -> None:
        self._kind = target.config.model_type
        self._layers = decoder_layers(target.model, _OTHERWISE)
        if not target.new_cache().can_go_back:
            raise _refusal(
                f"{self._kind} keeps a recurrent state, which drafts would change before they are "
                "verified"
            )
        if len(target.new_cache().row_layers) != len(self._layers):
            raise _refusal(
                f"{self._kind} has layers that read the keys and values of others, so that none "
                "can be left out"
            )
        if len(self._layers) < 2:
            raise _refusal(f"this {self._kind} has one layer, which cannot be left out")
        # How many things a layer returns beside the hidden states; None where it returns them bare.
        self._returns = self._watch(target)
        self._try_without(target)

    def __len__(self) -> int:
        return len(self._layers)

    @contextmanager
    def without(self, skipped: Collection[int]) -> Iterator[None]:
        """Within the block, these layers do nothing, where this thread runs them."""
        token = _LEFT_OUT.set({self._layers[i]: self._returns[i] for i in skipped})
        entered: list[_StandIn] = []
        try:
            with _lock:
                for i in skipped:
                    entered.append(_StandIn.enter(self._layers[i]))
            yield
        finally:
            with _lock:
                for standing in entered:
                    standing.leave()
            _LEFT_OUT.reset(token)

    def _watch(self, target: TargetModel) -> list[int | None]:
        """See that each layer takes what the one before it returned."""
        calls: list[tuple[Any, Any]] = []

        def note(_layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls.append((args[0] if args else kwargs.get("hidden_states"), output))

        with ExitStack() as hooks:
            for layer in self._layers:
                hooks.enter_context(layer.register_forward_hook(note, with_kwargs=True))
            _run_three_tokens(target)
        made = [output[0] if isinstance(output, tuple) else output for _, output in calls]
        follow = len(calls) == len(self._layers) and all(
            isinstance(taken, Tensor)
            and isinstance(made[i], Tensor)
            and taken.shape == made[i].shape
            and (i == 0 or torch.equal(taken, made[i - 1]))
            for i, (taken, _) in enumerate(calls)
        )
        if not follow:
            raise _refusal(
                f"{self._kind} has layers that do more than hand hidden states on, so that none "
                "can be left out"
            )
        return [len(output) - 1 if isinstance(output, tuple) else None for _, output in calls]

    def _try_without(self, target: TargetModel) -> None:
        """See that the model does not miss what else its layers return."""
        try:
            with self.without(range(1, len(self))):
                _run_three_tokens(target)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise _refusal(
                f"{self._kind} fails without some of its layers ({type(error).__name__}: "
                f"{' '.join(str(error).split())[:120]})"
            ) from error


class _StandIn:
    """What is called for a layer while any thread leaves it out: the others get its own forward."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer, self._own = layer, layer.forward
        self._put = layer.__dict__.get("forward")  # such as accelerate puts around a layer
        self._threads = 0

    @classmethod
    def enter(cls, layer: nn.Module) -> _StandIn:
        standing = _standing.get(layer)
        if standing is None:
            standing = _standing[layer] = cls(layer)
            layer.forward = standing.forward
        standing._threads += 1
        return standing

    def leave(self) -> None:
        self._threads -= 1
        if self._threads:
            return
        del _standing[self._layer], self._layer.__dict__["forward"]
        if self._put is not None:
            self._layer.forward = self._put

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Nobody compiles a forward without layers, and graphs may outlast what stands here.
        left_out = {} if torch.compiler.is_compiling() else _LEFT_OUT.get({})
        if self._layer not in left_out:
            return self._own(*args, **kwargs)
        return _hand_on(left_out[self._layer], *args, **kwargs)


@torch.no_grad()
def _run_three_tokens(target: TargetModel) -> None:
    ids_1T = torch.arange(3, device=target.device)[None]
    target.model(ids_1T, use_cache=True, **{target.cache_argument: target.new_cache()})


def _refusal(sentence: str) -> UnsupportedArchitecture:
    return UnsupportedArchitecture(sentence, _OTHERWISE)


def _hand_on(more: int | None, *args: Any, **kwargs: Any) -> Any:
    hidden_BTD = args[0] if args else kwargs["hidden_states"]
    return hidden_BTD if more is None else (hidden_BTD, *[None] * more)
