"""What copies of its matrices gain in a model's forward of a single token.

Timed alone, in a row of its like, a product by a copy can be 1.3 times as fast, and the forward
slower: between all else it finds other things in the caches, and to ask for it takes longer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextvars import Context
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from medusa_heads.cache_names import cache_argument
from medusa_heads.machine.measurements import Contention, Measurements, as_seconds
from medusa_heads.target.packed.layer import Copies, PackedLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_KIND = "one token"
# Where a forward takes longer, or reads more by copies, products are nearly all of it.
_LONG, _LARGE = 0.1, 1 << 30  # seconds, and bytes
_ROUNDS, _FEWEST_ROUNDS, _SECONDS = 9, 4, 0.3


def forward_gain(model: PreTrainedModel, layers: Mapping[nn.Linear, Copies]) -> float | None:
    """How many times as fast a forward of one token is where these layers multiply by copies, in
    turns; as it was kept, where it was measured before. None where a forward takes so long that
    products are nearly all of it; 0.0 where the model reads no single token."""
    if sum(layer.weight.nbytes for layer in layers) > _LARGE:  # of which one forward may be seconds
        return None
    copied = {
        f"{'turned' if copies.turned else 'packed'} {each.weight.dtype} {[*each.weight.shape]}"
        for each, copies in layers.items()
    }
    facts = {
        "model": model.config.to_dict() | {"_name_or_path": None},
        "copies": sorted(copied),
        "threads": torch.get_num_threads(),
    }
    store = Measurements()
    try:
        kept = (store.read(_KIND, facts) or {})["gain"]
        return None if kept is None else as_seconds(kept, least=0)
    except (KeyError, ValueError):
        contention = Contention()
        # Without what the caller's forward is told of a tree, nor its autocast.
        with torch.autocast("cpu", enabled=False):
            gain = Context().run(_measured_gain, model, layers)
    # A forward that failed, as for want of memory, may not fail in another process.
    if gain != 0.0 and not contention.seen():
        store.write(_KIND, facts, {"gain": gain})
    return gain


@torch.inference_mode()
def _measured_gain(model: Any, layers: Mapping[nn.Linear, Copies]) -> float | None:
    packed = {
        layer: PackedLayer(layer, replace(copies, packed=copies.packed & {1}))
        for layer, copies in layers.items()
    }
    token_11 = torch.zeros(1, 1, dtype=torch.long, device="cpu")
    given: dict[str, Any] = {"input_ids": token_11, "use_cache": True}

    def seconds(copied: bool) -> float:
        try:
            if copied:
                for layer, copies in packed.items():
                    layer.__dict__["forward"] = copies.forward
            began = time.perf_counter()
            model.forward(**given)  # whatever hooks count forwards
            return time.perf_counter() - began
        finally:
            for layer in packed:
                layer.__dict__.pop("forward", None)

    try:
        # Over a state, as in decoding: without one some read a token as a padded piece of a prompt.
        given[cache_argument(model.forward)] = DynamicCache(config=model.config)
        seconds(False)
        if seconds(False) >= _LONG:
            return None
        for copies in packed.values():
            copies.look()
        seconds(True)
        gains: list[float] = []
        began = time.perf_counter()
        while len(gains) < _ROUNDS:
            gains.append(seconds(False) / seconds(True))
            if len(gains) >= _FEWEST_ROUNDS and time.perf_counter() - began > _SECONDS:
                break
    except Exception:  # a model's own code may raise anything
        return 0.0
    return median(gains)
