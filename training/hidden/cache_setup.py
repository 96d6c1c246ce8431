"""From the settings of a run to its hidden states: which caches it has, and whether they fit."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
from accelerate import PartialState
from datasets import Dataset
from rich.filesize import decimal
from transformers import TrainingArguments

from medusa_heads.config import HeadsConfig
from medusa_heads.files import expanded
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.cache import STREAMED, CacheArguments
from medusa_heads.training.data.prepare import TrainingData
from medusa_heads.training.data.row_facts import RowFacts
from medusa_heads.training.hidden.cheaper import measure_costs
from medusa_heads.training.hidden.layout import INDEX_FILE, CacheError, CacheKey, Index
from medusa_heads.training.hidden.prepare import Forwards, Part, write_parts
from medusa_heads.training.hidden.sharding import in_all, is_sharded
from medusa_heads.training.hidden.states import CachedHiddenStates, HiddenStates
from medusa_heads.training.hidden.store import HiddenCache

# Of a target's configuration: says nothing of what its forward computes.
_IDLE_SETTINGS = (
    "_name_or_path", "transformers_version", "architectures", "dtype", "use_cache",
    "distributed_config",
)  # fmt: skip


def open_hidden_states(
    settings: CacheArguments,
    target: TargetModel,
    data: TrainingData,
    config: HeadsConfig,
    args: TrainingArguments,
    *,
    target_weights_sha256: str,
) -> HiddenStates:
    """Where a run takes the target's hidden states from. With "auto" what is not there is written
    first. `target_weights_sha256` is the target's `weights_digest()`. Raises what `parts_of` and
    `write_parts` do, and CacheError where a cache is not there, not complete or damaged."""
    if is_sharded(target):  # all processes would have to run its eyes equally often
        data.refuse_images("heads beside a target that processes share do")
    if settings.hidden_cache == "off":
        return HiddenStates(target, data.sight)
    parts = parts_of(settings, target, data, config, args, target_weights_sha256)
    if settings.hidden_cache == "auto":
        write_parts(target, parts, forwards=Forwards(target, data.sight))
    caches = in_all(lambda: [_whole_cache(part.folder, part.key) for part in parts])
    if PartialState().is_main_process:
        size, folder = decimal(sum(cache.size for cache in caches)), parts[0].folder.parent
        engine = caches[0].index.layout.computed_by
        by = f", which {engine} computed" if engine else ""
        print(f"Hidden states: {size} read from {folder}{by}", flush=True)
    return CachedHiddenStates(target, caches)


def cheaper(
    settings: CacheArguments,
    target: TargetModel,
    data: TrainingData,
    config: HeadsConfig,
    args: TrainingArguments,
    forwards: Forwards | None = None,
) -> str:
    """The sentence on what a run would take with a cache and without, or where another engine
    computes for it, what that takes; measured, by all processes together. Raises ValueError where
    the text is a stream."""
    target = target.with_features(config.features)
    part = parts_of(settings, target, data, config, args, "")[0]
    costs = measure_costs(forwards or Forwards(target, data.sight), part, processes=args.world_size)
    batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    if forwards is not None and forwards.computed_by:
        return costs.once(forwards.computed_by)
    steps, rows = args.max_steps, len(data.rows)
    return costs.sentence(steps * batch / rows if steps > 0 else args.num_train_epochs)


def parts_of(
    settings: CacheArguments,
    target: TargetModel,
    data: TrainingData,
    config: HeadsConfig,
    args: TrainingArguments,
    target_weights_sha256: str,
) -> list[Part]:
    """The rows to train on and the held-out ones, where their states lie, and in which batches a
    run with these settings meets them first. Raises ValueError where the text is a stream."""
    if data.is_stream:
        raise ValueError(STREAMED)
    folder = expanded(settings.hidden_cache_dir or Path(args.output_dir or ".") / "hidden_states")
    settings_sha256 = _settings_sha256(target)

    def part(rows: Dataset, facts: RowFacts, batch_size: int, seed: int | None) -> Part:
        key = CacheKey(
            target_weights_sha256=target_weights_sha256,
            target_settings_sha256=settings_sha256,
            computed_in=str(target.dtype).removeprefix("torch."),
            hidden_size=target.width,
            features=target.features,
            positions="all" if config.reads_text else "learnt",
            stored_in=settings.hidden_cache_dtype,
            rows=len(rows),
            tokens=facts.tokens,
            rows_sha256=_rows_sha256(rows, facts),
        )
        return Part(folder / key.name(), key, rows, batch_size, seed)

    seed = args.seed if args.data_seed is None else args.data_seed
    found = part(data.rows, data.facts, args.train_batch_size, seed)
    held_out = part(data.held_out, data.held_out_facts, args.eval_batch_size, None)
    return [found] if found.key == held_out.key else [found, held_out]


def _rows_sha256(rows: Dataset, facts: RowFacts) -> str:
    """Over token ids and labels, row by row, and over what was packed together."""
    digest = hashlib.sha256(facts.sha256.encode())
    if "members" in rows.column_names:
        members = rows.data.column("members").combine_chunks()
        for values in (members.flatten(), members.offsets):
            digest.update(np.asarray(values).tobytes())
    return digest.hexdigest()


def _settings_sha256(target: TargetModel) -> str:
    """Over the configuration, over the kernel of attention, which rounds in its own way, and over
    which adapters count, and how strongly: no weight says any."""
    of_model = target.model.config.to_dict()
    settings = {name: value for name, value in of_model.items() if name not in _IDLE_SETTINGS}
    adapters = {
        name: [
            module.scaling,
            getattr(module, "active_adapters", None),
            bool(getattr(module, "disable_adapters", False)),
        ]
        for name, module in target.model.named_modules()
        if isinstance(getattr(module, "scaling", None), dict)
    }
    told = [settings, adapters, target.config._attn_implementation]
    text = json.dumps(told, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _whole_cache(folder: Path, key: CacheKey) -> HiddenCache:
    """A cache to read, complete."""
    if not (folder / INDEX_FILE).is_file():
        raise CacheError(
            f"{folder.parent} holds no hidden states of this target and text"
            f"{_nearest(folder.parent, key)}: write them with medusa-heads prepare-hidden, or with "
            "hidden_cache auto"
        )
    return HiddenCache(folder, key)


def _nearest(folder: Path, key: CacheKey) -> str:
    """In what the most similar cache there differs."""
    found: list[list[str]] = []
    for path in folder.glob(f"*/{INDEX_FILE}"):
        try:
            other = asdict(Index.read(path.parent).key)
        except CacheError:
            continue
        found.append([name for name, value in asdict(key).items() if other[name] != value])
    if not found:
        return ""
    nearest: list[str] = min(found, key=len)
    said = " and ".join(filter(None, [", ".join(nearest[:-1]), nearest[-1]]))
    return f" (the nearest differs in {said})"
