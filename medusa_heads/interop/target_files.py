"""The target's vocabulary, out of its files: the model itself is never loaded for it; and whole
models, taken out of ones that have heads in them or put together with heads.

Shapes: D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_heads.checkpoint.files import CONFIG_FILE, write_json
from medusa_heads.checkpoint.tensor_file import write_tensors
from medusa_heads.contents import refuse_adapter
from medusa_heads.errors import first_line
from medusa_heads.files import expanded, read_json
from medusa_heads.heads.vocabulary import embeddings, vocabulary
from medusa_heads.hub.folder import check_inside
from medusa_heads.interop.source import MODEL_FILES, Source, open_source
from medusa_heads.target.fingerprint import lm_head_sha256
from medusa_heads.target.loading import loader_of
from medusa_heads.target.target import TargetModel

# What transformers wants beside a model, by names that are never the heads'.
BESIDE = (
    "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template.jinja", "chat_template.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tokenizer.model.v3", "tekken.json", "tiktoken.model",
    "qwen.tiktoken", "preprocessor_config.json", "video_preprocessor_config.json",
    "processor_config.json",
)  # fmt: skip


@dataclass(frozen=True)
class TargetVocabulary:
    """A target as a checkpoint's sidecar has it, its lm_head, the bias that few have, its model
    without weights, and what reads its token embeddings [V, D]."""

    target: dict[str, Any]
    weight_VD: Tensor
    bias_V: Tensor | None
    model: Any
    embeddings_VD: Callable[[], Tensor]


def read_target(
    name_or_path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> TargetVocabulary:
    """Read the lm_head of a causal LM in a folder or a repository of the hub. Where the files name
    it unlike the model's own modules, the model is loaded after all. Raises ValueError: there is no
    causal LM, or its lm_head is quantised."""
    path = expanded(name_or_path)
    if path.is_file():
        raise ValueError(
            f"expected a causal language model (a hub id or a local folder) at {name_or_path!r}, "
            "found a file"
        )
    refuse_adapter(path)
    source = open_source(name_or_path, revision=revision, model=True)
    name = str(path) if path.is_dir() else source.name
    model = empty_model(name, source, trust_remote_code)

    def load() -> TargetModel:
        return TargetModel.from_pretrained(
            name, use=None, revision=source.revision, trust_remote_code=trust_remote_code
        )

    lm_head = TargetModel(model).get_output_embeddings()
    weight, bias = (_stored_name(model, part, source) for part in (lm_head.weight, lm_head.bias))
    if weight is None or (bias is None and lm_head.bias is not None):
        weight_VD, bias_V = vocabulary(load())
    else:
        weight_VD = source.read(weight)
        bias_V = None if bias is None else source.read(bias)
    if weight_VD.shape != lm_head.weight.shape:
        raise ValueError(
            f"the lm_head in {name_or_path!r} has shape {list(weight_VD.shape)}, its config.json "
            f"says {list(lm_head.weight.shape)}: download it anew"
        )
    target = {
        "name_or_path": source.name,
        "revision": source.revision,
        "model_type": model.config.get_text_config(decoder=True).model_type,
        "hidden_size": weight_VD.shape[1],
        "vocab_size": weight_VD.shape[0],
        # As it was stored nothing is lost yet, not even in float16.
        "lm_head_sha256": lm_head_sha256(weight_VD.to(torch.bfloat16)),
    }
    embedded = _stored_name(model, model.get_input_embeddings().weight, source)

    def embeddings_VD() -> Tensor:
        if embedded is None:
            return embeddings(load(), weight_VD.shape[1])
        return source.read(embedded)

    return TargetVocabulary(target, weight_VD, bias_V, model, embeddings_VD)


def empty_model(name: str, source: Source, trust_remote_code: bool) -> Any:
    """A model of its configuration that takes no memory."""
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(
            name, revision=source.revision, trust_remote_code=trust_remote_code
        )
        layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0)
        if layers > len(source.files):  # each would be built below, and a damaged number is large
            raise ValueError(f"{layers} layers, but {len(source.files)} tensors")
        with torch.device("meta"):
            return loader_of(config).from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever it is that a model's own code does not expect
        reason = first_line(error)
        raise ValueError(f"expected a causal language model at {name!r}: {reason}") from error


def _stored_name(model: Any, parameter: Tensor | None, source: Source) -> str | None:
    """The name under which the files hold a parameter: one of its own, tied ones included, with or
    without the model's prefix."""
    for name, candidate in model.named_parameters(remove_duplicate=False):
        for stored in (name, name.removeprefix(f"{model.base_model_prefix}.")):
            if candidate is parameter and stored in source.files:
                return str(stored)
    return None


def write_model(
    folder: Path,
    source: Source,
    names: Collection[str],
    config: Mapping[str, Any],
    heads: Mapping[str, Tensor],
) -> None:
    """A model as transformers reads it: shards of the source's tensors, as it has them, and one of
    `heads`, their index, configuration, tokenizer and code. One shard is held in memory at a time.
    Raises ValueError: a tensor is damaged, or a file beside them is a link to elsewhere; OSError:
    the folder cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: dict[Path | str | None, list[str]] = {}
    for name in (*names, *heads):
        shards.setdefault(None if name in heads else source.files[name], []).append(name)
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards.values(), start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {
            name: heads[name] if name in heads else source.read(name, expected=None)
            for name in shard
        }
        write_tensors(folder / file, tensors)
        weight_map |= dict.fromkeys(shard, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / MODEL_FILES[0], index)
    write_json(folder / CONFIG_FILE, config)
    beside = {file: found for file in BESIDE if (found := _beside(source, file))}
    tokenizer = beside.get("tokenizer_config.json")
    named = [config] if tokenizer is None else [config, read_json(tokenizer)]
    for file, found in (beside | _code(source, named)).items():
        (folder / file).write_bytes(found.read_bytes())


def _beside(source: Source, file: str) -> Path | None:
    """A file as the source itself has it. Raises ValueError: it is a link to elsewhere."""
    found = source.find(file)
    if found is not None and source.folder is not None:
        check_inside(source.folder, found)
    return found


def _code(source: Source, configs: Iterable[Mapping[str, Any]]) -> dict[str, Path]:
    """The modules that configurations name for transformers to load, and those that they import, as
    far as they are there: nothing of them is run."""
    from transformers.dynamic_module_utils import get_relative_imports

    wanted = [module for config in configs for module in _modules(config)]
    found: dict[str, Path] = {}
    while wanted:
        module = wanted.pop()
        file = f"{module}.py"
        if not module.isidentifier() or file in found:  # a stranger's may be a path
            continue
        if path := _beside(source, file):
            found[file] = path
            wanted += get_relative_imports(path)
    return found


def _modules(config: Mapping[str, Any]) -> list[str]:
    """Those that `auto_map` names beside the model, and not in another repository."""
    said = config.get("auto_map")
    classes = said.values() if isinstance(said, dict) else ()
    names = [name for each in classes for name in (each if isinstance(each, list) else [each])]
    return [n.rpartition(".")[0] for n in names if isinstance(n, str) and "--" not in n]
