"""ModelOpt's layout: a whole model, the heads under `medusa_heads.{i}...`, each with a vocabulary
matrix; the target's configuration says how many, under `medusa`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from medusa_heads.interop.layout import Layout, claim
from medusa_heads.interop.merged import find_prefixed
from medusa_heads.interop.outgoing import Outgoing
from medusa_heads.interop.source import Source
from medusa_heads.interop.whole_model import write_with_heads

PREFIX = "medusa_heads."
MARKS = ("medusa",)
_HEAD = re.compile(r"medusa_heads\.[0-9]+\.")


def recognise(names: Iterable[str]) -> bool:
    """Whether tensors of these names are in this layout."""
    return any(_HEAD.match(name) for name in names)


def find(source: Source) -> Layout:
    """Which tensor is which.

    Raises:
        ValueError: a tensor of the heads that has no place here.
    """
    said: Any = source.config.get("medusa", {})
    if not isinstance(said, dict):
        raise ValueError(f"config.json: medusa must be an object, got {said!r}")
    claims = claim(said, num_heads="num_medusa_heads", num_layers="num_medusa_layers")
    return find_prefixed(source, PREFIX, claims)


def write(folder: Path, outgoing: Outgoing) -> None:
    """The target and the heads as one model.

    Raises:
        ValueError: heads that the layout cannot hold, or a target whose files are not at hand.
        OSError: the folder cannot be written.
    """
    outgoing.require_plain("ModelOpt")
    if outgoing.config.num_layers > 1:
        raise ValueError(
            "ModelOpt's checkpoints are read with one block a head, and these heads have "
            f"{outgoing.config.num_layers}: train num_layers 1 for it"
        )
    tensors = {PREFIX + name: t for name, t in outgoing.with_own_matrices().items()}
    if outgoing.shared:
        outgoing.notices.append("each head is given a copy of the target's vocabulary matrix")
    said = {"num_medusa_heads": outgoing.config.num_heads, "num_medusa_layers": 1}
    write_with_heads(folder, outgoing.stored.target, tensors, {"medusa": said})
