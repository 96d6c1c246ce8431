"""Which layout a checkpoint is in, and who reads and writes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from medusa_heads.interop import (
    ReadFormat,
    WrittenFormat,
    fasterdecoding,
    hydra,
    merged,
    modelopt,
    vllm,
)
from medusa_heads.interop.layout import Layout
from medusa_heads.interop.outgoing import Outgoing
from medusa_heads.interop.source import Source

READERS: dict[ReadFormat, ModuleType] = {
    "fasterdecoding": fasterdecoding,
    "tgi": fasterdecoding,
    "lorax": fasterdecoding,
    "vllm": vllm,
    "modelopt": modelopt,
    "merged": merged,
    "hydra": hydra,
}
WRITERS: dict[WrittenFormat, Callable[[Path, Outgoing], None]] = {
    "fasterdecoding": fasterdecoding.write_fasterdecoding,
    "tgi": fasterdecoding.write_tgi,
    "lorax": fasterdecoding.write_lorax,
    "vllm": vllm.write,
    "modelopt": modelopt.write,
}
# Heads under these prefixes lie among the tensors of their target.
WHOLE_MODELS = {
    "merged": (merged.PREFIX, merged.MARKS),
    "modelopt": (modelopt.PREFIX, modelopt.MARKS),
}


def detect(source: Source) -> ReadFormat:
    """The layout that the names of the tensors are in.

    Raises:
        ValueError: they are in none, or in several.
    """
    found: list[ReadFormat] = []
    for name, reader in READERS.items():
        if reader not in [READERS[other] for other in found] and reader.recognise(source.files):
            found.append(name)
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(
            f"{source.name!r} holds heads in several layouts ({', '.join(found)}): say which with "
            "--from"
        )
    some = ", ".join(sorted(source.files)[:3]) or "none"
    raise ValueError(
        f"{source.name!r} holds no heads of a known layout (its tensors: {some}, ...): known are "
        f"{', '.join(READERS)}"
    )


def find(source: Source, name: ReadFormat) -> Layout:
    """Which tensor of the source is which, in the layout `name`.

    Raises:
        ValueError: the source is not in that layout.
    """
    reader = READERS[name]
    if not reader.recognise(source.files):
        raise ValueError(
            f"{source.name!r} is not in the layout {name!r}: it looks like {detect(source)!r}"
        )
    layout: Layout = reader.find(source)
    used = {*layout.names.values(), layout.matrix, layout.token_map}
    if not layout.whole_model and (unused := sorted(set(source.files) - used)):
        raise ValueError(
            f"{source.name!r}: {unused[0]} stands where another tensor does: leave one of them out"
        )
    return layout
