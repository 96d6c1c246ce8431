"""Which layout a source is in, told by its tensors' names and by its configuration."""

from __future__ import annotations

import re

from medusa_heads.interop import ReadFormat, eagle3
from medusa_heads.interop.formats import FORMATS
from medusa_heads.interop.source import Source

# What is taken for heads, by the names of its tensors.
_NO_HEADS = {
    r".*\.lora_[AB](\..*)?\.weight": "a LoRA adapter: peft puts that into its target",
    r"mtp\..*": "multi-token-prediction modules: medusa-heads generate --drafter mtp drafts with "
    "those of a target",
    r"(model|transformer|gpt_neox)\..*layers?\..*|transformer\.h\..*": "a whole model: train "
    "heads for it with train-heads",
}
# Whose configuration it is, by its architecture.
_SAID: dict[str, ReadFormat] = {
    eagle3.ARCHITECTURE: "eagle3",
    "DFlashDraftModel": "dflash",
    "Qwen3DSparkModel": "dspark",
}


def detect(source: Source) -> ReadFormat:
    """The layout that the names of the tensors are in. Raises ValueError: they are in none, or in
    several."""
    found: list[ReadFormat] = [
        name
        for name, form in FORMATS.items()
        if name not in ("tgi", "lorax") and form.recognises(source)
    ]
    if found == ["dflash", "dspark"]:  # which is the former and more
        found = ["dspark"]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(
            f"{source.name!r} holds heads in several layouts ({', '.join(found)}): say which with "
            "--from"
        )
    for mark, what in _NO_HEADS.items():
        if any(re.fullmatch(mark, name) for name in source.files):
            raise ValueError(f"{source.name!r} holds no heads but {what}")
    some = ", ".join(sorted(source.files)[:3]) or "none"
    raise ValueError(
        f"{source.name!r} holds no heads of a known layout (its tensors: {some}, ...): known are "
        f"{', '.join(FORMATS)}"
    )


def check_layout(source: Source, name: ReadFormat) -> None:
    """Raises ValueError: the tensors are not in the layout `name`, or config.json is of another."""
    if not FORMATS[name].recognises(source):
        raise ValueError(
            f"{source.name!r} is not in the layout {name!r}: it looks like {detect(source)!r}"
        )
    said = source.config.get("speculators_model_type")
    architectures = source.config.get("architectures")
    if said is None and isinstance(architectures, list):
        said = next((_SAID[each] for each in architectures if each in list(_SAID)), None)
    if said not in (None, name):
        raise ValueError(
            f"{source.name!r} holds tensors of the layout {name!r}, and its config.json is of "
            f"{said!r}: the two files are of different checkpoints, or of a kind that heads here "
            "are not"
        )
