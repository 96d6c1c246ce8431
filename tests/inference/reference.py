"""What `generate()` makes of a target, asked once by the tests that compare with it."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

_made: WeakKeyDictionary[Any, dict[Any, tuple[Tensor, list[Tensor]]]] = WeakKeyDictionary()


def reference(model: Any, **settings: Any) -> Any:
    """`model.generate(**settings)` of a model, remembered as long as the model lives.

    Asked anew where a weight, a default of generation, a setting or the dice differ; the dice are
    left as generate() leaves them. Nothing is remembered of settings that are no plain
    values, or of whole outputs.
    """
    given = {name: _plain(value) for name, value in settings.items()}
    if any(value is _NOT_PLAIN for value in given.values()) or "return_dict_in_generate" in given:
        return model.generate(**settings)
    dice = None
    if settings.get("do_sample"):
        dice = tuple(state.numpy().tobytes() for state in _dice())
    weights = tuple(parameter._version for parameter in model.parameters())
    key = weights, repr(model.generation_config), dice, repr(sorted(given.items()))
    made = _made.setdefault(model, {})
    if key not in made:
        made[key] = model.generate(**settings), _dice()
    text_BT, dice_after = made[key]
    if dice is not None:
        torch.set_rng_state(dice_after[0])
        torch.cuda.set_rng_state_all(dice_after[1:])
    return text_BT.clone()


def _dice() -> list[Tensor]:
    """Those of the host, and of every GPU."""
    return [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]


_NOT_PLAIN = object()


def _plain(value: Any) -> Any:
    """A setting as numbers and words, if it is made of these alone."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.tolist()
    plain = value if isinstance(value, list | tuple) else [value]
    if all(isinstance(each, bool | int | float | str | type(None)) for each in plain):
        return value
    return _NOT_PLAIN
