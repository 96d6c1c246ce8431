"""Requests read beside the thread that answers, long ones in a thread of their own."""

from __future__ import annotations

import asyncio
import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from medusa_heads.inference.endpoint.protocol import MOST_TEXTS, Asked, Reader
from medusa_heads.target.target import TargetModel

LONG = 64 << 10
"""Bytes of a request above which others do not wait for it: tokens of a megabyte take a second."""


class Reading:
    """Two threads that read requests while it is entered, in the order in which they come: one for
    long requests, one for all others. A tokenizer is for one thread at a time: how it cuts and pads
    is a state of it.

    Args:
        target: which writes the texts.
        tokenizer: its own, which this copies.
        longest, most_texts: see Reader.
    """

    def __init__(
        self,
        target: TargetModel,
        tokenizer: Any,
        longest: int | None = None,
        most_texts: int = MOST_TEXTS,
    ) -> None:
        self._usual, self._long = (
            _Lane(Reader(target, copy.deepcopy(tokenizer), longest, most_texts), which)
            for which in ("usual", "long")
        )

    async def read(self, raw: bytes, *, chat: bool) -> Asked:
        """Raises ValueError: what it asks for cannot be had, in one sentence."""
        lane = self._long if len(raw) > LONG else self._usual
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(lane.thread, partial(lane.reader.read, raw, chat=chat))

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        """What is being read is read to its end."""
        for lane in (self._usual, self._long):
            lane.thread.shutdown()


class _Lane:
    def __init__(self, reader: Reader, which: str) -> None:
        self.reader = reader
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=f"medusa-heads {which} requests")
