"""The target answers from behind an OpenAI-compatible server.

Two of its endpoints are spoken. `/completions` takes the prompt's own token ids, so what is asked
is exact. `/chat/completions` takes messages, which the server renders itself. Both answer with
text, and heads learn from tokens: the text is tokenised again, behind its prompt, and an answer
whose tokens do not spell the text is given up. Servers that can send token ids (vLLM can) spare
that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from threading import Lock
from typing import Any, Literal

from medusa_heads.data.messages import with_arguments
from medusa_heads.inference.regeneration import answers
from medusa_heads.inference.regeneration.answers import (
    Answer,
    Answers,
    Backend,
    OnTokens,
    Sampling,
    Take,
    as_answer,
)
from medusa_heads.inference.regeneration.arguments import LONGEST_TIMEOUT
from medusa_heads.inference.regeneration.connections import Servers
from medusa_heads.inference.regeneration.prompts import Prompt
from medusa_heads.inference.regeneration.replies import (
    BROKEN_CHARACTER,
    SHOWN,
    complaint,
    spelling,
)
from medusa_heads.inference.regeneration.side_by_side import side_by_side

Endpoint = Literal["auto", "completions", "chat"]

_UNKNOWN_HERE = (400, 404, 405, 415, 422, 501)  # the server has no such endpoint, or no ids there
_REFUSED = (400, 413, 422)  # a prompt, such as one that is too long for the server
_SPECIAL = "skip_special_tokens"  # vLLM's and SGLang's, of texts; unless told otherwise, they do
_GREETING = ({"role": "user", "content": "Hello"},)
_DEAD_AFTER = 16  # failures in a row, of whatever kind, and not one answer between them


@dataclass(eq=False)
class ServerBackend(Backend):
    """Any server that speaks OpenAI's protocol and serves the target, or several of them: each
    request goes to the one with the fewest under way, an error in a row counting as one more, and
    one that is gone is left out.

    The API key is read from the environment; it is neither kept nor written anywhere. Raises
    ValueError: a URL or a key that is none, a size below one, or an unknown endpoint."""

    # Up to and including the version, such as `http://localhost:8000/v1`.
    base_url: str | Sequence[str]
    model: str  # the name that the server gives the target
    tokenizer: Any  # the target's
    _: KW_ONLY
    # The tokens that end the target's text; the first one is put behind answers that ended, unless
    # the server sent tokens, or says which one it was.
    ends: Sequence[int]
    max_positions: int | None = None
    vocab_size: int | None = None
    endpoint: Endpoint = "auto"  # `/completions` with token ids where the server has it
    token_ids: bool = False  # ask for `return_token_ids`, which not every server accepts
    concurrency: int = 16  # requests under way at the same time
    retries: int = 5  # of a request that failed in passing, with growing pauses
    timeout: float = 600.0  # seconds without a byte before a request has failed
    api_key_variable: str = "OPENAI_API_KEY"

    def __post_init__(self) -> None:
        urls = [self.base_url] if isinstance(self.base_url, str) else self.base_url
        if self.endpoint not in ("auto", "completions", "chat"):
            raise ValueError(f"endpoint must be auto, completions or chat, got {self.endpoint!r}")
        waits = 0 < self.timeout <= LONGEST_TIMEOUT
        if self.concurrency < 1 or self.retries < 0 or not waits:
            raise ValueError(
                "expected a concurrency of at least 1, retries of at least 0 and a timeout above 0 "
                f"and of at most {LONGEST_TIMEOUT:.0f}, got {self.concurrency}, {self.retries} and "
                f"{self.timeout}"
            )
        self._chosen = self.endpoint
        self._failures, self._lock = 0, Lock()
        self._lived, self._trying = False, Lock()
        self._tried: Endpoint | None = None
        self._asks_special = True
        self._servers = Servers(
            urls,
            retries=self.retries,
            timeout=self.timeout,
            connections=self.concurrency,
            key_variable=self.api_key_variable,
        )
        self._where = self._servers.where

    def describe(self) -> dict[str, Any]:
        """The server's name for the target; which weights it holds, only it knows. Its address is
        left out: the same target may come back at another."""
        return {
            "backend": "server",
            "model": self.model,
            "endpoint": self.endpoint,
            "ends": list(self.ends),
            "vocabulary": len(self.tokenizer),
        }

    def answer(self, take: Take, sampling: Sampling, on_tokens: OnTokens) -> Iterator[Answers]:
        """Answer the prompts, several at the same time. A prompt that fails is reported as failed.
        Raises ValueError: the server is not there, refuses the key or the way of asking, or has
        stopped answering."""
        for first in take(1):
            if self._chosen == "auto":
                self._chosen = self._choose_endpoint(first, sampling)
            # One alone first: what is wrong with all of them is wrong with it.
            yield [(first, self._ask(first, sampling))]
        ask = partial(self._ask, sampling=sampling)
        for answered in side_by_side(ask, take, self.concurrency):
            on_tokens(sum(len(answer.tokens) for _, answer in answered))
            yield answered

    def _choose_endpoint(self, prompt: Prompt, sampling: Sampling) -> Endpoint:
        status, reply = self._try("completions", prompt, sampling)
        if not status:
            raise ValueError(f"no server answers at {self._where} ({reply})")
        if status not in _UNKNOWN_HERE:
            return "completions"
        if prompt.talk is None:
            raise ValueError(
                f"{self._where} takes no token ids under /completions ({status}: "
                f"{complaint(reply)}), and prompts without messages cannot be asked otherwise"
            )
        return "chat"

    def _try(self, endpoint: Endpoint, prompt: Prompt, sampling: Sampling) -> tuple[int, Any]:
        """What the server says to the shortest question, asked as this one would be: what is wrong
        with the prompt itself says nothing of the server."""
        talk = prompt.talk and prompt.talk._replace(messages=_GREETING, tools=None)
        short = Prompt(prompt.input_ids[:1], prompt.greedy, prompt.row, talk)
        status, reply = self._post(endpoint, short, replace(sampling, max_new_tokens=1))
        with self._lock:
            self._tried, self._lived = endpoint, self._lived or status == 200
        return status, reply

    def _refuses_this_alone(self, prompt: Prompt, sampling: Sampling) -> bool:
        """Whether a server that refuses a prompt answers others."""
        with self._trying:
            if not self._lived and self._tried != self._chosen:
                self._try(self._chosen, prompt, sampling)
        return self._lived

    def _post(self, endpoint: str, prompt: Prompt, sampling: Sampling) -> tuple[int, Any]:
        """The status and the reply, as JSON or else as text; status 0 and why, if none came after
        all retries. Raises ValueError: the server refuses access, or the prompt has no messages to
        ask with."""
        request: dict[str, Any] = {
            "model": self.model,
            "max_tokens": sampling.max_new_tokens,
            "seed": prompt.number(sampling.seed) & 0x7FFFFFFF,
            **({"temperature": 0.0} if prompt.greedy else sampling.warpers()),
        }
        if self.token_ids:
            request["return_token_ids"] = True
        if endpoint == "completions":
            request["prompt"] = [int(token) for token in prompt.input_ids]
        elif prompt.talk is None:
            raise ValueError(
                "the chat endpoint needs conversations, and the corpus has plain prompts: use the "
                "endpoint completions"
            )
        else:
            said = (with_arguments(each, as_text=True) for each in prompt.talk.messages)
            request["messages"] = list(said)
            # By the names that vLLM and SGLang give them; without them, the server would render
            # another prompt than the one that the answer is stored behind.
            if prompt.talk.tools:
                request["tools"] = prompt.talk.tools
            if prompt.talk.variables:
                request["chat_template_kwargs"] = dict(prompt.talk.variables)
        path = f"/{'chat/' * (endpoint == 'chat')}completions"
        # A text without the special tokens within it, such as those before a channel or a call of a
        # tool, is not what the target wrote.
        if endpoint == "completions" and self._asks_special:
            status, reply = self._servers.post(path, json.dumps(request | {_SPECIAL: False}))
            if status not in _REFUSED or _SPECIAL not in str(reply):
                return status, reply
            self._asks_special = False  # it refuses what it does not know
        return self._servers.post(path, json.dumps(request))

    def _ask(self, prompt: Prompt, sampling: Sampling) -> Answer:
        status, reply = self._post(self._chosen, prompt, sampling)
        if not status:
            what = f"no server answers at {self._where} ({reply})"
            return self._failed(reply, what, at_once=True)
        if status != 200:
            detail = f"{status}: {complaint(reply)}"
            if status in _REFUSED and self._refuses_this_alone(prompt, sampling):
                return Answer(failure=answers.REFUSED, detail=detail)
            return self._failed(detail, f"{self._where} answers nothing but errors ({detail})")
        try:
            answer = self._read(prompt, reply, sampling)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            what = f"{self._where} does not speak the protocol ({error!r})"
            return self._failed(f"not the protocol: {error!r}", what)
        with self._lock:
            self._failures, self._lived = 0, True
        return answer

    def _failed(self, detail: str, what: str, *, at_once: bool = False) -> Answer:
        """What stands in the place of an answer. Where the server has gone for good, asking on
        would take hours and bring nothing; one that never answered is not waited for. Raises
        ValueError: the server is given up."""
        with self._lock:
            self._failures += 1
            if self._failures >= _DEAD_AFTER or (at_once and not self._lived):
                raise ValueError(
                    f"{what}: what was answered is kept, and the same command goes on from there"
                )
        return Answer(failure=answers.SERVER_ERROR, detail=detail)

    def _read(self, prompt: Prompt, reply: Any, sampling: Sampling) -> Answer:
        choice = reply["choices"][0]
        usage = reply.get("usage") or {}
        ended = choice.get("finish_reason") == "stop"
        message = choice["message"] if self._chosen == "chat" else choice
        text = message["content" if self._chosen == "chat" else "text"] or ""
        if message.get("reasoning_content") or message.get("reasoning"):
            return Answer(failure=answers.CUT_TEXT, detail="use the endpoint completions")
        if message.get("tool_calls"):
            return Answer(failure=answers.CUT_CALLS, detail="use the endpoint completions")
        remarks = []
        if usage.get("prompt_tokens") not in (None, len(prompt.input_ids)):
            remarks.append(answers.OTHER_PROMPT)
        tokens = choice.get("token_ids")
        known = range(self.vocab_size or 1 << 31)
        if tokens and not all(type(token) is int and token in known for token in tokens):
            raise ValueError("token_ids that the target does not have")
        if not text and not tokens:
            return Answer(failure=answers.EMPTY)
        if not tokens:
            # Where the last token holds half of a character, text says no more than that.
            whole = text if ended else text.rstrip(BROKEN_CHARACTER)
            tokens = spelling(self.tokenizer, prompt, whole)
            if tokens is None:
                return Answer(failure=answers.BROKEN_TEXT, detail=text[:SHOWN])
            # The target stops at an end: one within its text is spelt by other tokens.
            if any(token in self.ends for token in tokens[:-1]):
                return Answer(failure=answers.BROKEN_TEXT, detail=text[:SHOWN])
            made = usage.get("completion_tokens")
            if made not in (None, len(tokens), len(tokens) + ended):
                remarks.append(answers.OTHER_TOKENS)
        if ended and self.ends and tokens[-1] not in self.ends:
            # As vLLM and SGLang call it; a stop string is no token.
            told = choice.get("stop_reason"), choice.get("matched_stop")
            tokens = [*tokens, next((each for each in told if each in self.ends), self.ends[0])]
        answer = as_answer(tokens, self.ends)
        if answer.failure is not None:
            return answer
        return self._too_long(prompt, answer, sampling) or replace(answer, remarks=tuple(remarks))

    def _too_long(self, prompt: Prompt, answer: Answer, sampling: Sampling) -> Answer | None:
        """The failure of an answer with more tokens than a server was to make. The end token is one
        more, where a server does not count it."""
        count, total = len(answer.tokens), len(prompt.input_ids) + len(answer.tokens)
        detail = None
        if count > sampling.max_new_tokens + (answer.tokens[-1] in self.ends):
            detail = f"{count} tokens, {sampling.max_new_tokens} were asked for"
        elif self.max_positions is not None and total > self.max_positions:
            detail = f"{total} tokens with the prompt, the context is {self.max_positions}"
        return None if detail is None else Answer(failure=answers.OVERLONG, detail=detail)
