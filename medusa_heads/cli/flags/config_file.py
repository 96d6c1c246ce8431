"""The YAML file underneath the flags: each value is of the type of its flag."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from medusa_heads.cli.flags.parser import flags_of
from medusa_heads.cli.flags.unknown_names import explain_key
from medusa_heads.plain_yaml import parse_yaml, scalars_as_said


def read_config(path: str | os.PathLike[str], types: Sequence[type]) -> dict[str, Any]:
    """The values of a YAML file by the names of the flags of these dataclasses."""
    file = Path(path)
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


def coerce(value: Any, hint: Any, label: str, said: Any = None) -> Any:
    """`value` as the type `hint`: YAML reads `1e-4` as a string, `5` as an integer and `off` as
    False. `said` is how it was written, for flags whose values are words."""
    options = get_args(hint)
    if get_origin(hint) is Literal:
        for given in (value, said):
            if isinstance(given, str) and given in options:
                return given
        raise ValueError(f"{label} must be one of {list(options)}, got {value!r}")
    if get_origin(hint) in (Union, UnionType):
        if value is None:
            return None
        if dict in options and isinstance(value, Mapping):
            try:
                return json.dumps(value)
            except TypeError as error:  # a date, a set
                raise ValueError(f"{label} must hold plain values ({error})") from error
        plain = [option for option in options if option not in (type(None), dict)]
        return coerce(value, plain[0], label, said)
    if get_origin(hint) is list:
        if isinstance(value, options[0]) or (options[0] is str and isinstance(value, bool)):
            value, said = [value], [said]  # one item needs no brackets, as on the command line
        if not isinstance(value, list):
            raise ValueError(f"{label} must be a list, got {value!r}")
        written = said if isinstance(said, list) else [None] * len(value)
        return [
            coerce(item, options[0], label, how) for item, how in zip(value, written, strict=True)
        ]
    if hint is str and value is not None and isinstance(said, str):
        return said
    if hint is float and not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise ValueError(f"{label} must be of type {hint.__name__}, got {value!r}")
