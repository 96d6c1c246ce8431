"""The messages of a conversation, as a chat template is told them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from medusa_heads.data.messages import ROLES
from medusa_heads.inference.endpoint.values import encodable, of_kind

_NO_CALLS = "tool_calls must be a list of functions, each with a name and arguments as JSON"
_NO_TOOLS = "tools must be a list of objects, each of type function and with a function of a name"
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # as descriptions of answers name them
# Of a role's messages; an answer is sent back with the thoughts that it was told with.
_MORE = {"assistant": {"tool_calls", "reasoning_content"}, "tool": {"tool_call_id"}}
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
    more = _MORE.get(given["role"], set())
    if content is None and "tool_calls" in given:
        content = ""  # None would be written out
    if not isinstance(content, str):
        raise ValueError("a message's content must be text")
    if unknown := sorted(map(str, set(given) - {"role", "content", "name"} - more)):
        raise ValueError(f"a message has a role and a content, and here also {unknown[0]!r}")
    told = {"role": given["role"], "content": encodable(content, "content")}
    if "tool_calls" in given:
        told["tool_calls"] = calls_told(given["tool_calls"])
    for name in ("tool_call_id", "name", "reasoning_content"):  # some templates write them
        if name in given:
            told[name] = encodable(of_kind(given, name, str, None), name)
    return told


def calls_told(calls: Any) -> list[dict[str, Any]]:
    """Calls of an earlier answer as chat templates read them: arguments are an object there, and a
    text in JSON in requests."""
    told = []
    for call in calls if isinstance(calls, list) else [{}]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(_NO_CALLS)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError) as error:
                raise ValueError(_NO_CALLS) from error
        if not isinstance(arguments, Mapping):
            raise ValueError(_NO_CALLS)
        named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        written = {"name": function["name"], "arguments": arguments}
        told.append({**named, "type": "function", "function": written})
    return told


def tools_told(given: Mapping[str, Any]) -> list[Any] | None:
    """The tools of a request; None where there are none, or none is to be called."""
    tools, choice = given.get("tools", []), given.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise ValueError("tool_choice must be 'auto' or 'none': calls are not enforced here")
    for tool in tools if isinstance(tools, list) else [{}]:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        right = isinstance(function, Mapping) and isinstance(function.get("name"), str)
        if not right or tool.get("type") != "function":
            raise ValueError(_NO_TOOLS)
    if not tools or choice == "none":
        return None
    if given.get("parallel_tool_calls") is False:
        raise ValueError("parallel_tool_calls must be true: nothing limits calls here")
    return list(tools)


@dataclass(frozen=True)
class Calls:
    """Finds calls in an answer, as far as transformers knows how the target writes them."""

    tokenizer: Any
    template: Any  # the description of its answers, that transformers reads them by
    tools: list[Any]  # that it was told

    def of(self, prompt: str, written: str) -> dict[str, Any] | None:
        """The message of an answer that calls tools, as clients are told it; None where it calls
        none, or what it writes is no call. Both texts with their special tokens."""
        try:
            found = self.tokenizer.parse_response(
                written, self.template, prefix=prompt, tools=self.tools
            )
            calls = [_call(each["function"]) for each in found.get("tool_calls") or []]
        except Exception:  # whatever a parser makes of what a model writes
            return None
        if not calls:
            return None
        told = {"role": "assistant", "content": found.get("content") or None, "tool_calls": calls}
        thoughts = next((found[name] for name in _THOUGHTS if found.get(name)), None)
        return told | ({"reasoning_content": thoughts} if thoughts else {})


def _call(function: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ValueError: no client could read it, or send it back."""
    name, arguments = function["name"], function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise ValueError("a function without a name, or without an object of arguments")
    said = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    written = {"name": encodable(name, "name"), "arguments": encodable(said, "call")}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": written}


def answers_of(tokenizer: Any, model: Any) -> Any:
    """How transformers reads the target's answers: by the tokenizer's own description, or by the
    one that its server has of some architectures. None: it does not."""
    if (own := getattr(tokenizer, "response_template", None)) is not None:
        return own
    with suppress(ImportError):
        from transformers.cli.serving.utils import get_response_template

        return get_response_template(tokenizer, model)
    return None
