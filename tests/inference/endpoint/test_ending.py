"""A server that ends says so, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from http.client import IncompleteRead
from typing import Any

import pytest

from medusa_heads.cli.flags.arguments import run_command
from medusa_heads.inference.endpoint import server as served
from medusa_heads.inference.endpoint.server import Server
from tests.inference.endpoint.asking import begin
from tests.pairs import alternately


def test_a_server_that_ends_leaves_no_thread(endless: Any, tokenizer: Any) -> None:
    before = set(threading.enumerate())
    with Server(endless, tokenizer, port=0) as server:
        connection, response = begin(server)
    assert set(threading.enumerate()) == before
    assert b"going down" in response.read()
    connection.close()


@pytest.mark.parametrize(
    ("hears", "number"), alternately([True, False], [signal.SIGTERM, signal.SIGINT])
)
def test_a_stream_is_told_of_a_server_that_ends(
    number: signal.Signals,
    hears: bool,
    endless: Any,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One whose text does not even end then is left. Neither leaves a traceback."""
    for name in ("_TO_THE_END", "_TO_BE_TOLD"):
        monkeypatch.setattr(served, name, 0.1 if name == "_TO_THE_END" or not hears else 60)
    server = Server(endless, tokenizer, port=0)
    said = b""

    def listen() -> None:
        nonlocal said
        connection, response = begin(server)
        response.readline()
        with endless._lock:  # so that the text cannot come to its end meanwhile
            os.kill(os.getpid(), number)
            while server.scheduler.is_open:
                time.sleep(0.01)
            if not hears:
                with pytest.raises((IncompleteRead, ConnectionError)):
                    response.read()
        if hears:
            said = response.read()
        connection.close()

    client = threading.Thread(target=listen)
    client.start()
    assert run_command(server.run) == 128 + number
    client.join()
    assert not hears or (b'"code": "503"' in said and said.endswith(b"data: [DONE]\n\n"))
    shown = capfd.readouterr().err
    assert (
        not caplog.messages and len(shown.splitlines()) == 1 and shown.startswith("medusa-heads: ")
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_threads_start_leaves_none(
    number: signal.Signals,
    endless: Any,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    server, before = Server(endless, tokenizer, port=0), set(threading.enumerate())
    run = server.scheduler._run

    def signalled() -> None:
        os.kill(os.getpid(), number)
        run()

    monkeypatch.setattr(server.scheduler, "_run", signalled)
    try:
        assert run_command(server.run) == 128 + number
        assert set(threading.enumerate()) == before
    finally:
        server.scheduler.close()
    shown = capfd.readouterr().err
    assert len(shown.splitlines()) == 1 and shown.startswith("medusa-heads: ")
