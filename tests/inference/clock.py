"""A clock that other work on the machine does not move."""

from __future__ import annotations

import time

import pytest


class Clock:
    """Takes the place of `time.perf_counter`: a look takes a microsecond, all else what is said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", self.read)

    def read(self) -> float:
        self.now += 1e-6
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds
