"""The target answers from behind an OpenAI-compatible server.

Two of its endpoints are spoken. `/completions` takes the prompt's own token ids, so what is asked
is exact. `/chat/completions` takes messages, which the server renders itself. Both answer with
text, and heads learn from tokens: the text is tokenised again, behind its prompt, and an answer
whose tokens do not spell the text is given up. Servers that can send token ids (vLLM can) spare
that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Literal

from medusa_heads.inference.regeneration.answers import (
    BROKEN_TEXT,
    CUT_TEXT,
    EMPTY,
    OTHER_PROMPT,
    OTHER_TOKENS,
    SERVER_ERROR,
    Answer,
    Finished,
    Sampling,
)
from medusa_heads.inference.regeneration.prompts import Prompt
from medusa_heads.inference.regeneration.server_connection import (
    SHOWN,
    DeathWatch,
    ServerConnection,
    Unreachable,
    words,
)

Endpoint = Literal["auto", "completions", "chat"]

_UNKNOWN_HERE = (400, 404, 405, 415, 422, 501)  # the server has no such endpoint, or no ids there
_DEAD_AFTER = 16  # failures in a row, of whatever kind, and not one answer between them


class ServerBackend:
    """Any server that speaks OpenAI's protocol and serves the target.

    Args:
        base_url: up to and including the version, such as `http://localhost:8000/v1`.
        model: the name that the server gives the target.
        tokenizer: the target's.
        ends: the tokens that end the target's text; the first one is put behind answers that ended,
            unless the server sent tokens.
        max_positions: the target's context, where it is known.
        endpoint: `auto` takes `/completions` with token ids where the server has it.
        token_ids: ask for the answer's tokens (`return_token_ids`, which not every server accepts).
        concurrency: requests under way at the same time.
        retries: of a request that failed in passing, with growing pauses.
        timeout: seconds without a byte before a request has failed.
        api_key_variable: environment variable that holds the API key, if any. The key itself is
            neither kept nor written anywhere.

    Raises:
        ValueError: a URL that is none, a size below one, or an unknown endpoint.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        tokenizer: Any,
        *,
        ends: Sequence[int],
        max_positions: int | None = None,
        endpoint: Endpoint = "auto",
        token_ids: bool = False,
        concurrency: int = 16,
        retries: int = 5,
        timeout: float = 600.0,
        api_key_variable: str = "OPENAI_API_KEY",
    ) -> None:
        if endpoint not in ("auto", "completions", "chat"):
            raise ValueError(f"endpoint must be auto, completions or chat, got {endpoint!r}")
        self.model = model
        self.max_positions = max_positions
        self._tokenizer = tokenizer
        self._ends = list(ends)
        self._endpoint = endpoint
        self._chosen: Endpoint = endpoint
        self._token_ids = token_ids
        self._concurrency = concurrency
        self._connection = ServerConnection(
            base_url,
            concurrency=concurrency,
            retries=retries,
            timeout=timeout,
            api_key_variable=api_key_variable,
        )
        self._dead = DeathWatch(_DEAD_AFTER)

    @property
    def base_url(self) -> str:
        """Where the server is."""
        return self._connection.base_url

    def describe(self) -> dict[str, Any]:
        """The server and its name for the target; which weights it holds, only it knows."""
        return {
            "backend": "server",
            "base_url": self.base_url,
            "model": self.model,
            "endpoint": self._endpoint,
            "ends": self._ends,
            "vocabulary": len(self._tokenizer),
        }

    def answer(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        finished: Finished,
        on_tokens: Callable[[int], object],
    ) -> None:
        """Answer the prompts, several at the same time. A prompt that fails is reported as failed.

        Raises:
            ValueError: the server is not there, refuses the key or the way of asking, or has
                stopped answering.
        """
        first, *rest = prompts
        if self._chosen == "auto":
            self._chosen = self._choose_endpoint(first, sampling)
        # One alone first: what is wrong with all of them is wrong with it.
        finished([(first, self._ask(first, sampling))])
        with ThreadPoolExecutor(self._concurrency) as pool:
            running = {pool.submit(self._ask, prompt, sampling): prompt for prompt in rest}
            try:
                for done in as_completed(running):
                    finished([(running.pop(done), done.result())])
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _choose_endpoint(self, prompt: Prompt, sampling: Sampling) -> Endpoint:
        request = self._request("completions", prompt, sampling)
        try:
            status, reply = self._connection.post("completions", request)
        except Unreachable as error:
            raise ValueError(f"no server answers at {self.base_url} ({error})") from error
        if status not in _UNKNOWN_HERE:
            return "completions"
        if prompt.messages is None:
            raise ValueError(
                f"{self.base_url} takes no token ids under /completions ({status}: "
                f"{words(reply)}), and prompts without messages cannot be asked otherwise"
            )
        return "chat"

    def _request(self, endpoint: str, prompt: Prompt, sampling: Sampling) -> dict[str, Any]:
        request: dict[str, Any] = {
            "model": self.model,
            "max_tokens": sampling.max_new_tokens,
            "temperature": 0.0 if prompt.greedy else sampling.temperature,
            "seed": prompt.number(sampling.seed) & 0x7FFFFFFF,
        }
        if self._token_ids:
            request["return_token_ids"] = True
        if endpoint == "completions":
            return request | {"prompt": [int(token) for token in prompt.input_ids]}
        if prompt.messages is None:
            raise ValueError(
                "the chat endpoint needs conversations, and the corpus has plain prompts: use the "
                "endpoint completions"
            )
        return request | {"messages": [dict(said) for said in prompt.messages]}

    def _ask(self, prompt: Prompt, sampling: Sampling) -> Answer:
        try:
            status, reply = self._connection.post(
                self._path, self._request(self._chosen, prompt, sampling)
            )
        except Unreachable as error:
            self._dead.failed(f"no server answers at {self.base_url} ({error})", at_once=True)
            return Answer(failure=SERVER_ERROR, detail=str(error))
        if status != 200:
            detail = f"{status}: {words(reply)}"
            self._dead.failed(f"{self.base_url} answers nothing but errors ({detail})")
            return Answer(failure=SERVER_ERROR, detail=detail)
        try:
            answer = self._read(prompt, reply)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            self._dead.failed(f"{self.base_url} does not speak the protocol ({error!r})")
            return Answer(failure=SERVER_ERROR, detail=f"not the protocol: {error!r}")
        self._dead.answered()
        return answer

    @property
    def _path(self) -> str:
        return "chat/completions" if self._chosen == "chat" else "completions"

    def _read(self, prompt: Prompt, reply: Any) -> Answer:
        choice = reply["choices"][0]
        usage = reply.get("usage") or {}
        ended = choice.get("finish_reason") == "stop"
        message = choice["message"] if self._chosen == "chat" else choice
        text = message["content" if self._chosen == "chat" else "text"] or ""
        if message.get("reasoning_content") or message.get("reasoning"):
            return Answer(failure=CUT_TEXT, detail="use the endpoint completions")
        remarks = []
        if usage.get("prompt_tokens") not in (None, len(prompt.input_ids)):
            remarks.append(OTHER_PROMPT)
        tokens = choice.get("token_ids")
        if not text and not tokens:
            return Answer(failure=EMPTY)
        if not tokens:
            tokens = self._tokens(prompt, text)
            if tokens is None:
                return Answer(failure=BROKEN_TEXT, detail=text[:SHOWN])
            made = usage.get("completion_tokens")
            if made not in (None, len(tokens), len(tokens) + ended):
                remarks.append(OTHER_TOKENS)
        if ended and self._ends and tokens[-1] not in self._ends:
            tokens = [*tokens, self._ends[0]]
        return Answer(tokens, remarks=tuple(remarks))

    def _tokens(self, prompt: Prompt, text: str) -> list[int] | None:
        """The tokens of an answer, None where they would not spell it.

        Tokenised behind the prompt, where tokenizers put no space of their own before the first
        word; alone only where prompt and answer would melt into one token.
        """
        asked = [int(token) for token in prompt.input_ids]
        before = self._tokenizer.decode(
            asked, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        whole = self._encode(before + text)
        tokens = whole[len(asked) :]
        if whole[: len(asked)] != asked:
            tokens = self._encode(text)
        spelt = self._tokenizer.decode(
            [*asked, *tokens], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return tokens if tokens and spelt == before + text else None

    def _encode(self, text: str) -> list[int]:
        encoded: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        return encoded
