"""A request of megabytes keeps no other one waiting."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from medusa_heads.inference.endpoint.protocol import Reader
from medusa_heads.inference.endpoint.reading import LONG, Reading
from medusa_heads.inference.endpoint.server import Server
from tests.inference.endpoint.asking import ask, send


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Long requests are read once this is set."""
    read, event = Reader.read, threading.Event()

    def hold(reader: Reader, raw: bytes, *, chat: bool) -> Any:
        if len(raw) > LONG:
            event.wait(60)
        return read(reader, raw, chat=chat)

    monkeypatch.setattr(Reader, "read", hold)
    return event


def test_a_long_request_keeps_none_waiting(
    endless: Any, tokenizer: Any, held: threading.Event
) -> None:
    with Server(endless, tokenizer, port=0) as server:
        long = send(server, "/v1/completions", {"prompt": "a" * LONG})
        asked = {"prompt": "abc", "max_tokens": 3, "temperature": 0}
        status, answer = ask(server, "/v1/completions", asked)
        assert status == 200 and answer["usage"]["completion_tokens"] == 3 and not held.is_set()
        held.set()
        assert long.getresponse().status == 400  # beyond the context
        long.close()


def test_both_threads_read_alike(model: Any, tokenizer: Any) -> None:
    asked = b'{"prompt": "abc", "max_tokens": 3, "seed": 1}'

    async def read(reading: Reading) -> list[Any]:
        bodies = asked, asked + b" " * LONG
        return [await reading.read(body, chat=False) for body in bodies]

    before = threading.active_count()
    with Reading(model.target, tokenizer) as reading:
        short, long = asyncio.run(read(reading))
    assert (
        short.texts[0].prompt == long.texts[0].prompt
        and short.texts[0].seed == long.texts[0].seed == 1
    )
    assert threading.active_count() == before


class _Watched:
    """A tokenizer that says whether it is the caller's own."""

    def __init__(self, tokenizer: Any, own: bool = True) -> None:
        self.tokenizer, self.own = tokenizer, own

    def __deepcopy__(self, _: Any) -> _Watched:
        return _Watched(self.tokenizer, own=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        assert not self.own
        return self.tokenizer(text, **options)


def test_the_callers_own_tokenizer_is_left_to_the_caller(model: Any, tokenizer: Any) -> None:
    """Who may cut or pad a text with it meanwhile, which is a state of the tokenizer."""
    with Reading(model.target, _Watched(tokenizer)) as reading:
        for more in (0, LONG):
            body = b'{"prompt": "abc"}' + b" " * more
            asked = asyncio.run(reading.read(body, chat=False))
            assert asked.texts[0].prompt == tokenizer("abc")["input_ids"]
