"""The texts of one request while they are written, told whole or as a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Any

from medusa_heads.inference.endpoint.answers import Answer, refused
from medusa_heads.inference.endpoint.protocol import Asked
from medusa_heads.inference.endpoint.scheduler import Closed, Scheduler
from medusa_heads.inference.endpoint.text import Ending, Text

# Which text, what it goes on with, how it ended, and of how many tokens all is told.
_Event = tuple[int, str, Ending | None, int]
_LINE_ENDS = "\x85\u2028\u2029"


class Failed(Exception):
    """There is no answer; `status` says so by number."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status = status


class Choices:
    """Hears of a request's texts, from the moment on when it is made. Where one of them fails, none
    is written further.

    Args:
        asked: the request, whose texts have not been submitted.
        form: of the answer.
        scheduler: writes them.
        chat: whether they are turns of a conversation.
    """

    def __init__(self, asked: Asked, form: Answer, scheduler: Scheduler, *, chat: bool) -> None:
        self._asked, self._form, self._scheduler, self._chat = asked, form, scheduler, chat
        self._loop = asyncio.get_running_loop()
        self._events = asyncio.Queue[_Event]()
        for index, text in enumerate(asked.texts):
            text.tell = partial(self._tell, index)

    def _tell(self, index: int, piece: str, ending: Ending | None) -> None:
        # By the thread that writes. Once the loop has ended nobody listens.
        event = index, piece, ending, len(self._asked.texts[index].weighed)
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def leave(self) -> None:
        """Nobody wants them any more."""
        for text in self._asked.texts:
            self._scheduler.cancel(text)

    async def whole(self) -> dict[str, Any]:
        """The answer. Raises Failed: there is none."""
        written = [""] * len(self._asked.texts)
        async for index, piece, _, _ in self._pieces():
            written[index] += piece
        return self._form.whole(written)

    async def stream(self, gone: asyncio.Task[None]) -> AsyncIterator[str]:
        """The answer's events. At the end, `gone` is cancelled."""
        told = [0] * len(self._asked.texts)
        try:
            if self._chat:
                for index in range(len(self._asked.texts)):
                    yield _event(self._form.piece(index, "", role="assistant"))
            try:
                async for index, piece, ending, count in self._pieces():
                    weighed = self._asked.texts[index].weighed[told[index] : count]
                    told[index] = count
                    yield _event(self._form.piece(index, piece, ending, weighed))
                if self._asked.with_usage:
                    yield _event(self._form.last())
            except Failed as error:
                yield _event(refused(error.status, str(error)))
            yield "data: [DONE]\n\n"
        finally:
            gone.cancel()
            self.leave()

    async def _pieces(self) -> AsyncIterator[_Event]:
        """Until all texts have ended. Raises Failed: one has not come to its end."""
        left, held = len(self._asked.texts), [""] * len(self._asked.texts)
        while left:
            index, piece, ending, count = await self._events.get()
            if ending == "failed":
                raise _fault(self._asked.texts[index])
            if ending == "cancelled":  # nobody is there to read it
                raise Failed(499, "the client has left")
            left -= ending is not None
            if self._asked.texts[index].calls is not None:  # which are known at its end
                held[index] += piece
                if ending is None:
                    continue
                piece = held[index]
            yield index, piece, ending, count


def _event(content: Any) -> str:
    line = json.dumps(content, ensure_ascii=False)
    for end in _LINE_ENDS:  # that some clients see and JSON leaves alone
        line = line.replace(end, f"\\u{ord(end):04x}")
    return f"data: {line}\n\n"


def _fault(text: Text) -> Failed:
    fault = text.fault
    if isinstance(fault, Closed):
        return Failed(503, str(fault))
    if isinstance(fault, ValueError):
        return Failed(400, " ".join(str(fault).split()))
    # What a library says may name files of this machine.
    return Failed(500, f"the text could not be written ({type(fault).__name__})")
