"""FasterDecoding 1.0 (Medusa-2): a whole model, the heads under `medusa_head.{i}...`.

The target was trained together with the heads, so it is the one in the same files, whatever base
model the configuration names.
"""

from __future__ import annotations

from collections.abc import Iterable

from medusa_heads.interop.fasterdecoding import CONFIG_KEYS
from medusa_heads.interop.layout import OWN_NAME, Layout, claim
from medusa_heads.interop.source import Source

PREFIX = "medusa_head."
MARKS = ("medusa_num_heads", "medusa_num_layers", "base_model_name_or_path")


def recognise(names: Iterable[str]) -> bool:
    """Whether tensors of these names are in this layout."""
    return any(name.startswith(PREFIX) for name in names)


def find(source: Source) -> Layout:
    """Which tensor is which.

    Raises:
        ValueError: a tensor of the heads that has no place here.
    """
    return find_prefixed(source, PREFIX, claim(source.config, **CONFIG_KEYS))


def find_prefixed(source: Source, prefix: str, claims: dict[str, tuple[str, int]]) -> Layout:
    """Heads under our names behind a prefix; all other tensors are the target's."""
    names = {
        theirs.removeprefix(prefix): theirs for theirs in source.files if theirs.startswith(prefix)
    }
    for ours, theirs in names.items():
        if not OWN_NAME.fullmatch(ours):
            raise ValueError(
                f"{source.name!r}: {theirs} is no tensor of this layout "
                f"({prefix}{{head}}.{{block}}.linear.weight and so on)"
            )
    return Layout(names, claims=claims, whole_model=len(names) < len(source.files))
