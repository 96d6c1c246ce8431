"""From the settings of a run to its hidden states: which caches it has, and whether they fit."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.filesize import decimal
from transformers import TrainingArguments

from medusa_heads.config import HeadsConfig
from medusa_heads.files import read_json
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.cache import CacheArguments
from medusa_heads.training.data.prepare import TrainingData
from medusa_heads.training.hidden.cached_rows import KeptPositions, RowPlan, plan_rows
from medusa_heads.training.hidden.states import CachedHiddenStates, HiddenStates
from medusa_heads.training.hidden.store import INDEX_FILE, CacheError, CacheKey, HiddenCache

# Of a target's configuration: says nothing of what its forward computes.
_IDLE_SETTINGS = (
    *("_name_or_path", "transformers_version", "architectures", "dtype", "use_cache"),
    "distributed_config",
)


def open_hidden_states(
    settings: CacheArguments,
    target: TargetModel,
    data: TrainingData,
    config: HeadsConfig,
    args: TrainingArguments,
    *,
    target_weights_sha256: str,
    resumed: bool,
) -> HiddenStates:
    """Where a run takes the target's hidden states from. Prints how large the cache is and will be,
    before anything is written.

    A run that is `resumed` goes on from a checkpoint, and so does a cache that it was writing;
    `target_weights_sha256` is the target's `weights_digest()`. Raises ValueError: the text is a
    stream, the disk is too small, or a cache that is only to be read is not there, not complete or
    damaged."""
    if settings.hidden_cache == "off":
        return HiddenStates(target)
    if data.is_stream:
        raise ValueError(
            "a hidden-state cache needs to know all rows, which a stream does not: leave streaming "
            "or hidden_cache off"
        )
    kept: KeptPositions = "all" if config.reads_text else "learnt"
    folder = Path(settings.hidden_cache_dir or Path(args.output_dir or ".") / "hidden_states")
    plans: dict[CacheKey, RowPlan] = {}
    expected: dict[CacheKey, float] = {}  # how many rows the run comes to see
    settings_sha256 = _settings_sha256(target)
    for rows, seen in ((data.rows, _rows_seen(args, len(data.rows))), (data.held_out, math.inf)):
        plan = plan_rows(rows, kept)
        key = CacheKey(
            target_weights_sha256=target_weights_sha256,
            target_settings_sha256=settings_sha256,
            computed_in=str(target.dtype).removeprefix("torch."),
            hidden_size=target.width,
            features=target.features,
            positions=kept,
            rows_sha256=plan.sha256(),
        )
        plans[key] = plan
        expected[key] = max(seen, expected.get(key, 0))
    if settings.hidden_cache == "read":
        caches = [_whole_cache(folder, key, plan) for key, plan in plans.items()]
        total = sum(cache.plan.positions * cache.row_bytes for cache in caches)
        _say(f"Hidden states: {decimal(total)} read from {folder}")
        return CachedHiddenStates(target, caches)
    dtype = target.hidden(torch.zeros(1, 1, dtype=torch.long, device=target.device)).dtype
    state = PartialState()
    caches = []
    for key, plan in plans.items():
        caches.append(HiddenCache(folder / key.name(), key, plan, dtype))
        if settings.hidden_cache == "write" and not resumed:
            state.wait_for_everyone()  # else another process could still be looking at the old one
            caches[-1].clear()
    state.wait_for_everyone()
    _check_disk(folder, {cache: expected[cache.key] for cache in caches})
    for cache in caches:
        if state.is_local_main_process:
            cache.write_index()
            cache.remove_leftovers()
    state.wait_for_everyone()
    return CachedHiddenStates(target, caches)


def _settings_sha256(target: TargetModel) -> str:
    """Over the configuration, over the kernel of attention, which rounds in its own way, and over
    how strongly adapters count: no weight says any."""
    of_model = target.model.config.to_dict()
    settings = {name: value for name, value in of_model.items() if name not in _IDLE_SETTINGS}
    adapters = {
        name: [module.scaling, bool(getattr(module, "disable_adapters", False))]
        for name, module in target.model.named_modules()
        if isinstance(getattr(module, "scaling", None), dict)
    }
    told = [settings, adapters, target.config._attn_implementation]
    text = json.dumps(told, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _rows_seen(args: TrainingArguments, rows: int) -> int:
    if args.max_steps > 0:
        batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        return min(rows, args.max_steps * batch)
    return min(rows, math.ceil(args.num_train_epochs * rows))


def _whole_cache(folder: Path, key: CacheKey, plan: RowPlan) -> HiddenCache:
    """A cache to read, complete."""
    found = folder / key.name()
    if not (found / INDEX_FILE).is_file():
        raise CacheError(
            f"{folder} holds no hidden states of this target and text{_nearest(folder, key)}: "
            "write them with hidden_cache auto"
        )
    cache = HiddenCache(found, key, plan, read_only=True)
    if missing := cache.missing():
        raise CacheError(
            f"the hidden-state cache {found} lacks {len(missing)} of {len(plan.counts)} rows: "
            "fill it with hidden_cache auto"
        )
    return cache


def _nearest(folder: Path, key: CacheKey) -> str:
    """In what the most similar cache there differs."""
    found: list[list[str]] = []
    for path in folder.glob(f"*/{INDEX_FILE}"):
        try:
            other: dict[str, Any] = read_json(path)["key"]
            mine = key.to_dict()
            found.append([name for name, value in mine.items() if other.get(name) != value])
        except (ValueError, KeyError, AttributeError):
            continue
    if not found:
        return ""
    nearest: list[str] = min(found, key=len)
    return f" (the nearest differs in {' and '.join(nearest)})"


def _check_disk(folder: Path, caches: Mapping[HiddenCache, float]) -> None:
    """Say what will be written of caches of which so many rows are seen; refuse what does not
    fit."""
    there = needed = rows = 0
    for cache, seen in caches.items():
        missing = cache.missing()
        absent = sum(map(cache.plan.counts.__getitem__, missing)) * cache.row_bytes
        share = min(1.0, seen / len(missing)) if missing else 0.0
        needed += round(absent * share)
        there += cache.plan.positions * cache.row_bytes - absent
        rows += round(len(missing) * share)
    place = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ValueError(
            f"the hidden states of {rows} rows take {decimal(needed)} and {folder} has "
            f"{decimal(free)} free: give a hidden_cache_dir on a larger disk, or leave "
            "hidden_cache off"
        )
    _say(
        f"Hidden states: {decimal(there)} in {folder}, about {decimal(needed)} to be written "
        f"({rows} rows; {decimal(free)} are free)"
    )


def _say(line: str) -> None:
    if PartialState().is_main_process:
        print(line, flush=True)
