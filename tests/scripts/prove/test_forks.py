"""Threads of a process that was forked from one whose torch had computed."""

from __future__ import annotations

import os
import threading

import torch

from scripts.prove.forks import settle_threads


def test_threads_that_compute_first_at_once() -> None:
    torch.set_num_threads(torch.get_num_threads())  # which makes the pool that a fork loses
    numbers_N = torch.ones(200_000)
    for _ in range(40):  # without settling every third to sixth fails
        process = os.fork()
        if process == 0:
            code = 1
            try:
                settle_threads()
                code = _convert_at_once(numbers_N)
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def _convert_at_once(numbers_N: torch.Tensor) -> int:
    """How many of four threads fail."""
    together, failed = threading.Barrier(4), []

    def convert() -> None:
        together.wait()
        try:
            numbers_N.to(torch.float64)
        except RuntimeError as error:
            failed.append(error)

    threads = [threading.Thread(target=convert) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(failed)
