"""Requests in the form of OpenAI's completions and chat completions.

What is not supported is refused by name, unless it is asked for nothing: an option that stands at
the value it has by default.
"""

from __future__ import annotations

import inspect
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from medusa_heads.data.chat import ask_ids
from medusa_heads.data.encoding import prompt_ids
from medusa_heads.data.prompts import stop_ids
from medusa_heads.inference.endpoint.conversation import Calls, answers_of, told_of, tools_told
from medusa_heads.inference.endpoint.logprobs import MOST
from medusa_heads.inference.endpoint.text import Text
from medusa_heads.inference.endpoint.values import encodable, is_same, is_whole, number, of_kind
from medusa_heads.target.target import TargetModel

_MOST_TOKENS = 4096  # of an answer that nobody limits
_LARGEST_COUNT = 1 << 31  # of tokens, where the target has no limit either
MOST_TEXTS = 128
"""Of a request, as of OpenAI's `n`."""
_MOST_STOPS = 16
_COMPLETION_TOKENS = 16  # OpenAI's own default
# Options that are understood when they ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
}
# Say nothing of the text.
_IGNORED = {"user", "metadata", "safety_identifier", "prompt_cache_key"}
_READ = {"model", "n", "logprobs", "echo", "max_tokens", "seed", "stop", "stream", "stream_options"}
_READ |= {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
_OF_CHAT = {"tools", "tool_choice", "top_logprobs", "max_completion_tokens", "chat_template_kwargs"}


@dataclass(frozen=True)
class Asked:
    """A request that can be answered."""

    texts: Sequence[Text]  # its choices in order: those of the first prompt, then those of the next
    choices: int  # of each prompt
    model: str | None  # the name of the one that is to answer, if it was given
    stream: bool
    with_usage: bool  # whether a stream ends with the counts


class Reader:
    """Reads requests for texts of one target.

    Args:
        target: which writes them.
        tokenizer: its own; used by one thread at a time.
        longest: tokens of prompt and text at which a text ends that nobody limits; None: those of
            the target's context.
        most_texts: that one request may ask for.
    """

    def __init__(
        self,
        target: TargetModel,
        tokenizer: Any,
        longest: int | None = None,
        most_texts: int = MOST_TEXTS,
    ) -> None:
        self._target, self._tokenizer = target, tokenizer
        self._most_texts = most_texts
        self._longest = target.max_positions if longest is None else longest
        own = target.model.generation_config.stop_strings or []
        self._ends = frozenset(stop_ids(target.model))
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
                if not any(is_same(value, neutral) for neutral in _NEUTRAL[name]):
                    raise ValueError(f"{name} is not supported: leave it out")
            elif name not in _READ | _IGNORED | more | {source}:
                raise ValueError(f"{name!r} is no option of this endpoint")
        if source not in given:
            raise ValueError(f"{source} is missing")
        told = of_kind(given, "chat_template_kwargs", dict, {})
        tools = tools_told(given)
        choices = of_kind(given, "n", int, 1)
        if choices < 1:
            raise ValueError(f"n must be at least 1, got {choices}")
        sources = [given[source]] if chat else _prompts(given["prompt"])
        if len(sources) * choices > self._most_texts:
            raise ValueError(
                f"a request may ask for {self._most_texts} texts here (prompts times n), and this "
                f"one asks for {len(sources) * choices}: ask for fewer at a time"
            )
        prompts = [
            self._chat(each, told, tools) if chat else self._prompt(each) for each in sources
        ]
        # A tokenizer may have tokens of its own, and on a GPU one too many ends the process.
        readable = self._target.readable
        for id in chain.from_iterable(prompts):
            if not 0 <= id < readable:
                raise ValueError(f"the target has no token {id}: leave it out of the {source}")
        stream = of_kind(given, "stream", bool, False)
        usage = of_kind(given, "stream_options", dict, {})
        for name, value in usage.items():
            if name != "include_usage" and (name, value) != ("include_obfuscation", False):
                raise ValueError(f"stream_options has one option, include_usage, and not {name!r}")
        stops = _stops(given) or self._stops
        # generate() has no tokenizer here with which to look for strings.
        options = _sampling(given) | ({"stop_strings": None} if self._stops else {})
        seed = of_kind(given, "seed", int, None)
        if seed is not None and not -(2**63) <= seed < 2**63:
            raise ValueError("seed must be a number of 64 bits")
        logprobs = _logprobs(given, chat=chat)
        if (echo := of_kind(given, "echo", bool, False)) and chat:
            raise ValueError("echo is of completions alone: leave it out")
        texts = [
            Text(
                prompt,
                self._max_tokens(given, len(prompt), chat=chat),
                options,
                secrets.randbits(62) if seed is None else seed + choice,
                stops,
                frozenset(self._special[each] for each in stops if each in self._special),
                logprobs,
                echo,
                self._calls(tools),
                self._ends,
            )
            for prompt in prompts
            for choice in range(choices)
        ]
        model = of_kind(given, "model", str, None)
        return Asked(texts, choices, model, stream, of_kind(usage, "include_usage", bool, False))

    def _prompt(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            prompt = prompt_ids(self._tokenizer, encodable(prompt, "prompt"))
        if not prompt:
            raise ValueError("the prompt is empty")
        return list(map(int, prompt))

    def _chat(self, messages: Any, told: Mapping[str, Any], tools: list[Any] | None) -> list[int]:
        if not self._tokenizer.chat_template:
            raise ValueError(
                "the target has no chat template: ask /v1/completions to continue a text, or serve "
                "the target with a chat_template.jinja in its folder"
            )
        if not isinstance(messages, list) or not messages:
            raise ValueError("messages must be a list of at least one message")
        if taken := sorted(set(told) & _taken(self._tokenizer.apply_chat_template)):
            raise ValueError(f"{taken[0]!r} is not among what chat_template_kwargs tell a template")
        said = [told_of(each) for each in messages]
        template = self._tokenizer.get_chat_template(tools=tools)
        called = any("tool_calls" in each for each in said)
        for name, given in (("tools", tools), ("tool_calls", called)):
            if given and name not in template:
                raise ValueError(f"the target's chat template knows no {name}: leave them out")
        return ask_ids(self._tokenizer, said, told, tools)

    def _calls(self, tools: list[Any] | None) -> Calls | None:
        if tools is None:
            return None
        template = answers_of(self._tokenizer, self._target.model)
        return None if template is None else Calls(self._tokenizer, template, tools)

    def _max_tokens(self, given: Mapping[str, Any], prompt: int, *, chat: bool) -> int:
        limit = self._longest
        room = _MOST_TOKENS if limit is None else limit - prompt
        usual = max(min(room, _MOST_TOKENS if chat else _COMPLETION_TOKENS), 1)
        asked = [name for name in ("max_completion_tokens", "max_tokens") if name in given]
        if len({repr(given[name]) for name in asked}) > 1:
            raise ValueError(f"{asked[0]} and {asked[1]} say different things: leave one out")
        most = of_kind(given, asked[0], int, usual) if asked else usual
        if most < 1:
            raise ValueError(f"{asked[0]} must be at least 1, got {most}")
        # Positions are 64-bit numbers, and one that is none would fail all rows beside it.
        if most > _LARGEST_COUNT:
            raise ValueError(f"{asked[0]} must be at most {_LARGEST_COUNT}")
        self._target.check_length(prompt + most, f"{prompt} of the prompt, {most} new ones")
        return int(most)


def _prompts(prompt: Any) -> list[str | list[int]]:
    """Each a text, or token ids."""
    prompts = prompt if isinstance(prompt, list) and not all(map(is_whole, prompt)) else [prompt]
    for each in prompts:
        if not isinstance(each, str) and not (isinstance(each, list) and all(map(is_whole, each))):
            raise ValueError("prompt must be a text, or the token ids of one, or a list of such")
    return prompts


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of generate(); what is left open is as the model's own settings say."""
    temperature = number(given, "temperature", 0, 2)
    top_p = number(given, "top_p", 0, 1)
    if top_p == 0:
        raise ValueError("top_p must be above 0")
    top_k = of_kind(given, "top_k", int, None)
    if top_k is not None and not -1 <= top_k <= _LARGEST_COUNT:
        raise ValueError(f"top_k must be from -1 to {_LARGEST_COUNT}, got {top_k}")
    penalty = number(given, "repetition_penalty", 0.01, 100)
    always = {} if penalty is None else {"repetition_penalty": penalty}
    options = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": None if top_k is None else max(top_k, 0),  # -1 and 0: all tokens
        "min_p": number(given, "min_p", 0, 1),
    }
    if temperature == 0:
        return always | {"do_sample": False}
    options = {name: value for name, value in options.items() if value is not None}
    return always | options | ({"do_sample": True} if options else {})


def _taken(method: Any) -> set[str]:
    """What a tokenizer's own method is told by name."""
    return set(inspect.signature(method).parameters)


def _logprobs(given: Mapping[str, Any], *, chat: bool) -> int | None:
    """How many likeliest tokens are told of each token; None: nothing is."""
    name, most = "logprobs", None
    if chat:
        name, most = "top_logprobs", of_kind(given, "top_logprobs", int, 0)
        if not of_kind(given, "logprobs", bool, False):
            if most:
                raise ValueError("top_logprobs is of logprobs: true, which is not asked for")
            return None
    elif given.get("logprobs") is not False:
        most = of_kind(given, "logprobs", int, None)
    if most is not None and not 0 <= most <= MOST:
        raise ValueError(f"{name} must be from 0 to {MOST}, got {most}")
    return most


def _stops(given: Mapping[str, Any]) -> list[str]:
    stop = given.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(each, str) and each for each in stop):
        raise ValueError("stop must be a text or a list of texts, none of them empty")
    if len(stop) > _MOST_STOPS:
        raise ValueError(f"stop takes at most {_MOST_STOPS} texts, got {len(stop)}")
    return stop
