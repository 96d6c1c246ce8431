"""Settings: fields of dataclasses that are flags as well, and their ranges."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import Field, field
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from medusa_heads.files import parse_json
from medusa_heads.masking import masked

NO_FLAG = {"flag": None}
"""Metadata of a field that no command can be told."""

MOST = 100_000_000
"""Of whatever makes up heads; more is damage, and would overflow the sizes of tensors."""


def flag(default: Any, help: str, name: str | None = None, **options: Any) -> Any:
    """A field that is also a flag and a YAML key; with MISSING as default it must be given, and of
    a list every instance has a copy. See `as_flag`."""
    metadata = as_flag(help, name, **options)
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def as_flag(help: str, name: str | None = None, **options: Any) -> dict[str, Any]:
    """Metadata of such a field: a sentence, the name of the flag as `--name` where it is not the
    field's, and options of argparse's add_argument, or its `aliases`."""
    return {"help": help, **options} | ({} if name is None else {"flag": name[2:]})


def flag_name(part: Field[Any]) -> str | None:
    """The name of a field's flag, without dashes; None where there is none."""
    name: str | None = part.metadata.get("flag", part.name)
    return name if part.init else None


def at_least(settings: object, least: int, *names: str) -> None:
    """Raises ValueError where a named attribute is neither None nor `least` or more."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value >= least:  # NaN is neither
            raise ValueError(f"{name} must be at least {least}, got {value}")


def folders(settings: object, *names: str) -> None:
    """Raises ValueError where a named attribute is an empty text, as a shell makes of a variable
    that is not set: it would be the folder that one is in."""
    for name in names:
        if not getattr(settings, name):
            raise ValueError(f"{name} is empty: name a folder")


def sizes(settings: object, *names: str) -> None:
    """Raises ValueError where a named attribute is no integer from 1 to MOST."""
    for name in names:
        value = getattr(settings, name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if value > MOST:
            raise ValueError(f"{name} must be at most {MOST}, got {value!r}")
        at_least(settings, 1, name)


def switches(settings: object, *names: str) -> None:
    """Raises ValueError where a named attribute is neither True nor False."""
    for name in names:
        if not isinstance(value := getattr(settings, name), bool):
            raise ValueError(f"{name} must be true or false, got {value!r}")


def above_zero(settings: object, *names: str) -> None:
    """Raises ValueError where a named attribute is neither None nor a finite number above 0."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be above 0, got {value}")


def one_of(settings: object, name: str, known: Collection[str]) -> None:
    """Raises ValueError where an attribute is none of the known words."""
    if (value := getattr(settings, name)) not in known:
        raise ValueError(f"{name} must be one of {list(known)}, got {value!r}")


def mapping(settings: object, name: str) -> dict[str, Any]:
    """An attribute that is a mapping, JSON that holds one, or None for an empty one. Raises
    ValueError: it is something else; of which no secret is shown."""
    given = getattr(settings, name)
    if isinstance(given, str):
        try:
            given = parse_json(given)
        except ValueError as error:
            raise ValueError(f"{name} must be a JSON object, got {masked(given)!r}") from error
    if given is not None and not isinstance(given, dict):
        raise ValueError(f"{name} must map names to values, got {masked(given)!r}")
    return given or {}


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
