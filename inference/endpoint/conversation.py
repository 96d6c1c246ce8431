"""The messages of a conversation, as a chat template is told them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from medusa_heads.data.messages import ROLES
from medusa_heads.inference.endpoint.values import encodable, of_kind

_LONGEST_ROLE = 40  # characters of one that is quoted


def told_of(message: Any) -> dict[str, Any]:
    """With its content as one text; some clients send it in parts, or send an answer back with all
    that it does not have."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError("a message must be an object with a role and a content")
    if message["role"] not in ROLES:  # a template may write out any role, which no text here has
        role = message["role"][:_LONGEST_ROLE]
        raise ValueError(f"there is no role {role!r} here, only {', '.join(ROLES)}")
    given = {name: value for name, value in message.items() if value is not None and value != []}
    content = given.get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        content = "".join(part for part in parts if isinstance(part, str))
        if not all(isinstance(part, str) for part in parts):
            raise ValueError("a message's content must be text")
    if not isinstance(content, str):
        raise ValueError("a message's content must be text")
    if unknown := sorted(map(str, set(given) - {"role", "content", "name"})):
        raise ValueError(f"a message has a role and a content, and here also {unknown[0]!r}")
    told = {"role": given["role"], "content": encodable(content, "content")}
    if "name" in given:  # some templates write it
        told["name"] = encodable(of_kind(given, "name", str, None), "name")
    return told
