"""Whole models: a target taken out of one that has heads in it, or put together with heads."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from medusa_heads.interop.source import CONFIG_FILE, Source, open_source

INDEX_FILE = "model.safetensors.index.json"
# What transformers wants beside a model, by names that are never the heads'.
BESIDE = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
SHARD_BYTES = 5_000_000_000


def write_target(folder: Path, source: Source, prefix: str, marks: Collection[str]) -> None:
    """The model in `source` without its heads, as transformers reads it.

    Args:
        folder: made here.
        source: of which one shard's worth of tensors is held in memory at a time.
        prefix: of the heads' tensors.
        marks: keys of the configuration that speak of heads.

    Raises:
        ValueError: a tensor is damaged.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True)
    names = [name for name in source.files if not name.startswith(prefix)]
    config = {key: value for key, value in source.config.items() if key not in marks}
    _write_model(folder, source, names, {}, config)


def write_with_heads(
    folder: Path, target: Mapping[str, Any], heads: Mapping[str, Tensor], marks: Mapping[str, Any]
) -> None:
    """A target's model with heads among its tensors, and `marks` in its configuration.

    Raises:
        ValueError: the target's files are not at hand, or one of them is damaged.
        OSError: the folder cannot be written.
    """
    name = target.get("name_or_path")
    if not name:
        raise ValueError(
            "the layout holds the target too, and the heads name none: give the target"
        )
    source = open_source(str(name), revision=target.get("revision"), model=True)
    _write_model(folder, source, sorted(source.files), heads, {**source.config, **marks})


def _write_model(
    folder: Path,
    source: Source,
    names: Collection[str],
    further: Mapping[str, Tensor],
    config: Mapping[str, Any],
) -> None:
    """Shards of tensors read and given, their index, the configuration and the tokenizer."""
    from safetensors.torch import save_file

    shards = _shards(source, names) + ([list(further)] if further else [])
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {n: further[n] if n in further else source.read(n, of_heads=False) for n in shard}
        save_file(
            {n: tensor.contiguous() for n, tensor in tensors.items()},
            folder / file,
            metadata={"format": "pt"},
        )
        weight_map |= dict.fromkeys(shard, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    for file, content in ((INDEX_FILE, index), (CONFIG_FILE, config)):
        (folder / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for file in BESIDE:
        if found := source.place.find(file):
            (folder / file).write_bytes(found.read_bytes())


def _shards(source: Source, names: Collection[str]) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name in sorted(names, key=_by_number):
        size = 4  # bytes a value, for the few that take 8 as well
        for length in source.shape(name):
            size *= length
        if shards[-1] and filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _by_number(name: str) -> list[tuple[int, str]]:
    """Layers in the order of their numbers, so that shards are read from front to back."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"\.", name)]
