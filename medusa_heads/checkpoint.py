"""A heads checkpoint: a folder that names its target, and holds no weight of it.

medusa_lm_head.safetensors   the heads, FasterDecoding's key names
config.json                  what FasterDecoding-style loaders read
medusa_heads.json            configuration, target fingerprint, statistics, provenance
custom_generate/             makes the folder a decoding method for transformers' generate()
adapter/                     of heads trained together with a LoRA adapter: peft's two files
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medusa_heads.adapter import ADAPTER_FOLDER, adapter_digest, save_adapter
from medusa_heads.config import HeadsConfig
from medusa_heads.custom_generate import write_custom_generate
from medusa_heads.heads import DraftHeads, new_heads
from medusa_heads.statistics import HeadStatistics
from medusa_heads.target import TargetModel

if TYPE_CHECKING:
    from peft import PeftModel

WEIGHTS_FILE = "medusa_lm_head.safetensors"
CONFIG_FILE = "config.json"
SIDECAR_FILE = "medusa_heads.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class LoadedHeads:
    """What a checkpoint folder held."""

    heads: DraftHeads
    statistics: HeadStatistics | None
    sidecar: dict[str, Any]


def provenance(extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """How a checkpoint came to be: command line, versions, revision of the code, time (UTC)."""
    packages = ("medusa-heads", "torch", "transformers", "accelerate", "datasets", "safetensors")
    return {
        "argv": list(sys.argv),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
        "git_sha": _git_sha(),
        **(extra or {}),
    }


def save_heads(
    folder: str | os.PathLike[str],
    heads: DraftHeads,
    target: TargetModel,
    *,
    statistics: HeadStatistics | None = None,
    provenance: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    adapter: PeftModel | None = None,
) -> Path:
    """Write a checkpoint folder, beside its place first and then renamed, file by file.

    Weights are stored in `dtype`, by default the target's own. An `adapter` that the heads were
    trained together with is stored beside them; from then on they are only loaded with it.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stored = dtype or target.dtype
    tensors = {
        name: tensor.detach().to("cpu", stored if tensor.is_floating_point() else None).contiguous()
        for name, tensor in heads.state_dict().items()
    }
    sidecar = {
        "format_version": FORMAT_VERSION,
        "heads": heads.config.to_dict(),
        "target": {"name_or_path": target.name_or_path, **target.fingerprint()},
        "adapter": None,
        "statistics": statistics.to_dict() if statistics else None,
        "provenance": dict(provenance or {}),
    }
    # All is staged in one hidden folder: an error or a full disk leaves nothing half-written.
    staging = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
    try:
        save_file(tensors, staging / WEIGHTS_FILE, metadata={"format": "pt"})
        names = [WEIGHTS_FILE, CONFIG_FILE, SIDECAR_FILE]
        if adapter is not None:
            save_adapter(staging / ADAPTER_FOLDER, adapter, target.name_or_path, stored)
            sha256 = adapter_digest(target.model)
            sidecar["adapter"] = {"folder": ADAPTER_FOLDER, "sha256": sha256}
            (folder / ADAPTER_FOLDER).mkdir(exist_ok=True)
            of_adapter = sorted((staging / ADAPTER_FOLDER).iterdir())
            names = [str(path.relative_to(staging)) for path in of_adapter] + names
        foreign = _foreign_config(heads.config, target.name_or_path)
        for name, content in ((CONFIG_FILE, foreign), (SIDECAR_FILE, sidecar)):
            (staging / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        for name in names:
            os.replace(staging / name, folder / name)
        write_custom_generate(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def _foreign_config(config: HeadsConfig, base_model: str) -> dict[str, Any]:
    """What other projects' loaders read; keys of Medusa's only where they could hold the heads."""
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
    if config.draft_vocab_size is not None or config.prefix_attention:
        return foreign
    if config.vocab_matrix == "shared":
        foreign["version"] = "2"  # FasterDecoding's mark for heads without vocabulary matrices
    return foreign | {
        "medusa_fc_bias": True,
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
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
            "found none: train one with train-heads"
        )
    try:
        sidecar = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): the file is damaged") from error
    version = sidecar.get("format_version") if isinstance(sidecar, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {version!r}, this package reads {FORMAT_VERSION}: "
            "upgrade medusa-heads"
        )
    return sidecar


def load_heads(folder: str | os.PathLike[str], target: TargetModel) -> LoadedHeads:
    """Load heads onto their target, in its dtype and on its device.

    Raises:
        ValueError: a missing, damaged or ill-fitting checkpoint, or another target's, or one whose
            heads belong to an adapter that the target does not carry.
    """
    sidecar = read_sidecar(folder)
    for part in ("heads", "target"):
        if not isinstance(sidecar.get(part), dict):
            raise ValueError(f"{Path(folder) / SIDECAR_FILE} has no {part!r} part: it is damaged")
    _check_fingerprint(sidecar["target"], target)
    if sidecar.get("adapter") is not None:
        _check_adapter(sidecar["adapter"], target, folder)
    config = HeadsConfig.from_dict(sidecar["heads"])
    tensors = _read_weights(Path(folder) / WEIGHTS_FILE)
    heads = new_heads(target, config, tensors.get("draft_tokens"))
    _load_weights(heads, tensors, Path(folder) / WEIGHTS_FILE)
    heads.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    stored = sidecar.get("statistics")
    statistics = HeadStatistics.from_dict(stored) if stored else None
    return LoadedHeads(heads, statistics, sidecar)


def _check_fingerprint(expected: Mapping[str, Any], target: TargetModel) -> None:
    got = target.fingerprint()
    differing = [key for key in got if expected.get(key) != got[key]]
    if differing:
        wanted = {key: expected.get(key) for key in differing}
        found = {key: got[key] for key in differing}
        raise ValueError(
            f"these heads were trained for another target ({expected.get('name_or_path')!r}): "
            f"expected {wanted}, got {found}; pass the target they belong to"
        )


def _check_adapter(
    expected: Mapping[str, Any], target: TargetModel, folder: str | os.PathLike[str]
) -> None:
    got = adapter_digest(target.model)
    if got == expected.get("sha256"):
        return
    carried = "no adapter" if got is None else "another adapter"
    raise ValueError(
        f"these heads were trained together with an adapter of the target, and this target carries "
        f"{carried}: apply {str(Path(folder) / ADAPTER_FOLDER)!r} with peft.PeftModel."
        "from_pretrained, or let MedusaModel.from_pretrained load the target"
    )


def _read_weights(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise ValueError(f"expected the heads' weights at {str(path)!r}, found none")
    try:
        return dict(load_file(path))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read ({error}): download or train it anew") from error


def _load_weights(heads: DraftHeads, tensors: dict[str, Tensor], path: Path) -> None:
    own = heads.state_dict()
    missing, surplus = sorted(set(own) - set(tensors)), sorted(set(tensors) - set(own))
    if missing or surplus:
        raise ValueError(
            f"{path} does not hold the heads its configuration describes: "
            f"missing {missing[:3]}, unexpected {surplus[:3]}"
        )
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise ValueError(
                f"{path}: {name} has shape {list(tensor.shape)}, expected {list(own[name].shape)}"
            )
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{path}: {name} holds NaN or infinite values: train it anew")
    heads.load_state_dict(tensors)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_sha() -> str | None:
    """Revision of the code that ran, where it ran from a git checkout of its own."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None
