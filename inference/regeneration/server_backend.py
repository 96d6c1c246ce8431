"""The target answers from behind an OpenAI-compatible server.

Two of its endpoints are spoken. `/completions` takes the prompt's own token ids, so what is asked
is exact. `/chat/completions` takes messages, which the server renders itself. Both answer with
text, and heads learn from tokens: the text is tokenised again, behind its prompt, and an answer
whose tokens do not spell the text is given up. Servers that can send token ids (vLLM can) spare
that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from functools import partial
from queue import SimpleQueue
from threading import Lock
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from urllib3 import PoolManager, ProxyManager, Retry, Timeout
from urllib3.exceptions import HTTPError

from medusa_heads.files import parse_json
from medusa_heads.inference.regeneration import answers
from medusa_heads.inference.regeneration.answers import (
    Answer,
    Answers,
    Backend,
    OnTokens,
    Sampling,
    Take,
)
from medusa_heads.inference.regeneration.prompts import Prompt

Endpoint = Literal["auto", "completions", "chat"]

_RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
_NOT_FOR_US = (401, 403)
_UNKNOWN_HERE = (400, 404, 405, 415, 422, 501)  # the server has no such endpoint, or no ids there
_LONGEST_PAUSE = 30.0  # seconds between two tries
_DEAD_AFTER = 16  # failures in a row, of whatever kind, and not one answer between them
_SHOWN = 200  # characters of a server's own words


@dataclass(eq=False)
class ServerBackend(Backend):
    """Any server that speaks OpenAI's protocol and serves the target.

    The API key is read from the environment; it is neither kept nor written anywhere. Raises
    ValueError: a URL that is none, a size below one, or an unknown endpoint."""

    base_url: str  # up to and including the version, such as `http://localhost:8000/v1`
    model: str  # the name that the server gives the target
    tokenizer: Any  # the target's
    _: KW_ONLY
    # The tokens that end the target's text; the first one is put behind answers that ended, unless
    # the server sent tokens.
    ends: Sequence[int]
    max_positions: int | None = None
    endpoint: Endpoint = "auto"  # `/completions` with token ids where the server has it
    token_ids: bool = False  # ask for `return_token_ids`, which not every server accepts
    concurrency: int = 16  # requests under way at the same time
    retries: int = 5  # of a request that failed in passing, with growing pauses
    timeout: float = 600.0  # seconds without a byte before a request has failed
    api_key_variable: str = "OPENAI_API_KEY"

    def __post_init__(self) -> None:
        url = urlsplit(self.base_url)
        if self.endpoint not in ("auto", "completions", "chat"):
            raise ValueError(f"endpoint must be auto, completions or chat, got {self.endpoint!r}")
        if url.scheme not in ("http", "https") or not url.netloc:
            raise ValueError(
                f"expected a base_url such as http://localhost:8000/v1, got {self.base_url!r}"
            )
        if url.username or url.password:
            raise ValueError(
                f"base_url holds a password: put the key into the variable {self.api_key_variable}"
            )
        if self.concurrency < 1 or self.retries < 0 or self.timeout <= 0:
            raise ValueError(
                "expected a concurrency of at least 1, retries of at least 0 and a timeout above "
                f"0, got {self.concurrency}, {self.retries} and {self.timeout}"
            )
        self.base_url = self.base_url.rstrip("/")
        self._chosen = self.endpoint
        self._failures, self._lived, self._lock = 0, False, Lock()
        retry = Retry(
            total=self.retries,
            read=min(self.retries, 2),  # of requests that reached it, and may have run into timeout
            status_forcelist=_RETRIED,
            allowed_methods=None,  # POST too: an answer asked for twice does no harm
            backoff_factor=0.5,
            backoff_max=_LONGEST_PAUSE,
            backoff_jitter=0.5,
            raise_on_status=False,
        )
        pool: dict[str, Any] = {"maxsize": self.concurrency, "block": True, "retries": retry}
        pool["timeout"] = Timeout(self.timeout)
        proxy = None if proxy_bypass(url.hostname or "") else getproxies().get(url.scheme)
        self._pool = ProxyManager(proxy, **pool) if proxy else PoolManager(**pool)

    def describe(self) -> dict[str, Any]:
        """The server and its name for the target; which weights it holds, only it knows."""
        return {
            "backend": "server",
            "base_url": self.base_url,
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
        finished: SimpleQueue[Future[Answer]] = SimpleQueue()
        running: dict[Future[Answer], Prompt] = {}
        with ThreadPoolExecutor(self.concurrency) as pool:
            try:
                while True:
                    for prompt in take(2 * self.concurrency - len(running)):
                        future = pool.submit(self._ask, prompt, sampling)
                        running[future] = prompt
                        future.add_done_callback(finished.put)
                    if not running:
                        return
                    made = [finished.get()]
                    while not finished.empty():
                        made.append(finished.get())
                    answered = [(running.pop(future), future.result()) for future in made]
                    on_tokens(sum(len(answer.tokens) for _, answer in answered))
                    yield answered
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _choose_endpoint(self, prompt: Prompt, sampling: Sampling) -> Endpoint:
        status, reply = self._post("completions", prompt, sampling)
        if not status:
            raise ValueError(f"no server answers at {self.base_url} ({reply})")
        if status not in _UNKNOWN_HERE:
            return "completions"
        if prompt.messages is None:
            raise ValueError(
                f"{self.base_url} takes no token ids under /completions ({status}: "
                f"{_words(reply)}), and prompts without messages cannot be asked otherwise"
            )
        return "chat"

    def _post(self, endpoint: str, prompt: Prompt, sampling: Sampling) -> tuple[int, Any]:
        """The status and the reply, as JSON or else as text; status 0 and why, if none came after
        all retries. Raises ValueError: the server refuses access, or the prompt has no messages to
        ask with."""
        request: dict[str, Any] = {
            "model": self.model,
            "max_tokens": sampling.max_new_tokens,
            "temperature": 0.0 if prompt.greedy else sampling.temperature,
            "seed": prompt.number(sampling.seed) & 0x7FFFFFFF,
        }
        if self.token_ids:
            request["return_token_ids"] = True
        if endpoint == "completions":
            request["prompt"] = [int(token) for token in prompt.input_ids]
        elif prompt.messages is None:
            raise ValueError(
                "the chat endpoint needs conversations, and the corpus has plain prompts: use the "
                "endpoint completions"
            )
        else:
            request["messages"] = [dict(said) for said in prompt.messages]
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self.api_key_variable):
            headers["Authorization"] = f"Bearer {key}"
        url = f"{self.base_url}/{'chat/' * (endpoint == 'chat')}completions"
        try:
            response = self._pool.request("POST", url, body=json.dumps(request), headers=headers)
        except HTTPError as error:
            return 0, type(getattr(error, "reason", None) or error).__name__
        if response.status in _NOT_FOR_US:
            raise ValueError(
                f"{self.base_url} refuses access ({response.status}): put the API key into the "
                f"environment variable {self.api_key_variable}"
            )
        text = response.data.decode("utf-8", "replace")
        try:
            return response.status, parse_json(text)
        except ValueError:
            return response.status, text

    def _ask(self, prompt: Prompt, sampling: Sampling) -> Answer:
        status, reply = self._post(self._chosen, prompt, sampling)
        if not status:
            what = f"no server answers at {self.base_url} ({reply})"
            return self._failed(reply, what, at_once=True)
        if status != 200:
            detail = f"{status}: {_words(reply)}"
            return self._failed(detail, f"{self.base_url} answers nothing but errors ({detail})")
        try:
            answer = self._read(prompt, reply)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            what = f"{self.base_url} does not speak the protocol ({error!r})"
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

    def _read(self, prompt: Prompt, reply: Any) -> Answer:
        choice = reply["choices"][0]
        usage = reply.get("usage") or {}
        ended = choice.get("finish_reason") == "stop"
        message = choice["message"] if self._chosen == "chat" else choice
        text = message["content" if self._chosen == "chat" else "text"] or ""
        if message.get("reasoning_content") or message.get("reasoning"):
            return Answer(failure=answers.CUT_TEXT, detail="use the endpoint completions")
        remarks = []
        if usage.get("prompt_tokens") not in (None, len(prompt.input_ids)):
            remarks.append(answers.OTHER_PROMPT)
        tokens = choice.get("token_ids")
        if not text and not tokens:
            return Answer(failure=answers.EMPTY)
        if not tokens:
            tokens = self._tokens(prompt, text)
            if tokens is None:
                return Answer(failure=answers.BROKEN_TEXT, detail=text[:_SHOWN])
            made = usage.get("completion_tokens")
            if made not in (None, len(tokens), len(tokens) + ended):
                remarks.append(answers.OTHER_TOKENS)
        if ended and self.ends and tokens[-1] not in self.ends:
            tokens = [*tokens, self.ends[0]]
        return Answer(tokens, remarks=tuple(remarks))

    def _tokens(self, prompt: Prompt, text: str) -> list[int] | None:
        """The tokens of an answer, None where they would not spell it.

        Tokenised behind the prompt, where tokenizers put no space of their own before the first
        word; alone only where prompt and answer would melt into one token.
        """
        decode = partial(
            self.tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        encode = partial(self.tokenizer, add_special_tokens=False, verbose=False)
        asked = [int(token) for token in prompt.input_ids]
        before = decode(asked)
        whole = encode(before + text)["input_ids"]
        tokens: list[int] = whole[len(asked) :]
        if whole[: len(asked)] != asked:
            tokens = encode(text)["input_ids"]
        return tokens if tokens and decode([*asked, *tokens]) == before + text else None


def _words(reply: Any) -> str:
    """What a server says is wrong."""
    if isinstance(reply, dict):
        error = reply.get("error", reply)
        reply = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(reply).split())[:_SHOWN]
