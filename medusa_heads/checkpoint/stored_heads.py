"""A heads checkpoint as it lies on disk, read and written without a target in memory.

medusa_lm_head.safetensors   the heads, FasterDecoding's key names
vocab_matrix.safetensors     where it was asked for: a copy of the target's vocabulary matrix, which
                             the heads share; nothing here reads it to draft (vocab_matrix.py)
config.json                  what FasterDecoding-style loaders (TGI, LoRAX, vLLM 0.32) read
medusa_heads.json            configuration, target fingerprint, statistics, provenance
custom_generate/             makes the folder a decoding method for transformers' generate()
adapter/                     of heads trained together with a LoRA adapter: peft's two files

Shapes: D hidden, V vocabulary.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medusa_heads.checkpoint.adapter import ADAPTER_FOLDER, save_adapter
from medusa_heads.checkpoint.custom_generate import write_custom_generate
from medusa_heads.checkpoint.tensor_file import read_tensors, tensor_shapes
from medusa_heads.checkpoint.vocab_matrix import VOCAB_MATRIX_FILE, VOCAB_MATRIX_KEY
from medusa_heads.config import HeadsConfig
from medusa_heads.contents import SIDECAR_FILE, instead_of_heads
from medusa_heads.files import move_in, read_json, refuse_link, staging
from medusa_heads.heads import KINDS
from medusa_heads.masking import masked
from medusa_heads.target.fingerprint import file_sha256

if TYPE_CHECKING:
    from peft import PeftModel

WEIGHTS_FILE = "medusa_lm_head.safetensors"
CONFIG_FILE = "config.json"
FORMAT_VERSION = 1
DRAFT_TOKENS = "draft_tokens"
_SIDECAR_PARTS = {
    *("format_version", "heads", "weights_sha256", "target"),
    *("adapter", "statistics", "provenance"),
}


@dataclass(frozen=True)
class StoredHeads:
    """Heads, and what is known of where they came from.

    Attributes:
        config: their shape, with the target's sizes filled in.
        tensors: what `DraftHeads.state_dict()` holds.
        target: `name_or_path`, `revision`, `model_type`, `hidden_size`, `vocab_size` and
            `lm_head_sha256` of the target they belong to; None where heads that another project
            stored do not say.
        statistics: `HeadStatistics.to_dict()`.
        provenance: how they came to be.
        adapter: `folder` and `sha256` of the adapter they were trained together with.
        vocab_matrix_VD: the target's vocabulary matrix, if a copy of it is to lie beside the heads.
    """

    config: HeadsConfig
    tensors: dict[str, Tensor]
    target: Mapping[str, Any]
    statistics: Mapping[str, Any] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    adapter: Mapping[str, Any] | None = None
    vocab_matrix_VD: Tensor | None = None


def write_stored(
    folder: str | os.PathLike[str], stored: StoredHeads, *, adapter: PeftModel | None = None
) -> Path:
    """Write a checkpoint folder, beside its place first and then renamed, file by file.

    Raises:
        ValueError: the tensors are not those of such heads.
        OSError: the folder cannot be written.
    """
    from safetensors.torch import save_file

    _check_shapes(
        {name: tuple(tensor.shape) for name, tensor in stored.tensors.items()},
        stored.config,
        WEIGHTS_FILE,
    )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # All is staged in one hidden folder: an error or a full disk leaves nothing half-written.
    with staging(folder) as staged:
        # The sidecar comes last: it holds the weights' checksum, and so vouches for them.
        names = [WEIGHTS_FILE, CONFIG_FILE, SIDECAR_FILE]
        save_file(
            {name: tensor.contiguous() for name, tensor in stored.tensors.items()},
            staged / WEIGHTS_FILE,
            metadata={"format": "pt"},
        )
        if stored.vocab_matrix_VD is not None:
            matrix = {VOCAB_MATRIX_KEY: stored.vocab_matrix_VD.contiguous()}
            save_file(matrix, staged / VOCAB_MATRIX_FILE, metadata={"format": "pt"})
            names.insert(0, VOCAB_MATRIX_FILE)
        if adapter is not None:
            base_model, dtype = stored.target["name_or_path"], _dtype(stored.tensors)
            save_adapter(staged / ADAPTER_FOLDER, adapter, base_model, dtype)
            refuse_link(folder / ADAPTER_FOLDER)
            (folder / ADAPTER_FOLDER).mkdir(exist_ok=True)
            of_adapter = sorted((staged / ADAPTER_FOLDER).iterdir())
            names = [str(path.relative_to(staged)) for path in of_adapter] + names
        sidecar = {
            "format_version": FORMAT_VERSION,
            "heads": stored.config.to_dict(),
            "weights_sha256": file_sha256(staged / WEIGHTS_FILE),
            "target": dict(stored.target),
            "adapter": stored.adapter and dict(stored.adapter),
            "statistics": stored.statistics and dict(stored.statistics),
            "provenance": masked(stored.provenance),
        }
        known_as = stored.target.get("name_or_path")
        foreign = foreign_config(stored.config, stored.tensors, known_as)
        for name, content in ((CONFIG_FILE, foreign), (SIDECAR_FILE, sidecar)):
            (staged / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        write_custom_generate(folder)
        move_in(staged, folder, names)
        if stored.vocab_matrix_VD is None:
            (folder / VOCAB_MATRIX_FILE).unlink(missing_ok=True)  # of heads that stood here before
    return folder


def foreign_config(
    config: HeadsConfig, tensors: Collection[str], base_model: str | None
) -> dict[str, Any]:
    """What other projects' loaders read; keys of Medusa's only where they could hold the heads.

    No `architectures` (TGI would take the folder for a whole model) and no other key with "num" and
    "heads" or "layers" in it (vLLM would read it in place of Medusa's).
    """
    foreign: dict[str, Any] = {
        "base_model_name_or_path": base_model,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
    }
    if config.kind == "hydra":
        return foreign | {
            "hydra_num_heads": config.num_heads,
            "hydra_num_layers": config.num_layers,
        }
    if not config.is_plain_medusa or _vocab_bias(config) in tensors:
        return foreign
    shared = config.vocab_matrix == "shared"
    if shared:
        foreign["version"] = "2"  # FasterDecoding's mark for heads without vocabulary matrices
    return foreign | {
        "medusa_fc_bias": True,
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "original_lm_head": shared,
    }


def read_sidecar(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The sidecar of a checkpoint folder, without its weights.

    Raises:
        ValueError: not a checkpoint folder, or an unreadable or newer sidecar.
    """
    path = Path(folder) / SIDECAR_FILE
    if not path.is_file():
        raise ValueError(
            f"expected a heads checkpoint (a folder with {SIDECAR_FILE}) at {str(folder)!r}, "
            + instead_of_heads(folder)
        )
    sidecar = read_json(path)
    version = sidecar.get("format_version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise ValueError(
            f"{path} has format version {version!r}, this package reads {FORMAT_VERSION}: "
            "upgrade medusa-heads"
        )
    if unknown := sorted(set(sidecar) - _SIDECAR_PARTS):
        raise ValueError(f"{path} has unknown parts {unknown}: it is damaged, or of another make")
    for part in ("heads", "target"):
        if not isinstance(sidecar.get(part), dict):
            raise ValueError(f"{path} has no {part!r} part: it is damaged")
    for part in ("adapter", "statistics", "provenance"):
        if not isinstance(sidecar.get(part), dict | None):
            raise ValueError(f"{path}: {part!r} is not an object: it is damaged")
    return sidecar


def read_stored(folder: str | os.PathLike[str]) -> StoredHeads:
    """Read a checkpoint folder. Names, shapes and sizes are compared before memory is taken.

    Raises:
        ValueError: not a checkpoint folder, a damaged one, or one whose parts do not fit.
    """
    sidecar, path = read_sidecar(folder), Path(folder) / WEIGHTS_FILE
    try:
        config = HeadsConfig.from_dict(sidecar["heads"])
    except (ValueError, TypeError) as error:
        raise ValueError(f"{Path(folder) / SIDECAR_FILE}: {error}") from error
    if config.hidden_size is None or config.vocab_size is None:
        raise ValueError(
            f"{Path(folder) / SIDECAR_FILE} does not say the heads' hidden_size and vocab_size: it "
            "is damaged"
        )
    _check_shapes(tensor_shapes(path), config, path)
    if file_sha256(path) != sidecar.get("weights_sha256"):
        raise ValueError(
            f"{path} is not the file that {SIDECAR_FILE} was written for (its checksum differs): "
            "download or copy the checkpoint anew"
        )
    tensors = read_tensors(path)
    _check_values(tensors, config, path)
    if missing := {"name_or_path", "lm_head_sha256"} - set(sidecar["target"]):
        raise ValueError(
            f"{Path(folder) / SIDECAR_FILE}: 'target' lacks {sorted(missing)}: it is damaged"
        )
    return StoredHeads(
        config,
        tensors,
        sidecar["target"],
        sidecar.get("statistics"),
        sidecar.get("provenance") or {},
        sidecar.get("adapter"),
    )


def expected_shapes(config: HeadsConfig, *, vocab_bias: bool = False) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of such heads; no memory is taken.

    Args:
        config: the heads, with the target's sizes filled in.
        vocab_bias: own vocabulary matrices have a bias each, as the target's lm_head has.
    """
    with torch.device("meta"):
        heads = KINDS[config.kind](config)
    shapes = {name: tuple(tensor.shape) for name, tensor in heads.state_dict().items()}
    if vocab_bias:
        for i in range(config.num_heads):
            shapes[f"{i}.{config.num_layers}.bias"] = (config.num_candidates,)
    return shapes


def _check_shapes(
    got: Mapping[str, tuple[int, ...]], config: HeadsConfig, path: str | os.PathLike[str]
) -> None:
    unlike = f"{path} does not hold the heads its configuration describes: "
    # A damaged configuration may ask for millions of heads, each of which is built below.
    if config.num_heads * config.num_layers > len(got):
        raise ValueError(
            f"{unlike}expected {config.num_heads} heads of {config.num_layers} layers, found "
            f"{len(got)} tensors"
        )
    bias = config.vocab_matrix == "own" and _vocab_bias(config) in got
    expected = expected_shapes(config, vocab_bias=bias)
    missing, surplus = sorted(set(expected) - set(got)), sorted(set(got) - set(expected))
    if missing or surplus:
        raise ValueError(f"{unlike}missing {missing[:3]}, unexpected {surplus[:3]}")
    for name, shape in got.items():
        if shape != expected[name]:
            raise ValueError(
                f"{path}: {name} has shape {list(shape)}, expected {list(expected[name])}"
            )


def _check_values(
    tensors: Mapping[str, Tensor], config: HeadsConfig, path: str | os.PathLike[str]
) -> None:
    assert config.vocab_size is not None
    for name, tensor in tensors.items():
        if name == DRAFT_TOKENS:
            ascending = tensor.dtype == torch.long and bool((tensor.diff() > 0).all())
            if not ascending or tensor[0] < 0 or tensor[-1] >= config.vocab_size:
                raise ValueError(
                    f"{path}: {name} must be ascending token ids from 0 to {config.vocab_size - 1}"
                )
        elif not tensor.is_floating_point():
            raise ValueError(f"{path}: {name} is stored as {tensor.dtype}, expected floats")


def _vocab_bias(config: HeadsConfig) -> str:
    """The tensor that own vocabulary matrices have if they have a bias each."""
    return f"0.{config.num_layers}.bias"


def _dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    return next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
