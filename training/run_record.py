"""`run.yaml`: what was run, on what, with which versions; beside every checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_heads.files import replace_file

if TYPE_CHECKING:
    from transformers import TrainingArguments

RUN_FILE = "run.yaml"
_DECISIVE = {
    "heads": "heads of another shape",
    "target_weights_sha256": "another target",
    "training_set": "another training set",
    "loss": "another loss",
    "joint": "other settings of joint training",
    "draft": "another draft model, or another way of teaching it",
}


def changed_arguments(args: TrainingArguments) -> dict[str, Any]:
    """The training arguments that are not transformers' defaults, as plain values."""
    changed = {}
    for field in fields(args):
        # Not against a TrainingArguments made anew: making one resets accelerate under a run.
        default = field.default_factory() if callable(field.default_factory) else field.default
        value = getattr(args, field.name, default)
        if field.init and _as_json(value) != _as_json(default):
            changed[field.name] = _as_json(value)
    return changed


def write_run(folder: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Write `run.yaml` into a folder that is there."""
    replace_file(Path(folder) / RUN_FILE, to_yaml(record))


def to_yaml(content: Mapping[str, Any]) -> str:
    """Plain data as YAML, in the order given."""
    import yaml

    text: str = yaml.safe_dump(_plain(content), sort_keys=False)
    return text


def check_same_run(checkpoint: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Refuse to go on from the checkpoint of a run that learnt something else.

    Settings of the course (steps, rates, batch sizes) may differ: transformers warns of those that
    matter.

    Raises:
        ValueError: it was made for another target, on other text, or what learns or how is another;
            or its story cannot be read.
    """
    import yaml

    file = Path(checkpoint) / RUN_FILE
    if not file.is_file():
        return
    try:
        before, now = yaml.safe_load(file.read_text(encoding="utf-8")), _plain(record)
        if not isinstance(before, dict):
            raise ValueError("it holds no 'key: value' lines")
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(
            f"{str(file)!r} is damaged ({error}): resume from another checkpoint"
        ) from error
    for name, what in _DECISIVE.items():
        if name in before and name in now and before[name] != now[name]:
            raise ValueError(
                f"{str(checkpoint)!r} was made with {what} ({name} differs from its {RUN_FILE}): "
                "resume with the settings it was made with, or start anew"
            )


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=lambda v: getattr(v, "value", None) or str(v)))


def _plain(content: Mapping[str, Any]) -> dict[str, Any]:
    # Through JSON: records are plain data, and nothing else should get in.
    plain: dict[str, Any] = json.loads(json.dumps(content))
    return plain
