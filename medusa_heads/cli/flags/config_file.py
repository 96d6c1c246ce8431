"""The YAML file underneath the flags: each value is of the type of its flag."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from medusa_heads.cli.flags.parser import flags_of
from medusa_heads.cli.flags.unknown_names import explain_key
from medusa_heads.files import expanded
from medusa_heads.plain_yaml import parse_yaml, scalars_as_said
from medusa_heads.settings import coerce


def read_config(path: str | os.PathLike[str], types: Sequence[type]) -> dict[str, Any]:
    """The values of a YAML file by the names of the flags of these dataclasses."""
    file = expanded(path)
    if not file.is_file():
        raise ValueError(f"expected a YAML file at {str(path)!r}, found none")
    try:
        text = file.read_text(encoding="utf-8")
        content, said = parse_yaml(text), scalars_as_said(text)
    except ValueError as error:
        raise ValueError(f"{path} is not valid YAML ({error})") from error
    if content is None:
        content = {}
    if not isinstance(content, Mapping):
        raise ValueError(
            f"{path} must hold 'key: value' lines, got a YAML {type(content).__name__}"
        )
    known = {name: hint for name, hint, _ in flags_of(types)}
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known:
            hint = explain_key(name, value, list(known))
            raise ValueError(f"{path}: unknown key {str(key)!r}{hint}")
        if name in values:
            raise ValueError(f"{path}: the key {str(key)!r} is given twice")
        values[name] = coerce(value, known[name], f"{path}: {key}", said.get(key))
    return values
