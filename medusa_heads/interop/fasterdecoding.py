"""FasterDecoding's layout, which TGI and LoRAX read too.

v0.1: `{i}.{l}.linear.weight`, `.bias`, `{i}.{L}.weight`; v2 is without the latter, and the heads
share the target's lm_head. A copy of that, if any lies beside them, is `lm_heads.0.weight` or
`lm_head.weight`, as vLLM has it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from medusa_heads.checkpoint.stored_heads import VOCAB_MATRIX_KEY, WEIGHTS_FILE
from medusa_heads.interop.layout import OWN_NAME, Layout, claim
from medusa_heads.interop.outgoing import Outgoing, save
from medusa_heads.interop.source import Source

PICKLED_FILE = "medusa_lm_head.pt"
CONFIG_KEYS = {
    "num_heads": "medusa_num_heads",
    "num_layers": "medusa_num_layers",
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
}
_MATRICES = (VOCAB_MATRIX_KEY, "lm_head.weight")


def recognise(names: Iterable[str]) -> bool:
    """Whether tensors of these names are in this layout."""
    return any(OWN_NAME.fullmatch(name) for name in names)


def find(source: Source) -> Layout:
    """Which tensor is which.

    Raises:
        ValueError: a tensor that has no place here.
    """
    names = {name: name for name in source.files if OWN_NAME.fullmatch(name)}
    others = sorted(set(source.files) - set(names) - set(_MATRICES))
    if others:
        raise ValueError(
            f"{source.name!r}: {others[0]} is no tensor of FasterDecoding's layout "
            "({head}.{block}.linear.weight and so on)"
        )
    matrix = next((name for name in _MATRICES if name in source.files), None)
    return Layout(names, matrix=matrix, claims=claim(source.config, **CONFIG_KEYS))


def write_fasterdecoding(folder: Path, outgoing: Outgoing) -> None:
    """v0.1 in the pickled file that its own code reads; heads that share a matrix as v2.

    Raises:
        ValueError: heads that the layout cannot hold.
        OSError: the folder cannot be written.
    """
    outgoing.require_plain("FasterDecoding's layout")
    file = WEIGHTS_FILE if outgoing.shared else PICKLED_FILE
    save(folder, file, outgoing.stored.tensors, _config(outgoing, outgoing.shared))


def write_tgi(folder: Path, outgoing: Outgoing) -> None:
    """As `write_fasterdecoding`, in the one file that TGI reads."""
    _write_served(folder, outgoing, "TGI")


def write_lorax(folder: Path, outgoing: Outgoing) -> None:
    """As `write_tgi`, with the version that LoRAX goes by."""
    _write_served(folder, outgoing, "LoRAX", version="1")


def _write_served(folder: Path, outgoing: Outgoing, engine: str, **marks: str) -> None:
    outgoing.require_plain(engine)
    if not outgoing.stored.target.get("name_or_path"):
        raise ValueError(
            f"{engine} loads the target that the heads name, and they name none: give it"
        )
    tensors, shared = outgoing.stored.tensors, outgoing.shared
    if shared and outgoing.config.num_layers > 1:
        # Both read several blocks only of heads that have matrices: the copies make the same heads.
        tensors, shared = outgoing.with_own_matrices(), False
        outgoing.notices.append(
            f"{engine} shares the target's vocabulary matrix among heads of one block only: each "
            "head is given a copy"
        )
    save(folder, WEIGHTS_FILE, tensors, marks | _config(outgoing, shared))


def _config(outgoing: Outgoing, shared: bool) -> dict[str, Any]:
    """What loaders of this family read; no `architectures`, by which TGI tells other models."""
    config = outgoing.config
    values = {ours: getattr(config, ours) for ours in CONFIG_KEYS}
    return {
        "base_model_name_or_path": outgoing.stored.target.get("name_or_path"),
        **{key: values[ours] for ours, key in CONFIG_KEYS.items()},
        **({"version": "2"} if shared else {}),
    }
