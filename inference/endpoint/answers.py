"""Answers in the form of OpenAI's, and what is said in place of one."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from medusa_heads.inference.endpoint.logprobs import Weighed, of_chat, of_completion
from medusa_heads.inference.endpoint.text import Ending, Text

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def refused(status: int, said: str) -> dict[str, Any]:
    """Why there is no answer. The code is a text, as typed clients want it: of a stream that has
    begun it alone says the status."""
    usual = "invalid_request_error" if status < 500 else "server_error"
    kind = _TYPES.get(status, usual)
    said = said.encode(errors="backslashreplace").decode()  # it may quote half of a character
    return {"error": {"message": said, "type": kind, "param": None, "code": str(status)}}


class Answer:
    """The answer to one request, whole or in pieces.

    Args:
        name: of the model.
        texts: that are asked for, in the order of their choices.
        choices: of each prompt.
        chat: whether they are turns of a conversation.
        now: seconds since 1970.
    """

    def __init__(
        self, name: str, texts: Sequence[Text], choices: int = 1, *, chat: bool, now: int
    ) -> None:
        self._texts, self._choices, self._chat = texts, choices, chat
        self._kind = "chat.completion" if chat else "text_completion"
        prefix = "chatcmpl" if chat else "cmpl"
        self._common = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": now, "model": name}

    def whole(self, written: Sequence[str]) -> dict[str, Any]:
        """All at once, behind the end of each text."""
        choices = []
        for index, text in enumerate(written):
            said: dict[str, Any] = {"text": text}
            if self._chat:
                plain = {"role": "assistant", "content": text}
                said = {"message": self._texts[index].message or plain}
            weighed, ending = self._texts[index].weighed, self._texts[index].ending
            choices.append(self._choice(index, said, ending, weighed))
        return self._answer(self._kind, choices) | {"usage": self.usage()}

    def piece(
        self,
        index: int,
        piece: str,
        ending: Ending | None = None,
        weighed: Sequence[Weighed] = (),
        **more: Any,
    ) -> dict[str, Any]:
        """One of a stream's; `more` is said of a turn besides."""
        said: dict[str, Any] = {"text": piece}
        if self._chat:
            if ending and (message := self._texts[index].message):
                told = {name: said for name, said in message.items() if said and name != "role"}
                told["tool_calls"] = [{"index": i, **c} for i, c in enumerate(told["tool_calls"])]
                said = {"delta": more | told}
            else:
                said = {"delta": more | ({"content": piece} if piece else {})}
        return self._answer(self._stream_kind, [self._choice(index, said, ending, weighed)])

    def last(self) -> dict[str, Any]:
        """The counts at the end of a stream."""
        return self._answer(self._stream_kind, []) | {"usage": self.usage()}

    @property
    def _stream_kind(self) -> str:
        return "chat.completion.chunk" if self._chat else self._kind

    def usage(self) -> dict[str, Any]:
        """Prompts count once, whatever is made of them."""
        prompts = self._texts[:: self._choices]
        read = sum(len(text.prompt) for text in prompts)
        written = sum(text.tokens for text in self._texts)
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": sum(text.begun for text in prompts)},
        }

    def _answer(self, kind: str, choices: Sequence[Any]) -> dict[str, Any]:
        return {**self._common, "object": kind, "choices": list(choices)}

    def _choice(
        self,
        index: int,
        said: Mapping[str, Any],
        ending: Ending | None,
        weighed: Sequence[Weighed],
    ) -> dict[str, Any]:
        finished = "tool_calls" if ending == "stop" and self._texts[index].message else ending
        form = of_chat if self._chat else of_completion
        logprobs = form(weighed) if weighed else None
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": finished}
