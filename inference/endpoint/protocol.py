"""Requests in the form of OpenAI's completions and chat completions.

What is not supported is refused by name, unless it is asked for nothing: an option that stands at
the value it has by default.
"""

from __future__ import annotations

import inspect
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from medusa_heads.data.chat import ask_ids
from medusa_heads.data.messages import ROLES
from medusa_heads.files import half_character
from medusa_heads.inference.endpoint.text import Text
from medusa_heads.target.target import TargetModel

_MOST_TOKENS = 4096  # of an answer that nobody limits
_LARGEST_COUNT = 1 << 31  # of tokens, where the target has no limit either
_MOST_STOPS = 16
_COMPLETION_TOKENS = 16  # OpenAI's own default
_LONGEST_ROLE = 40  # characters of one that is quoted
# Options that are understood when they ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
}
# Say nothing of the text.
_IGNORED = {"user", "metadata", "safety_identifier", "prompt_cache_key"}
_READ = {"model", "max_tokens", "seed", "stop", "stream", "stream_options"}
_READ |= {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
_OF_CHAT = {"max_completion_tokens", "chat_template_kwargs"}


@dataclass(frozen=True)
class Asked:
    """A request that can be answered.

    Attributes:
        model: the name of the one that is to answer, if it was given.
        with_usage: whether a stream ends with the counts.
    """

    text: Text
    model: str | None
    stream: bool
    with_usage: bool


class Reader:
    """Reads requests for texts of one target.

    Args:
        target: which writes them.
        tokenizer: its own; used by one thread at a time.
        longest: tokens of prompt and text at which a text ends that nobody limits; None: those of
            the target's context.
    """

    def __init__(self, target: TargetModel, tokenizer: Any, longest: int | None = None) -> None:
        self._target, self._tokenizer = target, tokenizer
        self._longest = target.max_positions if longest is None else longest
        own = target.model.generation_config.stop_strings or []
        self._stops = [own] if isinstance(own, str) else list(own)
        added = getattr(tokenizer, "added_tokens_decoder", {}).items()
        self._special = {entry.content: id for id, entry in added if entry.special}

    def read(self, raw: bytes, *, chat: bool) -> Asked:
        """Raises ValueError: what it asks for cannot be had, in one sentence."""
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the body is no JSON ({error})") from error
        if not isinstance(body, Mapping):
            raise ValueError("the body must be a JSON object")
        given = {name: value for name, value in body.items() if value is not None}
        source = "messages" if chat else "prompt"
        more = _OF_CHAT if chat else set()
        for name, value in given.items():
            if name in _NEUTRAL:
                if not any(_is_same(value, neutral) for neutral in _NEUTRAL[name]):
                    raise ValueError(f"{name} is not supported: leave it out")
            elif name not in _READ | _IGNORED | more | {source}:
                raise ValueError(f"{name!r} is no option of this endpoint")
        if source not in given:
            raise ValueError(f"{source} is missing")
        told = _of_kind(given, "chat_template_kwargs", dict, {})
        prompt = self._chat(given[source], told) if chat else self._prompt(given[source])
        # A tokenizer may have tokens of its own, and on a GPU one too many ends the process.
        readable = self._target.readable
        if (beyond := next((id for id in prompt if not 0 <= id < readable), None)) is not None:
            raise ValueError(f"the target has no token {beyond}: leave it out of the {source}")
        stream = _of_kind(given, "stream", bool, False)
        usage = _of_kind(given, "stream_options", dict, {})
        for name, value in usage.items():
            if name != "include_usage" and (name, value) != ("include_obfuscation", False):
                raise ValueError(f"stream_options has one option, include_usage, and not {name!r}")
        stops = _stops(given) or self._stops
        text = Text(
            prompt,
            self._max_tokens(given, len(prompt), chat=chat),
            # generate() has no tokenizer here with which to look for strings.
            _sampling(given) | ({"stop_strings": None} if self._stops else {}),
            _seed(given),
            stops,
            frozenset(self._special[each] for each in stops if each in self._special),
        )
        model = _of_kind(given, "model", str, None)
        return Asked(text, model, stream, _of_kind(usage, "include_usage", bool, False))

    def _prompt(self, prompt: Any) -> list[int]:
        if isinstance(prompt, list) and len(prompt) == 1 and not _is_whole(prompt[0]):
            prompt = prompt[0]
        if isinstance(prompt, str):
            ids: list[int] = self._tokenizer(_encodable(prompt, "prompt"))["input_ids"]
        elif isinstance(prompt, list) and all(map(_is_whole, prompt)):
            ids = prompt
        else:
            raise ValueError("prompt must be one text, or the token ids of one")
        if not ids:
            raise ValueError("the prompt is empty")
        return ids

    def _chat(self, messages: Any, told: Mapping[str, Any]) -> list[int]:
        if not self._tokenizer.chat_template:
            raise ValueError(
                "the target has no chat template: ask /v1/completions to continue a text, or serve "
                "the target with a chat_template.jinja in its folder"
            )
        if not isinstance(messages, list) or not messages:
            raise ValueError("messages must be a list of at least one message")
        if taken := sorted(set(told) & _taken(self._tokenizer.apply_chat_template)):
            raise ValueError(f"{taken[0]!r} is not among what chat_template_kwargs tell a template")
        return ask_ids(self._tokenizer, [_message(each) for each in messages], told)

    def _max_tokens(self, given: Mapping[str, Any], prompt: int, *, chat: bool) -> int:
        limit = self._longest
        room = _MOST_TOKENS if limit is None else limit - prompt
        usual = max(min(room, _MOST_TOKENS if chat else _COMPLETION_TOKENS), 1)
        asked = [name for name in ("max_completion_tokens", "max_tokens") if name in given]
        if len({repr(given[name]) for name in asked}) > 1:
            raise ValueError(f"{asked[0]} and {asked[1]} say different things: leave one out")
        most = _of_kind(given, asked[0], int, usual) if asked else usual
        if most < 1:
            raise ValueError(f"{asked[0]} must be at least 1, got {most}")
        # Positions are 64-bit numbers, and one that is none would fail all rows beside it.
        if most > _LARGEST_COUNT:
            raise ValueError(f"{asked[0]} must be at most {_LARGEST_COUNT}")
        self._target.check_length(prompt + most, f"{prompt} of the prompt, {most} new ones")
        return int(most)


def _message(message: Any) -> dict[str, Any]:
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
    told = {"role": given["role"], "content": _encodable(content, "content")}
    if "name" in given:  # some templates write it
        told["name"] = _encodable(_of_kind(given, "name", str, None), "name")
    return told


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of generate(); what is left open is as the model's own settings say."""
    temperature = _number(given, "temperature", 0, 2)
    top_p = _number(given, "top_p", 0, 1)
    if top_p == 0:
        raise ValueError("top_p must be above 0")
    top_k = _of_kind(given, "top_k", int, None)
    if top_k is not None and not -1 <= top_k <= _LARGEST_COUNT:
        raise ValueError(f"top_k must be from -1 to {_LARGEST_COUNT}, got {top_k}")
    penalty = _number(given, "repetition_penalty", 0.01, 100)
    always = {} if penalty is None else {"repetition_penalty": penalty}
    options = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": None if top_k is None else max(top_k, 0),  # -1 and 0: all tokens
        "min_p": _number(given, "min_p", 0, 1),
    }
    if temperature == 0:
        return always | {"do_sample": False}
    options = {name: value for name, value in options.items() if value is not None}
    return always | options | ({"do_sample": True} if options else {})


def _taken(method: Any) -> set[str]:
    """What a tokenizer's own method is told by name."""
    return set(inspect.signature(method).parameters)


def _seed(given: Mapping[str, Any]) -> int:
    seed = _of_kind(given, "seed", int, None)
    if seed is None:
        return secrets.randbits(62)
    if not -(2**63) <= seed < 2**63:
        raise ValueError("seed must be a number of 64 bits")
    return int(seed)


def _stops(given: Mapping[str, Any]) -> list[str]:
    stop = given.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(each, str) and each for each in stop):
        raise ValueError("stop must be a text or a list of texts, none of them empty")
    if len(stop) > _MOST_STOPS:
        raise ValueError(f"stop takes at most {_MOST_STOPS} texts, got {len(stop)}")
    return stop


def _number(given: Mapping[str, Any], name: str, least: float, most: float) -> float | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number")
    if not least <= value <= most:  # NaN is none of them
        raise ValueError(f"{name} must be from {least} to {most}, got {value}")
    return float(value)


def _of_kind(given: Mapping[str, Any], name: str, kind: type, usual: Any) -> Any:
    value = given.get(name, usual)
    if value is not usual and not (_is_whole(value) if kind is int else isinstance(value, kind)):
        words = {str: "a text", bool: "true or false", int: "a whole number", dict: "an object"}
        raise ValueError(f"{name} must be {words[kind]}")
    return value


def _is_same(value: Any, neutral: Any) -> bool:
    # To Python 0 is False too, but 0 logprobs are those of the tokens written.
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _encodable(text: str, what: str) -> str:
    if half_character(text) is not None:
        raise ValueError(f"the {what} holds half of a character")
    return text
