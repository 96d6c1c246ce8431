"""What `generate()` makes of a target, asked once by the tests that compare with it."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

_made: WeakKeyDictionary[Any, dict[Any, tuple[Tensor, Tensor]]] = WeakKeyDictionary()


def reference(model: Any, **settings: Any) -> Any:
    """`model.generate(**settings)` of a model, remembered as long as the model lives.

    Asked anew where a weight, a default of generation, a setting or the dice differ; the dice are
    left as generate() leaves them. Nothing is remembered of settings that are no plain
    values, or of whole outputs.
    """
    given = {name: _plain(value) for name, value in settings.items()}
    if any(value is _NOT_PLAIN for value in given.values()) or "return_dict_in_generate" in given:
        return model.generate(**settings)
    dice = torch.get_rng_state().numpy().tobytes() if settings.get("do_sample") else None
    weights = tuple(parameter._version for parameter in model.parameters())
    key = weights, repr(model.generation_config), dice, repr(sorted(given.items()))
    made = _made.setdefault(model, {})
    if key not in made:
        made[key] = model.generate(**settings), torch.get_rng_state()
    text_BT, dice_after = made[key]
    if dice is not None:
        torch.set_rng_state(dice_after)
    return text_BT.clone()


_NOT_PLAIN = object()


def _plain(value: Any) -> Any:
    """A setting as numbers and words, if it is made of these alone."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.tolist()
    plain = value if isinstance(value, list | tuple) else [value]
    if all(isinstance(each, bool | int | float | str | type(None)) for each in plain):
        return value
    return _NOT_PLAIN
