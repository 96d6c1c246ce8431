"""A target without its weights: its architecture on torch's meta device, from its configuration."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, GenerationConfig

from medusa_heads.contents import refuse_adapter, refuse_heads, refuse_judges, refuse_settings
from medusa_heads.errors import first_line
from medusa_heads.files import expanded, read_json
from medusa_heads.hub_probe import asking_hub
from medusa_heads.machine.choice import choose
from medusa_heads.machine.products import Shape
from medusa_heads.target.loading import loader_of
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.target import TargetArguments

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def weights_on_disk(arguments: TargetArguments) -> bool:
    """Whether all weights of the target are here: nothing is asked of a hub. Raises ValueError: the
    index of their files is damaged."""
    name = arguments.model_name_or_path
    folder = expanded(name)

    def place(file: str) -> Path | None:
        if folder.is_dir():
            return folder / file if (folder / file).is_file() else None
        found = try_to_load_from_cache(name, file, revision=arguments.model_revision)
        return Path(found) if isinstance(found, str) else None

    for file in _WEIGHTS:
        if place(file) is not None:
            return True
        if (index := place(f"{file}.index.json")) is not None:
            found = read_json(index).get("weight_map")
            parts: list[Any] = [*found.values()] if isinstance(found, dict) else [None]
            if not all(isinstance(part, str) for part in parts):
                raise ValueError(f"{index} does not say where weights lie: download it anew")
            return all(place(part) is not None for part in set(parts))
    return False


def meta_target(arguments: TargetArguments, device: torch.device | None = None) -> TargetModel:
    """Make it, frozen. A dtype "auto" is what is fastest on `device`, without one as it is stored.
    Raises ValueError: no configuration of a causal language model stands there, or settings of
    generation that are of other types."""
    name = arguments.model_name_or_path
    refuse_heads(name)
    refuse_adapter(name)
    try:
        with asking_hub(name) as options:
            config = AutoConfig.from_pretrained(name, **arguments.source(), **options)
        stored = config.dtype or torch.float32
        dtype = stored if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
        if device is not None:
            dtype = choose(
                "batch",
                device=device,
                dtype=arguments.dtype,
                stored=stored,
                shape=Shape.of(config),
                count_threads=False,
            ).dtype
        with torch.device("meta"):
            model = loader_of(config).from_config(
                config,
                dtype=dtype,
                trust_remote_code=arguments.trust_remote_code,
                **arguments.attention(),
            )
        with asking_hub(name) as options, suppress(OSError):  # most, but not all, bring one
            where = {"revision": arguments.model_revision, **options}
            model.generation_config = GenerationConfig.from_pretrained(name, **where)
    except MemoryError:
        raise
    except Exception as error:  # of damaged files libraries raise whatever comes of them
        raise ValueError(
            f"expected the configuration of a causal language model (a hub id or a local folder) "
            f"at {name!r}: {first_line(error)}"
        ) from error
    refuse_judges(config, name)
    refuse_settings(model.generation_config, name)
    target = TargetModel(model)
    target.freeze()
    return target
