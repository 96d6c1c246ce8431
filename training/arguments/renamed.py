"""Fields of transformers.TrainingArguments that newer versions give another name. Light, as
`training.py` is."""

from collections.abc import Collection, Mapping
from typing import Any

CHECKPOINTING = "activation_checkpointing", "gradient_checkpointing"
"""One field: by its newer name, and by that which goes with version 6."""
_ALIKE = CHECKPOINTING, tuple(f"{name}_kwargs" for name in CHECKPOINTING)


def by_names_here(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """What is given, by those names that are known. Of both names of a field the newer counts, as
    for transformers."""
    found = dict(given)
    for names in _ALIKE:
        said = [name for name in names if name in found]
        here = next((name for name in names if name in known), None)
        if said and here:
            value = found[said[0]]
            for name in said:
                del found[name]
            found[here] = value
    return found
