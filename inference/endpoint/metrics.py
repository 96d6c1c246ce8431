"""What a server has done so far, in the text that Prometheus reads."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from threading import Lock
from typing import Literal

from medusa_heads.inference.engine.running import RunningBatch

Outcome = Literal["finished", "cancelled", "failed", "refused"]
_OUTCOMES: tuple[Outcome, ...] = ("finished", "cancelled", "failed", "refused")
_LONGEST_WAIT = 60  # seconds that a client is told to wait
_METRICS = {
    "requests_total": ("counter", "Requests by what became of them."),
    "requests_queued": ("gauge", "Requests that wait."),
    "requests_running": ("gauge", "Texts being written."),
    "request_seconds": (
        "summary",
        "From a request to the end of its text, those refused left out.",
    ),
    "queue_seconds": ("summary", "From a request to the reading of its prompt."),
    "prompt_tokens_total": ("counter", "Tokens of prompts."),
    "cached_prompt_tokens_total": ("counter", "Of these, those that an earlier text had read."),
    "generated_tokens_total": ("counter", "Tokens written."),
    "steps_total": (
        "counter",
        "Forwards that rows took part in, by drafted tokens that were accepted.",
    ),
    "forwards_total": ("counter", "Forwards of the target."),
    "tokens_per_step": (
        "gauge",
        "Tokens that a row wrote in a forward, on average; 1 without drafts.",
    ),
    "seconds_total": ("counter", "Seconds of decoding by phase."),
    "kept_bytes": ("gauge", "Bytes of those of ended texts."),
    "cache_bytes": ("gauge", "Bytes of keys and values."),
}


class Metrics:
    """Counts of requests, tokens, steps and seconds.

    Attributes:
        queued: texts that wait.
        prompt_tokens: of all requests so far.
        begun_tokens: of these, those that earlier texts had read.
    """

    def __init__(self, batch: RunningBatch) -> None:
        self._batch, self._lock = batch, Lock()
        self.look()
        self._requests: Counter[Outcome] = Counter()
        self._seconds, self._waited, self._admitted = 0.0, 0.0, 0
        self.queued = self.prompt_tokens = self.begun_tokens = 0

    def look(self) -> None:
        """See what the batch has done; by the thread that owns it."""
        seen = copy.deepcopy(self._batch.stats)
        with self._lock:
            self._stats = seen
            self._rows, self._bytes = len(self._batch.rows), self._batch.held_bytes
            self._kept = self._batch.kept.held_bytes

    def count(self, outcome: Outcome, seconds: float = 0.0) -> None:
        """A request came to its end, so long after it was made."""
        with self._lock:
            self._requests[outcome] += 1
            self._seconds += seconds

    def waited(self, seconds: float) -> None:
        """A request's turn has come."""
        with self._lock:
            self._waited += seconds
            self._admitted += 1

    def seconds_to_wait(self, queued: int) -> int:
        """Until so many that wait may have been admitted, by what requests took so far."""
        with self._lock:
            ended = self._requests.total() - self._requests["refused"]
            mean = (self._seconds - self._waited) / max(ended, 1)
        return min(max(math.ceil(mean * queued / self._batch.max_rows), 1), _LONGEST_WAIT)

    def text(self) -> str:
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        with self._lock:
            stats, rows, held, kept = self._stats, self._rows, self._bytes, self._kept
            requests, ended = dict(self._requests), self._requests.total()
            seconds, waited, admitted = self._seconds, self._waited, self._admitted
        ended -= requests.get("refused", 0)
        outcomes = {f'{{outcome="{each}"}}': requests.get(each, 0) for each in _OUTCOMES}
        accepted = sorted(stats.accepted.items())
        of_steps = {f'{{accepted="{drafts}"}}': steps for drafts, steps in accepted}
        phases = {f'{{phase="{name}"}}': spent for name, spent in stats.seconds.items()}
        found: dict[str, float | Mapping[str, float]] = {
            "requests_total": outcomes,
            "requests_queued": self.queued,
            "requests_running": rows,
            "request_seconds": {"_sum": seconds, "_count": ended},
            "queue_seconds": {"_sum": waited, "_count": admitted},
            "prompt_tokens_total": self.prompt_tokens,
            "cached_prompt_tokens_total": self.begun_tokens,
            "generated_tokens_total": stats.tokens,
            "steps_total": of_steps,
            "forwards_total": stats.forwards,
            "tokens_per_step": stats.tokens_per_step,
            "seconds_total": phases,
            "kept_bytes": kept,
            "cache_bytes": held,
        }
        for name, (kind, said) in _METRICS.items():
            full, values = f"medusa_heads_{name}", found[name]
            yield f"# HELP {full} {said}"
            yield f"# TYPE {full} {kind}"
            for label, value in (values if isinstance(values, Mapping) else {"": values}).items():
                yield f"{full}{label} {value}"
