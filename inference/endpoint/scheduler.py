"""Who joins the running batch, and when: first come, first served, a queue of limited length.

One thread owns the batch. In every turn at most one text joins, so that a long prompt holds the
others up once and not for as long as prompts come; then each row takes a step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from medusa_heads.data.prompts import stop_ids
from medusa_heads.errors import forget_frames
from medusa_heads.inference.endpoint.metrics import Metrics
from medusa_heads.inference.endpoint.text import Ending, Text
from medusa_heads.inference.engine.rows import Row
from medusa_heads.inference.engine.running import RunningBatch

_LOG = logging.getLogger(__name__)


class Overloaded(Exception):
    """The queue is full; `seconds` until there may be room."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"too many requests wait already: try again in {seconds} s")
        self.seconds = seconds


class Closed(Exception):
    """Nothing is written any more."""


class Scheduler:
    """Writes texts, as many at a time as the batch has rows and the cache has room.

    Args:
        batch: that nobody else uses.
        model: the target's, whose generation settings say at which tokens texts end.
        decode: makes text of token ids.
        spell: the same, of special tokens too; default: `decode`.
        queue: texts that may wait, besides those that the batch has rows for.
        cache_bytes: that keys and values may take; None: as much as the rows need.

    Attributes:
        most: texts that are taken at a time.
    """

    def __init__(
        self,
        batch: RunningBatch,
        model: Any,
        decode: Callable[[list[int]], str],
        *,
        spell: Callable[[list[int]], str] | None = None,
        queue: int = 64,
        cache_bytes: int | None = None,
    ) -> None:
        self._batch, self._model, self._decode, self._spell = batch, model, decode, spell
        self.most, self._cache_bytes = batch.max_rows + queue, cache_bytes
        self._changed = threading.Condition()
        self._waiting: deque[Text] = deque()
        self._cancelled: set[Text] = set()
        self._running: dict[Row, Text] = {}
        self._taken = 0  # texts that have not ended: waiting, running, or between the two
        self._turning = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self.metrics = Metrics(batch)

    @property
    def is_open(self) -> bool:
        """Whether texts are taken."""
        return not self._closed

    def is_idle(self) -> bool:
        """Whether no text waits or is being written, and all is counted and given back."""
        with self._changed:
            return not (self._turning or self._waiting or self._running or self._cancelled)

    def submit(self, *texts: Text) -> None:
        """Let the texts of a request wait for their turns, all or none of them; from any thread.
        Raises Overloaded: too many wait already; Closed: nothing is written any more; ValueError:
        the cache has no room for so long a text."""
        for text in texts:
            needed = self._batch.row_bytes(len(text.prompt) + text.max_tokens)
            if self._cache_bytes is not None and needed > self._cache_bytes:
                raise ValueError(
                    f"{len(text.prompt)} tokens of the prompt and {text.max_tokens} new ones take "
                    f"{needed} bytes of cache, of which there are {self._cache_bytes}: ask for "
                    "fewer"
                )
        with self._changed:
            if self._closed:
                raise Closed("the server is going down")
            if self._taken + len(texts) > self.most:
                self.metrics.count("refused")
                raise Overloaded(self.metrics.seconds_to_wait(len(self._waiting) + len(texts) - 1))
            self._taken += len(texts)
            self._waiting += texts
            self.metrics.queued = len(self._waiting)
            self._changed.notify()

    def cancel(self, text: Text) -> None:
        """Nobody wants the text any more; from any thread. One that has ended stays as it is."""
        with self._changed:
            if text.ending is None:
                self._cancelled.add(text)
                self._changed.notify()

    def turn(self) -> None:
        """Drop what was cancelled, let at most one text join, and take a step."""
        for row, text in self._drop_cancelled():
            self._batch.leave(row)
            self._end(text, "cancelled")
        if (first := self._next()) is not None:
            self._admit(first)
        for row, fault in self._batch.step().items():
            self._end(self._running.pop(row), "failed", fault)
        for row, text in list(self._running.items()):
            self._end_if_done(row, text)
        self.metrics.look()
        with self._changed:
            self._turning = False

    def _drop_cancelled(self) -> list[tuple[Row, Text]]:
        """Those that were running."""
        with self._changed:
            self._turning = True
            cancelled, self._cancelled = self._cancelled, set()
            waiting = [text for text in self._waiting if text in cancelled]
            for text in waiting:
                self._waiting.remove(text)
            self.metrics.queued = len(self._waiting)
        for text in waiting:
            self._end(text, "cancelled")
        rows = [(row, text) for row, text in self._running.items() if text in cancelled]
        for row, _ in rows:
            del self._running[row]
        return rows

    def _next(self) -> Text | None:
        """The text whose turn it is, if there is room for it."""
        with self._changed:
            if not self._waiting or len(self._running) >= self._batch.max_rows:
                return None
            text = self._waiting[0]
            needed = self._batch.cache_bytes(len(text.prompt) + text.max_tokens)
            # The first of all fits, or was refused.
            if self._cache_bytes is not None and needed > self._cache_bytes and self._running:
                return None
            self._waiting.popleft()
            self.metrics.queued = len(self._waiting)
        return text

    def _admit(self, text: Text) -> None:
        self.metrics.waited(time.perf_counter() - text.asked_at)
        ids_1T = torch.tensor([text.prompt], device=self._model.device)
        try:
            text.begin(self._decode, self._spell)
            if text.echo:
                text.tell_prompt(None if text.logprobs is None else self._batch.logits(ids_1T))
            row = self._batch.add(
                ids_1T,
                text,
                seed=text.seed,
                watch=None if text.logprobs is None else text.weigh,
                max_new_tokens=text.max_tokens,
                **text.options,
            )
        # Whatever a model's own code raises on one text, the others go on.
        except BaseException as fault:
            self._end(text, "failed", fault)
            if not isinstance(fault, Exception):
                raise
            return
        text.begun = row.begun
        self.metrics.prompt_tokens += len(text.prompt)
        self.metrics.begun_tokens += row.begun
        self._running[row] = text
        self._end_if_done(row, text)

    def _end_if_done(self, row: Row, text: Text) -> None:
        if not row.done and not text.stopped:
            return
        if not row.done:
            self._batch.leave(row)
        del self._running[row]
        self._end(text, "stop" if row.tokens[-1] in stop_ids(self._model) else "length")

    def _end(self, text: Text, ending: Ending, fault: BaseException | None = None) -> None:
        if ending in ("stop", "length"):
            try:
                text.flush()
            except Exception as problem:  # tokenizers may raise on tokens that they do not know
                ending, fault = "failed", problem
        if fault is not None and not isinstance(fault, ValueError | Closed):
            _LOG.error("a text failed: %s: %s", type(fault).__name__, fault)
        if fault is not None:
            forget_frames(fault)  # or the next text has no room for its cache beside this one's
        self.metrics.count(
            ending if ending in ("cancelled", "failed") else "finished",
            time.perf_counter() - text.asked_at,
        )
        with self._changed:  # first: who is told may ask again at once
            self._taken -= 1
        text.end(ending, fault)

    def __enter__(self) -> Scheduler:
        self._thread = threading.Thread(target=self._run, name="medusa-heads scheduler")
        self._thread.start()
        return self

    def close(self) -> None:
        """What is still being written is to fail; from any thread, which does not wait for it."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def __exit__(self, *_: object) -> None:
        """What is still being written fails."""
        self.close()
        assert self._thread is not None
        self._thread.join()

    def _run(self) -> None:
        reason: BaseException = Closed("the server is going down")
        try:
            while self._wait():
                self.turn()
        except BaseException as fault:  # also of libraries in Rust: nobody is to wait for ever
            _LOG.exception("the scheduler ended")
            reason = fault
        with self._changed:
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
            self.metrics.queued = 0
        for row in self._running:
            self._batch.leave(row)
        for text in [*self._running.values(), *waiting]:
            self._end(text, "failed", reason)
        self._running.clear()
        self.metrics.look()

    def _wait(self) -> bool:
        """Until there is something to do; whether there is."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._waiting or self._cancelled or self._running
            )
            return not self._closed
