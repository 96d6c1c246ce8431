"""Processes that answer side by side end with the one that started them, and without a word."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from medusa_heads.inference.regeneration import transformers_backend
from medusa_heads.inference.regeneration.regenerate import regenerate
from medusa_heads.target.target import TargetModel
from tests.conftest import TinyLlama
from tests.training.processes import forked


def goes_on_for_long(begun: Path, *_: object, **__: object) -> None:
    """What a worker's model does, once it has said which signals do not reach it."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    (begun / str(os.getpid())).write_text(" ".join(signal.Signals(each).name for each in blocked))
    time.sleep(40)


@pytest.mark.parametrize("spawned", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ctrl_c_waits_for_no_batch(
    spawned: bool, tiny_llama: TinyLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not spawned:
        monkeypatch.setattr(transformers_backend, "get_context", lambda _: forked())
    model: Any = tiny_llama(vocab_size=24)
    begun = tmp_path / "begun"
    begun.mkdir()
    model.generate = partial(goes_on_for_long, begun)

    def press_when_both_have_begun() -> None:
        while len([*begun.iterdir()]) < 2:
            time.sleep(0.1)
        time.sleep(0.5)  # the names are written
        os.kill(os.getpid(), signal.SIGINT)

    prompts = Dataset.from_dict({"input_ids": [[1, 2], [3, 4]]})
    threading.Thread(target=press_when_both_have_begun, daemon=True).start()
    options: dict[str, Any] = {"max_new_tokens": 4, "batch_size": 1, "num_workers": 2}
    with pytest.raises(KeyboardInterrupt):
        regenerate(TargetModel(model), prompts, cache_dir=tmp_path, progress=False, **options)
    ended = time.time()
    last = max(file.stat().st_mtime for file in begun.iterdir())
    assert ended - last < 20 and not active_children()
    if spawned:  # as the program does, not from a server that was there before
        assert {file.read_text() for file in begun.iterdir()} == {"SIGINT"}


def test_what_one_batch_holds_is_answered_without_processes(
    tiny_llama: TinyLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes seconds to begin, and the answers less."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was asked for")

    monkeypatch.setattr(transformers_backend, "ProcessPoolExecutor", refuse)
    target = TargetModel(tiny_llama(vocab_size=24))
    prompts = Dataset.from_dict({"input_ids": [[1, 2], [3, 4], [5, 6]]})
    options: dict[str, Any] = {"max_new_tokens": 4, "num_workers": 2, "progress": False}
    rows = regenerate(target, prompts, cache_dir=tmp_path, batch_size=3, **options)
    assert len(rows) == 3
    with pytest.raises(AssertionError, match="a process was asked for"):
        regenerate(target, prompts, cache_dir=tmp_path / "more", batch_size=2, **options)
