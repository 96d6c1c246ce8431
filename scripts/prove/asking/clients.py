"""Clients that ask a server for texts, some of whom leave before they have them."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Any


@dataclass(frozen=True)
class Job:
    """What one client asks for. It leaves behind so many pieces, or never."""

    body: Mapping[str, Any]
    leaves: int | None
    expected: str


@dataclass
class Outcome:
    """What became of all of them.

    Attributes:
        ended: texts by how: `finished`, `left`, and requests that were `refused`.
        wrong: jobs whose text was another.
        faults: whatever else must not be.
        metrics: of the server behind the last of them.
    """

    ended: Counter[str] = field(default_factory=Counter)
    wrong: list[Job] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    metrics: str = ""
    tokens: int = 0
    seconds: float = 0.0


class Client(threading.Thread):
    """Takes jobs until there are none, and notes what became of each."""

    def __init__(
        self, url: str, jobs: Iterator[Job], taking: threading.Lock, into: Outcome
    ) -> None:
        super().__init__()
        self._host, self._jobs, self._taking, self._into = url.split("//")[1], jobs, taking, into

    def run(self) -> None:
        """Until the jobs are done."""
        while True:
            with self._taking:
                job = next(self._jobs, None)
            if job is None:
                return
            try:
                self._ask(job)
            except Exception as error:
                with self._taking:
                    self._into.faults.append(f"{type(error).__name__}: {error}")

    def _ask(self, job: Job) -> None:
        while True:
            with closing(HTTPConnection(self._host, timeout=300)) as connection:
                headers = {"Content-Type": "application/json"}
                connection.request("POST", "/v1/completions", json.dumps(job.body), headers)
                if job.leaves == 0:
                    self._note("left")
                    return
                response = connection.getresponse()
                if response.status != 429:
                    self._read(job, response)
                    return
                assert int(response.headers["Retry-After"]) >= 1
            self._note("refused")
            time.sleep(1)  # sooner than a client should: this one wants to be refused

    def _read(self, job: Job, response: Any) -> None:
        if response.status != 200:
            raise ValueError(f"answered with {response.status}: {response.read()!r}")
        if not job.body["stream"]:
            text = json.loads(response.read())["choices"][0]["text"]
            self._note("finished", job, right=text == job.expected)
            return
        text = ""
        for number, (piece, ending) in enumerate(_pieces(response), start=1):
            text += piece
            if ending is not None:
                self._note("finished", job, right=text == job.expected)
                return
            if job.leaves is not None and number >= job.leaves:
                self._note("left", job, right=job.expected.startswith(text))
                return
        raise ValueError("a stream ended before its text")

    def _note(self, ended: str, job: Job | None = None, *, right: bool = True) -> None:
        with self._taking:
            self._into.ended[ended] += 1
            if not right and job is not None:
                self._into.wrong.append(job)


def _pieces(response: Any) -> Iterator[tuple[str, str | None]]:
    for line in response:
        content = line.decode().strip().removeprefix("data: ")
        if not content or content == "[DONE]":
            continue
        event = json.loads(content)
        if "error" in event:
            raise ValueError(event["error"]["message"])
        choice = event["choices"][0]
        yield choice["text"], choice["finish_reason"]
