"""A target's hidden states, read off its forwards as they run: what the lm_head reads, and
features, what comes out of some of its layers.

Shapes: B batch, T tokens, D hidden, F layers that features are read of, X = (F + 1) * D.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.target.layers import decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AnyReader = TypeVar("AnyReader", bound="HiddenReader")
AnyRead = TypeVar("AnyRead")
_OTHERWISE = "leave features out"


def count_layers(model: Any) -> int:
    """How many layers a model has, of which some are usual features. Raises ValueError: they cannot
    be found."""
    return len(decoder_layers(model, "leave usual_features out"))


def check_layers(model: Any, numbers: Sequence[int]) -> None:
    """Raises ValueError where a model has no layer of such a number, or its layers cannot be
    found."""
    if numbers:
        layers = decoder_layers(model, _OTHERWISE)
        if missing := [number for number in numbers if not 0 <= number < len(layers)]:
            raise ValueError(
                f"features asks for layer {missing[0]}, and {type(model).__name__} has the layers "
                f"0 to {len(layers) - 1}"
            )


def watch(
    model: Any, numbers: Sequence[int], keep: Callable[[int, Any], object]
) -> list[RemovableHandle]:
    """Hooks that hand on what comes out of these layers in every forward, with the layer's number.
    The layers are found anew each time, and so never kept alive."""
    if not numbers:
        return []
    layers = decoder_layers(model, _OTHERWISE)

    def hook(number: int) -> RemovableHandle:
        def hand_on(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            keep(number, output)

        return layers[number].register_forward_hook(hand_on)

    return [hook(number) for number in numbers]


class Read(NamedTuple):
    """What the lm_head reads in a forward [B, T, D], and what came out of layers before, of as many
    tokens or of more, the last of which are those that the lm_head reads."""

    hidden_BTD: Tensor
    features: Sequence[Any] = ()

    @classmethod
    def of(cls, hidden_BTD: Tensor, numbers: Sequence[int], outputs: Mapping[int, Any]) -> Read:
        """Of layers that may not have run, such as where a drafter leaves some out."""
        return cls(hidden_BTD, [outputs.get(number) for number in numbers])

    def wide(self) -> Tensor:
        """The features in their order and the lm_head's last, side by side [B, T, X]. Raises
        UnsupportedArchitecture: a layer does not put out one state for each token."""
        if not self.features:
            return self.hidden_BTD
        _, tokens, width = self.hidden_BTD.shape
        parts = []
        for output in self.features:
            out_BTD = output[0] if isinstance(output, tuple) else output
            if not isinstance(out_BTD, Tensor) or out_BTD.ndim != 3 or out_BTD.shape[2] != width:
                got = list(getattr(out_BTD, "shape", ()))
                raise UnsupportedArchitecture(
                    f"a layer of the target puts out {got or type(out_BTD).__name__}, expected one "
                    f"state of {width} for each token",
                    _OTHERWISE,
                )
            parts.append(out_BTD[:, -tokens:].to(self.hidden_BTD))
        return torch.cat([*parts, self.hidden_BTD], dim=-1)


def held(last: list[AnyRead]) -> AnyRead:
    """The one thing that a forward has left there. Raises UnsupportedArchitecture: none, since it
    passed over the lm_head's module, as where somebody has put another forward in its place."""
    if not last:
        raise UnsupportedArchitecture(
            "the target's forward does not call its lm_head, off which its hidden states are read",
            "load the model without what replaces its forward",
        )
    return last[0]


class Captured:
    """What the lm_head read last, and what came out of layers, within a block that asks for it."""

    def __init__(self) -> None:
        self.wanted = False
        self.hidden: list[Tensor] = []
        self.outputs: dict[int, Any] = {}

    def take(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.wanted:
            self.hidden[:] = [args[0]]

    def keep(self, layer: int, output: Any) -> None:
        if self.wanted:
            self.outputs[layer] = output

    def tensors(self, layers: tuple[int, ...]) -> list[Any]:
        """What the lm_head read, and what came out of these layers."""
        outputs = map(self.outputs.get, layers)
        return [self.hidden[0], *(out[0] if isinstance(out, tuple) else out for out in outputs)]

    def put(self, layers: tuple[int, ...], tensors: list[Any]) -> None:
        """The same, of another forward."""
        self.hidden[:], self.outputs = tensors[:1], dict(zip(layers, tensors[1:], strict=True))

    def clear(self) -> None:
        self.hidden.clear()
        self.outputs.clear()


class CapturedHere(Captured):
    """The same, of forwards in the thread that asks."""

    def __init__(self) -> None:
        super().__init__()
        self.thread: int | None = None

    # Whether it is wanted comes first: no compiler follows the rest.
    def take(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.wanted and self.thread == get_ident():
            super().take(_module, args)

    def keep(self, layer: int, output: Any) -> None:
        if self.wanted and self.thread == get_ident():
            super().keep(layer, output)


class HiddenReader:
    """What reads the hidden states of a model, by hooks that are there while it reads: as the
    lm_head is given them, after the final norm.

    Attributes:
        features: the layers, counted from 0, whose outputs are handed on with the hidden states:
            these are then X wide, the features in this order and what the lm_head reads last.
    """

    model: PreTrainedModel
    features: tuple[int, ...] = ()

    def with_features(self: AnyReader, layers: Sequence[int] | None) -> AnyReader:
        """A view of the same model whose hidden states come with these features, None for none.
        Raises ValueError: the model has no such layers, or they cannot be found."""
        wanted = tuple(layers or ())
        if wanted == self.features:
            return self
        check_layers(self.model, wanted)
        return self._view(wanted)

    def _view(self: AnyReader, features: tuple[int, ...]) -> AnyReader:
        view = copy.copy(self)
        view.features = features
        return view

    def get_output_embeddings(self) -> Any:
        """The model's lm_head, a linear module."""
        return self.model.get_output_embeddings()

    @property
    def hidden_size(self) -> int:
        """D: the width of what the lm_head reads."""
        return int(self.get_output_embeddings().weight.shape[1])

    @property
    def width(self) -> int:
        """X: the columns of the hidden states that are handed on; D where no features are."""
        return (len(self.features) + 1) * self.hidden_size

    @contextmanager
    def capture_hidden(self) -> Iterator[Callable[[], Tensor]]:
        """Within the block, the returned function gives what the lm_head last read, with the
        features [B, T, X]."""
        last: list[Read] = []

        def remember(read: Read) -> Tensor:
            last[:] = [read._replace(hidden_BTD=_dense(read.hidden_BTD))]
            return last[0].hidden_BTD

        with self._lm_head_reads(remember):
            yield lambda: held(last).wide()

    @contextmanager
    def capture_prompt(self) -> Iterator[list[Tensor]]:
        """Within the block, the list collects what the lm_head would read at every position of each
        forward, with the features [B, T, X], while it is run at the last one alone."""
        seen: list[Tensor] = []

        def collect(read: Read) -> Tensor:
            seen.append(read.wide())
            return _dense(read.hidden_BTD[:, -1:])

        with self._lm_head_reads(collect):
            yield seen

    @contextmanager
    def instead_of_logits(self) -> Iterator[Callable[[], Tensor]]:
        """Within the block the lm_head is handed zero positions, so that forwards make no logits;
        the returned function gives what it would have read, with the features and all gradients
        [B, T, X]."""
        last: list[Read] = []

        def take(read: Read) -> Tensor:
            last[:] = [read]
            return read.hidden_BTD[:, :0]

        with self._lm_head_reads(take):
            yield lambda: held(last).wide()

    @contextmanager
    def _lm_head_reads(self, change: Callable[[Read], Tensor]) -> Iterator[None]:
        """Within the block, the lm_head is handed what is made of its input [B, T, D], and of the
        features that came before. Forwards of other threads are left alone."""
        outputs: dict[int, Any] = {}
        own = get_ident()
        lm_head = self.get_output_embeddings()
        # Of a model that accelerate laid over several devices: what comes may be on another one.
        where = getattr(getattr(lm_head, "_hf_hook", None), "execution_device", None)

        def elsewhere() -> bool:  # which a compiler cannot ask
            return not torch.compiler.is_compiling() and get_ident() != own

        def keep(layer: int, output: Any) -> None:
            if not elsewhere():
                outputs[layer] = output

        def hand_on(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            if elsewhere():
                return args
            if where is not None:
                args = (args[0].to(where), *args[1:])
            read = Read.of(args[0], self.features, outputs)
            outputs.clear()
            return (change(read), *args[1:])

        hooks = [
            *watch(self.model, self.features, keep),
            lm_head.register_forward_pre_hook(hand_on),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _dense(hidden_BTD: Tensor) -> Tensor:
    """Without gaps between rows, such as the last position of a prompt has: torch would multiply
    each row for itself, with a copy of the whole vocabulary matrix."""
    batch_stride, stride, _ = hidden_BTD.stride()
    if batch_stride == stride * hidden_BTD.shape[1]:
        return hidden_BTD
    return hidden_BTD.clone(memory_format=torch.contiguous_format)
