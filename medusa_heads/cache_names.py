"""The name of the cache in what transformers' forwards take and return; versions differ."""

from __future__ import annotations

import inspect
from collections.abc import Callable, MutableMapping
from dataclasses import fields
from functools import cache
from typing import Any

# That of transformers 5.24 and later, that of earlier versions, and in these that of Mamba.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")


@cache
def cache_field() -> str:
    """Its name in what generate() returns."""
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    names = {field.name for field in fields(GenerateDecoderOnlyOutput)}
    return next(name for name in CACHE_NAMES if name in names)


def cache_argument(forward: Callable[..., Any]) -> str:
    """The name by which this forward takes one: a model with code of its own may have an older
    name than this transformers has."""
    asks = inspect.signature(forward).parameters
    return next((name for name in reversed(CACHE_NAMES) if name in asks), cache_field())


def cache_of(output: Any) -> Any:
    """The cache in what a forward or generate() returned; None where there is none."""
    return output.get(cache_field())


def take_cache(given: MutableMapping[str, Any]) -> Any:
    """The cache among a caller's arguments, taken out of them under whatever name; None where
    there is none. Under an older name generate() may have put an empty one beside the caller's."""
    found = [given.pop(name, None) for name in CACHE_NAMES]
    return next((each for each in found if each is not None), None)
