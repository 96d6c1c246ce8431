"""The target's vocabulary, out of its files: the model itself is never loaded for it.

Shapes: D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa_heads.files import expanded
from medusa_heads.heads.vocabulary import vocabulary
from medusa_heads.interop.source import Source, open_source
from medusa_heads.target.fingerprint import lm_head_sha256
from medusa_heads.target.target import TargetModel


@dataclass(frozen=True)
class TargetVocabulary:
    """What heads need to know of their target.

    Attributes:
        target: as a checkpoint's sidecar has it: its name, revision and fingerprint.
        weight_VD: the lm_head.
        bias_V: its bias, which few targets have.
    """

    target: dict[str, Any]
    weight_VD: Tensor
    bias_V: Tensor | None


def read_target(
    name_or_path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> TargetVocabulary:
    """Read the lm_head of a causal LM in a folder or a repository of the hub.

    Where the files name it unlike the model's own modules, the model is loaded after all.

    Raises:
        ValueError: there is no causal LM, or its lm_head is quantised.
    """
    path = expanded(name_or_path)
    if path.is_file():
        raise ValueError(
            f"expected a causal language model (a hub id or a local folder) at {name_or_path!r}, "
            "found a file"
        )
    source = open_source(name_or_path, revision=revision, model=True)
    name = str(path) if path.is_dir() else source.name
    config, model = _empty_model(name, source, trust_remote_code)
    lm_head = TargetModel(model).get_output_embeddings()
    weight = _stored_name(model, lm_head.weight, source)
    bias = None
    if lm_head.bias is not None:
        bias = _stored_name(model, lm_head.bias, source)
    if weight is None or (lm_head.bias is not None and bias is None):
        loaded = TargetModel.from_pretrained(
            name, use=None, revision=source.revision, trust_remote_code=trust_remote_code
        )
        weight_VD, bias_V = vocabulary(loaded)
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
        "model_type": config.get_text_config(decoder=True).model_type,
        "hidden_size": weight_VD.shape[1],
        "vocab_size": weight_VD.shape[0],
        "lm_head_sha256": lm_head_sha256(weight_VD),
    }
    return TargetVocabulary(target, weight_VD, bias_V)


def _empty_model(name: str, source: Source, trust_remote_code: bool) -> tuple[Any, Any]:
    """The configuration, and a model of it that takes no memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config: Any = AutoConfig.from_pretrained(
            name, revision=source.revision, trust_remote_code=trust_remote_code
        )
        layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0)
        if layers > len(source.files):  # each would be built below, and a damaged number is large
            raise ValueError(f"{layers} layers, but {len(source.files)} tensors")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever it is that a model's own code does not expect
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"expected a causal language model at {name!r}: {reason}") from error
    return config, model


def _stored_name(model: Any, parameter: Tensor, source: Source) -> str | None:
    """The name under which the files hold a parameter: one of its own, tied ones included, with or
    without the model's prefix."""
    prefix = f"{model.base_model_prefix}."
    for name, candidate in model.named_parameters(remove_duplicate=False):
        if candidate is parameter:
            for stored in (name, name.removeprefix(prefix)):
                if stored in source.files:
                    return str(stored)
    return None
