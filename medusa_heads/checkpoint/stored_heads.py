"""A heads checkpoint as it lies on disk, read and written without a target in memory. Which files
it is, `files.py` says.

Shapes: D hidden, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medusa_heads.checkpoint.adapter import save_adapter
from medusa_heads.checkpoint.files import (
    ADAPTER_FOLDER,
    CONFIG_FILE,
    FORMAT_VERSION,
    VOCAB_MATRIX_FILE,
    WEIGHTS_FILE,
    filled,
    read_record,
    write_custom_generate,
    write_json,
)
from medusa_heads.checkpoint.tensor_file import mapped_tensors, read_tensors, write_tensors
from medusa_heads.config import HeadsConfig
from medusa_heads.contents import SIDECAR_FILE, instead_of_heads, refuse_model
from medusa_heads.heads import KINDS
from medusa_heads.masking import masked
from medusa_heads.target.fingerprint import file_sha256

if TYPE_CHECKING:
    from peft import PeftModel

DRAFT_TOKENS = "draft_tokens"
VOCAB_MATRIX_KEY = "lm_heads.0.weight"  # where vLLM looks for a matrix that all heads share


@dataclass(frozen=True)
class StoredHeads:
    """Heads, and what is known of where they came from. Of their `target` that is `name_or_path`,
    `revision`, `model_type`, `hidden_size`, `vocab_size`, `lm_head_sha256`; None where heads that
    another project stored do not say."""

    config: HeadsConfig  # with the target's sizes filled in
    tensors: dict[str, Tensor]  # what `DraftHeads.state_dict()` holds
    target: Mapping[str, Any]
    statistics: Mapping[str, Any] | None = None  # `HeadStatistics.to_dict()`
    provenance: Mapping[str, Any] = field(default_factory=dict)
    adapter: Mapping[str, Any] | None = None  # `folder` and `sha256` of what they were trained with
    vocab_matrix_VD: Tensor | None = None  # the target's, if a copy of it is to lie beside them

    @property
    def has_vocab_bias(self) -> bool:
        """Whether own vocabulary matrices have a bias each."""
        return self.config.vocab_bias in self.tensors


def write_stored(
    folder: str | os.PathLike[str], stored: StoredHeads, *, adapter: PeftModel | None = None
) -> Path:
    """Write a checkpoint folder, beside its place first and then renamed, file by file. Raises
    ValueError: the tensors are not those of such heads, or a model lies in the folder."""
    _check_shapes(stored.tensors, stored.config, WEIGHTS_FILE)
    refuse_model(folder)
    folder = Path(folder)
    # The sidecar comes last: it holds the weights' checksum, and so vouches for them.
    with filled(folder, WEIGHTS_FILE, CONFIG_FILE, SIDECAR_FILE) as made:
        write_tensors(made / WEIGHTS_FILE, stored.tensors)
        if stored.vocab_matrix_VD is not None:
            write_tensors(made / VOCAB_MATRIX_FILE, {VOCAB_MATRIX_KEY: stored.vocab_matrix_VD})
        base_model = stored.target.get("name_or_path")
        if adapter is not None:
            dtype = next(t.dtype for t in stored.tensors.values() if t.is_floating_point())
            save_adapter(made / ADAPTER_FOLDER, adapter, base_model, dtype)
        write_json(made / CONFIG_FILE, foreign_config(stored, base_model))
        write_json(made / SIDECAR_FILE, to_sidecar(stored, file_sha256(made / WEIGHTS_FILE)))
        write_custom_generate(made)
    if stored.vocab_matrix_VD is None:
        (folder / VOCAB_MATRIX_FILE).unlink(missing_ok=True)  # of heads that stood here before
    return folder


def to_sidecar(stored: StoredHeads, weights_sha256: str) -> dict[str, Any]:
    """What the sidecar holds, secrets starred out."""
    return {
        "format_version": FORMAT_VERSION,
        "heads": stored.config.to_dict(),
        "weights_sha256": weights_sha256,
        "target": dict(stored.target),
        "adapter": stored.adapter and dict(stored.adapter),
        "statistics": stored.statistics and dict(stored.statistics),
        "provenance": masked(stored.provenance),
    }


def foreign_config(stored: StoredHeads, base_model: str | None) -> dict[str, Any]:
    """What other projects' loaders read; keys of Medusa's only where they could hold the heads. No
    `architectures` (TGI would take the folder for a whole model) and no other key with "num" and
    "heads" or "layers" in it (vLLM would read it in place of Medusa's)."""
    config, shared = stored.config, stored.config.vocab_matrix == "shared"
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
    if not config.is_plain_medusa or stored.has_vocab_bias:
        return foreign
    if shared:
        foreign["version"] = "2"  # FasterDecoding's mark for heads without vocabulary matrices
    return foreign | {
        "medusa_fc_bias": True,
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "original_lm_head": shared,
    }


def read_sidecar(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The sidecar of a checkpoint folder, without its weights. Raises ValueError: not a checkpoint
    folder, or an unreadable or newer sidecar."""
    path = Path(folder) / SIDECAR_FILE
    if not path.is_file():
        raise ValueError(
            f"expected a heads checkpoint (a folder with {SIDECAR_FILE}) at {str(folder)!r}, "
            + instead_of_heads(folder)
        )
    sidecar = read_record(path, needed=("heads", "target"))
    optional = ("adapter", "statistics", "provenance")
    known = {"format_version", "weights_sha256", "heads", "target", *optional}
    if unknown := sorted(set(sidecar) - known):
        raise ValueError(f"{path} has unknown parts {unknown}: it is damaged, or of another make")
    for part in optional:
        if not isinstance(sidecar.get(part), dict | None):
            raise ValueError(f"{path}: {part!r} is not an object: it is damaged")
    for name in ("name_or_path", "revision", "model_type", "lm_head_sha256"):
        if not isinstance(said := sidecar["target"].get(name), str | None):
            raise ValueError(f"{path} says {said!r} for the target's {name!r}: it is damaged")
    return sidecar


def read_stored(folder: str | os.PathLike[str]) -> StoredHeads:
    """Read a checkpoint folder. Names, shapes and sizes are compared before memory is taken. Raises
    ValueError: not a checkpoint folder, a damaged one, or one whose parts do not fit."""
    folder = Path(folder)
    sidecar, path = read_sidecar(folder), folder / WEIGHTS_FILE
    try:
        config = HeadsConfig.from_dict(sidecar["heads"])
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder / SIDECAR_FILE}: {error}") from error
    if config.hidden_size is None or config.vocab_size is None:
        raise ValueError(
            f"{folder / SIDECAR_FILE} does not say the heads' hidden_size and vocab_size: it is "
            "damaged"
        )
    if config.kind == "block" and config.decoder is None:
        raise ValueError(
            f"{folder} holds a block whose queries read the target's hidden state, as an earlier "
            "version made them: blocks now read what DFlash and DSpark do, so train it anew"
        )
    _check_shapes(mapped_tensors(path), config, path)
    if "weights_sha256" not in sidecar:
        raise ValueError(
            f"{folder / SIDECAR_FILE} says no weights_sha256, which the first versions did not "
            "write: train the heads anew"
        )
    if file_sha256(path) != sidecar["weights_sha256"]:
        raise ValueError(
            f"{path} is not the file that {SIDECAR_FILE} was written for (its checksum differs): "
            "download or copy the checkpoint anew"
        )
    tensors = read_tensors(path)
    for name, tensor in tensors.items():
        if name == DRAFT_TOKENS:
            if tensor.dtype != torch.long or not are_ascending(tensor, config.vocab_size):
                raise ValueError(
                    f"{path}: {name} must be ascending token ids from 0 to {config.vocab_size - 1}"
                )
        elif not tensor.is_floating_point():
            raise ValueError(f"{path}: {name} is stored as {tensor.dtype}, expected floats")
    if missing := {"name_or_path", "lm_head_sha256"} - set(sidecar["target"]):
        raise ValueError(
            f"{folder / SIDECAR_FILE}: 'target' lacks {sorted(missing)}: it is damaged"
        )
    return StoredHeads(
        config,
        tensors,
        sidecar["target"],
        sidecar.get("statistics"),
        sidecar.get("provenance") or {},
        sidecar.get("adapter"),
    )


def are_ascending(tokens_V: Tensor, vocab_size: int) -> bool:
    """Whether these are ascending token ids of a vocabulary."""
    known = bool(((tokens_V >= 0) & (tokens_V < vocab_size)).all())  # else a difference may wrap
    return known and bool((tokens_V.diff() > 0).all())


def expected_shapes(config: HeadsConfig, *, vocab_bias: bool = False) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of such heads, with the target's sizes filled in; own
    vocabulary matrices may have a bias each, as the target's lm_head has. No memory is taken.
    Raises ValueError: one would be larger than torch can count."""
    try:
        with torch.device("meta"):
            heads = KINDS[config.kind](config)
            heads.set_vocab_bias(vocab_bias)
    except RuntimeError as error:
        raise ValueError(
            f"sizes such as hidden_size {config.hidden_size} make tensors that no machine holds: "
            "the configuration is damaged"
        ) from error
    return {name: tuple(tensor.shape) for name, tensor in heads.state_dict().items()}


def _check_shapes(
    got: Mapping[str, Tensor], config: HeadsConfig, path: str | os.PathLike[str]
) -> None:
    unlike = f"{path} does not hold the heads its configuration describes: "
    # A damaged configuration may ask for millions of heads, or norms, each of which is built below.
    built = 1 if KINDS[config.kind].one_module else config.num_heads
    normed = config.kind == "eagle3" and getattr(config.decoder, "feature_norm", "each") == "each"
    read = len(config.features or ())
    if max(built * config.num_blocks, config.num_layers, normed * read) > len(got):
        raise ValueError(
            f"{unlike}expected {config.num_heads} heads of {config.num_layers} layers that read "
            f"{read} features, found {len(got)} tensors"
        )
    bias = config.vocab_matrix == "own" and config.vocab_bias in got
    try:
        expected = expected_shapes(config, vocab_bias=bias)
    except ValueError as error:
        raise ValueError(f"{unlike}{error}") from error
    missing, surplus = sorted(set(expected) - set(got)), sorted(set(got) - set(expected))
    if missing or surplus:
        raise ValueError(f"{unlike}missing {missing[:3]}, unexpected {surplus[:3]}")
    for name, tensor in got.items():
        if tensor.shape != expected[name]:
            raise ValueError(
                f"{path}: {name} has shape {list(tensor.shape)}, expected {list(expected[name])}"
            )


def check_target(stored: StoredHeads, got: Mapping[str, Any], do: str = "pass") -> None:
    """Compare what is known of a target with what a checkpoint says of the heads' own, as far as it
    says: heads of another project's making do not say all. Raises ValueError: they differ, and what
    to `do` with the right one."""
    sizes = {"hidden_size": stored.config.hidden_size, "vocab_size": stored.config.vocab_size}
    check_same_target("heads", {**sizes, **stored.target}, got, do)


def check_same_target(
    what: str, expected: Mapping[str, Any], got: Mapping[str, Any], do: str = "pass"
) -> None:
    """The same for what was trained for a target, whose fingerprint is `expected`; None is what is
    not known."""
    known = {key: value for key, value in got.items() if value is not None}
    if differing := [key for key in known if expected.get(key) not in (None, known[key])]:
        wanted, found = ({key: of[key] for key in differing} for of in (expected, known))
        raise ValueError(
            f"these {what} were trained for another target ({expected.get('name_or_path')!r}): "
            f"expected {wanted}, got {found}; {do} the target they belong to"
        )


def check_takes_matrix(config: HeadsConfig, *, bias: bool = False) -> None:
    """Raises ValueError where no engine would read a copy of the target's vocabulary matrix, whose
    lm_head has a `bias`: heads that it could not hold, or that have matrices of their own."""
    if config.vocab_matrix != "shared" or not config.is_plain_medusa or bias:
        raise ValueError(
            "with_vocab_matrix is for heads of kind medusa that share the target's whole "
            "vocabulary matrix, one without a bias, without a prefix layer, induction, correction, "
            "linear shortcut or features; no engine reads it beside others: leave it out"
        )


def read_vocab_matrix(folder: str | os.PathLike[str], config: HeadsConfig) -> Tensor:
    """The copy [V, D] of the target's vocabulary matrix beside heads. Raises ValueError: there is
    none, or what lies there is another matrix."""
    path = Path(folder) / VOCAB_MATRIX_FILE
    tensors = read_tensors(path)
    shape = (config.vocab_size, config.hidden_size)
    if set(tensors) != {VOCAB_MATRIX_KEY} or tensors[VOCAB_MATRIX_KEY].shape != shape:
        raise ValueError(
            f"{path} must hold {VOCAB_MATRIX_KEY} of shape {list(shape)} alone: copy the "
            "checkpoint anew"
        )
    return tensors[VOCAB_MATRIX_KEY]
