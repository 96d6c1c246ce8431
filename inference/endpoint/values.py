"""Values of a request's fields: each is what its field takes, or refused in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from medusa_heads.files import half_character


def number(given: Mapping[str, Any], name: str, least: float, most: float) -> float | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number")
    if not least <= value <= most:  # NaN is none of them
        raise ValueError(f"{name} must be from {least} to {most}, got {value}")
    return float(value)


def of_kind(given: Mapping[str, Any], name: str, kind: type, usual: Any) -> Any:
    value = given.get(name, usual)
    if value is not usual and not (is_whole(value) if kind is int else isinstance(value, kind)):
        words = {str: "a text", bool: "true or false", int: "a whole number", dict: "an object"}
        raise ValueError(f"{name} must be {words[kind]}")
    return value


def is_same(value: Any, neutral: Any) -> bool:
    # To Python 0 is False too.
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def encodable(text: str, what: str) -> str:
    if half_character(text) is not None:
        raise ValueError(f"the {what} holds half of a character")
    return text
