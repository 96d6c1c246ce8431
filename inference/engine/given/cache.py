"""A cache that a caller hands over: refused by name, or read on from, and filled at the end.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from medusa_heads.agreement import is_half
from medusa_heads.cache_names import CACHE_NAMES, take_cache
from medusa_heads.target.cache import IndexedRowLayer, RowCache, RowLayer
from medusa_heads.target.recurrent import refuse_states_alone
from medusa_heads.target.target import TargetModel

# Layers that keep rows, and one that reads another's.
_FILLED = ("DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer", "DummyLayer")


def mark_given(options: Mapping[str, Any]) -> None:
    """A cache among a caller's options is the caller's, as newer versions of transformers note as
    well: generate() may put an empty one of its own in the place of none."""
    for name in CACHE_NAMES:
        if isinstance(given := options.get(name), Cache):
            given._is_user_defined = True  # type: ignore[attr-defined]


def held_tokens(model_kwargs: Mapping[str, Any]) -> int:
    """Of a text, in the cache that is among these."""
    return _length(take_cache({name: model_kwargs.get(name) for name in CACHE_NAMES}))


def _length(cache: Any) -> int:
    """0 of no cache, and of states alone, of which transformers refuses to say it."""
    with suppress(ValueError):
        return 0 if cache is None else int(cache.get_seq_length())
    return 0


def own_cache(
    target: TargetModel, model_kwargs: dict[str, Any], input_ids_BT: Tensor, slots: int
) -> tuple[RowCache, Cache | None]:
    """The cache of a text, which is put among these, with all that a given one has read; and what
    the caller gave, to be filled at the end. What the rows of a batch begin with is read alone.
    Raises ValueError: what was given cannot be read on from, or cannot be filled."""
    given = take_cache(model_kwargs)
    cache = target.new_cache(len(input_ids_BT), slots)
    model_kwargs[target.cache_argument] = cache
    if given is None:
        return cache, None
    is_callers = bool(getattr(given, "_is_user_defined", False) or _length(given))
    if is_callers:
        _refuse(given, input_ids_BT)
        _refuse_shape(given, len(input_ids_BT), target)
    alone = len(input_ids_BT) == 1
    # One without rows does not say how much it has read.
    if alone and type(given) is type(cache) and cache.fixed_capacity is None and cache.row_layers:
        given.announce(slots)
        model_kwargs[target.cache_argument] = given
        return given, given
    refuse_states_alone(given)
    cache.take_over(given)
    if not (is_callers and alone):
        return cache, None
    if not isinstance(given, RowCache):
        for layer in given.layers:
            if type(layer).__name__ not in _FILLED:
                raise _unsupported(f"{type(given).__name__} with a {type(layer).__name__}")
    return cache, given


def _refuse(given: Any, input_ids_BT: Tensor) -> None:
    rows, tokens = input_ids_BT.shape
    if rows > 1 and not _length(given):
        raise ValueError(
            "a given cache is filled by a batch of 1 alone: rows of a batch end at different "
            "lengths; leave an empty one out"
        )
    if not isinstance(given, RowCache):
        name = type(given).__name__
        if getattr(given, "offloading", False):
            raise _unsupported(f"{name} that is offloaded")
        if type(given) is not DynamicCache:
            raise _unsupported(name)
    if (held := _length(given)) >= tokens:
        how = "all of" if held == tokens else f"{held} tokens, more than"
        raise ValueError(
            f"the given cache already holds {how} the {tokens} given tokens, of which the last one "
            "is read here: pass the whole text, not only what is new, or a cache of fewer tokens"
        )


def _refuse_shape(given: Any, rows: int, target: TargetModel) -> None:
    """What does not fit, before buffers that later texts use again are made like it."""
    # A forward that accelerate has wrapped brings autocast of its own.
    precise = type(given) is DynamicCache and "forward" not in vars(target.model)
    precise = precise and target.dtype == torch.float32
    precise = precise and not torch.is_autocast_enabled(target.device.type)
    held = [layer for layer in given.layers if getattr(layer, "is_initialized", False)]
    for part in (getattr(layer, name, None) for layer in held for name in ("keys", "values")):
        if not isinstance(part, Tensor) or not part.numel():
            continue
        if len(part) != rows:
            raise ValueError(
                f"the given cache has rows of {len(part)} texts and there are {rows}: give one "
                "with a row for each"
            )
        if precise and is_half(part.dtype):
            raise ValueError(
                f"the given cache is of {part.dtype} and the target of {target.dtype}: let the "
                "target read its text without autocast"
            )


def _unsupported(what: str) -> ValueError:
    return ValueError(
        f"tree decoding does not support a given {what}: pass a DynamicCache, or a cache that this "
        "decoder returned"
    )


def give_back(cache: RowCache, given: Cache | None) -> None:
    """The caller's cache holds what the text's own has come to hold, and its next text goes on
    from there."""
    if given is None or given is cache:
        return
    if isinstance(given, RowCache):
        given.reset()
        given.take_over(cache)
        return
    layers: Any = given.layers
    for i, mine in enumerate(cache.layers):
        if isinstance(mine, RowLayer) and mine.is_initialized:
            if i < len(layers):
                _empty(layers[i])
            given.update(mine.keys, mine.values, i)  # which copies them
            if isinstance(mine, IndexedRowLayer):
                _copy_index(mine, layers[i])


def _empty(layer: Any) -> None:
    """All is written anew: a target may have read the text in another way."""
    layer.keys = layer.values = None
    layer.is_initialized = False
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = 0


def _copy_index(mine: IndexedRowLayer, layer: Any) -> None:
    layer.indexer_keys, layer.is_indexer_initialized = None, False
    if mine.idx_keys is not None:
        layer.update_indexer(mine.idx_keys[:, 0])
    if mine.indexer_position_ids is not None:
        layer.indexer_position_ids = mine.indexer_position_ids.clone()
