"""Messages of a conversation, as corpora hold them: with known roles, and with texts alone."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from medusa_heads.data.bad_rows import BadRow
from medusa_heads.files import parse_json

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of a `messages` column, as chat templates know them."""

SYSTEM_COLUMN = "system"
"""Of a table in the form of ShareGPT: what the system says before the conversation."""

_INSTRUCTORS = ("system", "developer")
_SAME_ROLES = {role: role for role in ROLES}
_SHAREGPT_ROLES = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "function_response"), "tool"),
    **_SAME_ROLES,
}
SPEAKERS = ("user", "assistant")
"""Roles that must say something; a tool may answer with nothing, a system may be left empty."""


def messages_of(
    value: Any,
    column: str,
    say_something: Collection[str] = SPEAKERS,
    *,
    filled: bool = True,
    shown: bool = False,
) -> list[dict[str, Any]]:
    """The messages of a column, all with a role and a text as content; a BadRow where they are
    none, a role is unknown, a content holds something else than text, a weight is neither 0 nor 1,
    or a message of one of the roles `say_something` is empty. `filled`: a list
    that is no JSON is of a table. `shown`: a content with an image stays a list of parts."""
    messages = [
        _message(message, i, column, say_something, shown)
        for i, message in enumerate(_list(value, column, filled))
    ]
    if not messages:
        raise BadRow(f"{column!r} is empty")
    return messages


def behind_system(messages: list[dict[str, Any]], text: Any) -> list[dict[str, Any]]:
    """The same behind a system's message of that text, unless they have one or it is empty, as a
    row may have it beside its messages; a BadRow where it is something else."""
    if text is not None and not isinstance(text, str):
        raise BadRow(f"{SYSTEM_COLUMN!r} is of type {type(text).__name__}, expected a text")
    if not (text or "").strip() or any(said["role"] in _INSTRUCTORS for said in messages):
        return messages
    return [{"role": "system", "content": text}, *messages]


def parted(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose text stands in a list of one part."""
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**message, "content": parts}


def with_arguments(message: Mapping[str, Any], *, as_text: bool) -> dict[str, Any]:
    """A message with the arguments of its calls as objects, or as texts in JSON: corpora hold
    either, and a chat template writes one of them as its model does. What is neither stays."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    return {**message, "tool_calls": [_call(call, as_text) for call in calls]}


def _call(call: Any, as_text: bool) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call(call["function"], as_text)}
    given = call.get("arguments")
    if as_text and isinstance(given, Mapping):
        return {**call, "arguments": json.dumps(given, ensure_ascii=False)}
    if not as_text and isinstance(given, str):
        with suppress(ValueError):
            if isinstance(read := parse_json(given), dict):
                return {**call, "arguments": read}
    return call


def without_calls(message: Mapping[str, Any], text: str) -> dict[str, Any] | None:
    """A message that calls tools, without its calls, where a template may have left them out of the
    text that it made: all but where the message itself says them, or says nothing and that text
    names one of them. It may write calls by their ids, as Kimi's does."""
    calls, said = message.get("tool_calls"), message["content"]
    if not isinstance(calls, list) or not calls:
        return None
    inner = [call.get("function", call) if isinstance(call, Mapping) else {} for call in calls]
    words = [_words(one) if isinstance(one, Mapping) else [] for one in inner]
    if said.strip():
        says = all(each and all(word in said for word in each) for each in words)
    else:
        says = any(each and each[0] in text for each in words)
    return None if says else {key: value for key, value in message.items() if key != "tool_calls"}


def _words(call: Mapping[str, Any]) -> list[str]:
    """The name of a call, and those of its arguments."""
    given = call.get("arguments")
    if isinstance(given, str):
        with suppress(ValueError):
            given = parse_json(given)
    name = call.get("name")
    return [name, *(given if isinstance(given, Mapping) else ())] if isinstance(name, str) else []


def tools_of(value: Any, *, filled: bool = True) -> list[Any] | None:
    """The tools of a row, None where it has none, which templates tell from an empty list; a BadRow
    where they are no list. `filled` is that of `messages_of`."""
    return (_list(value, "tools", filled) or None) if value else None


def _list(value: Any, column: str, filled: bool) -> list[Any]:
    """A list, or a text that is one in JSON (tables cannot hold lists of mixed things)."""
    filled = filled and not isinstance(value, str)
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise BadRow(f"{column!r} is a text and not a list in JSON") from error
    if not isinstance(value, list):
        raise BadRow(f"{column!r} is of type {type(value).__name__}, expected a list")
    return _without_none(value) if filled else value


def _without_none(value: Any) -> Any:
    """The same without keys of None: tables give each mapping the keys of all others, and templates
    would write them out."""
    if isinstance(value, Mapping):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list) else value


def _message(
    message: Any, index: int, column: str, say_something: Collection[str], shown: bool
) -> dict[str, Any]:
    where = f"message {index} of {column!r}"
    if not isinstance(message, Mapping):
        raise BadRow(f"{where} is of type {type(message).__name__}, expected a mapping")
    # Templates would take None for a value.
    found = {key: value for key, value in message.items() if value is not None}
    roles = _SAME_ROLES
    if "from" in found and "role" not in found:
        found = {"role": found.pop("from"), "content": found.pop("value", None), **found}
        roles = _SHAREGPT_ROLES
    role = found.get("role")
    if not isinstance(role, str) or role not in roles:
        raise BadRow(f"{where} has the role {role!r}, expected one of {list(roles)}")
    found["role"] = roles[role]
    weight = found.get("weight", 1)
    if found["role"] == "assistant" and (type(weight) not in (int, float) or weight not in (0, 1)):
        raise BadRow(f"{where} has the weight {weight!r}, expected 0 or 1")
    if found["role"] == "assistant":
        # Templates ask whether there are calls, not whether there is one.
        calls = _calls(found.pop("tool_calls", None), index)
        found |= {"tool_calls": calls} if calls else {}
    # Calls come without content, and templates write out what is given: None as 'None'.
    found["content"] = content = _content(found.get("content"), where)
    if isinstance(content, list) and not (shown and found["role"] != "assistant"):
        raise BadRow(f"{where} ({role}) holds a part of type 'image', expected only texts")
    empty = isinstance(content, str) and not content.strip() and not found.get("tool_calls")
    if empty and found["role"] in say_something:
        raise BadRow(f"{where} ({role}) is empty")
    return found


def _calls(value: Any, index: int) -> list[Any]:
    """The calls of a message; tables and exports have many words for none."""
    if value is None or (isinstance(value, str) and value.strip() in ("", "None", "null", "{}")):
        return []
    if isinstance(value, Mapping) and not any(value.values()):
        return []
    given = [*value] if isinstance(value, tuple) else value
    return _list(given, f"tool_calls of message {index}", False)


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    """Content as one text, or as parts where one of them is an image. Some templates would write a
    list of texts as Python does, or not at all."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRow(f"{where} has content of type {type(content).__name__}, expected a text")
    texts, parts = [], []
    for part in content:
        text = part
        if isinstance(part, Mapping):
            kind = part.get("type") or ("text" if "text" in part else next(iter(part), ""))
            if kind == "image":
                parts.append({**part, "type": kind})
                continue
            if kind != "text":
                raise BadRow(f"{where} holds a part of type {kind!r}, expected only texts")
            text = part.get("text")
        if not isinstance(text, str):
            raise BadRow(f"{where} holds a part that is {type(text).__name__}, expected a text")
        texts.append(text)
        parts.append({"type": "text", "text": text})
    return "".join(texts) if len(texts) == len(parts) else parts
