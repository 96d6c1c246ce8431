"""Threads of a process that was forked from one whose torch had computed."""

from __future__ import annotations

import os
import signal
import threading

import torch
from tqdm import tqdm

from scripts.prove.forks import make_forks_safe


def test_threads_that_compute_first_at_once() -> None:
    make_forks_safe()
    torch.set_num_threads(torch.get_num_threads())  # which makes the pool that a fork loses
    numbers_N = torch.ones(200_000)
    for _ in range(25):  # without settling every third to sixth fails
        process = os.fork()
        if process == 0:
            code = 1
            try:
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


def test_a_fork_computes_with_several_threads_where_its_parent_did() -> None:
    """Without ending OpenMP's threads before the fork, the fork waits for them for ever."""
    make_forks_safe()
    torch.set_num_threads(2)
    numbers_N = torch.ones(2_000_000)
    numbers_N.exp().sum()
    process = os.fork()
    if process == 0:
        signal.alarm(30)
        numbers_N.exp().sum()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert numbers_N.exp().sum() > 5e6  # the parent computes on


def test_a_fork_killed_while_it_prints_progress_keeps_no_other_waiting() -> None:
    make_forks_safe()
    tqdm(disable=True).get_lock()  # which makes the lock, one for all
    for end in (signal.SIGKILL, None):
        process = os.fork()
        if process == 0:
            signal.alarm(30)
            with tqdm.get_lock():
                if end is not None:
                    os.kill(os.getpid(), end)
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        assert ended == (0 if end is None else -end)
