"""Commands that Ctrl-C or SIGTERM ends, wherever it comes."""

import errno
import io
import os
import signal
import sys
import time

import pytest

from medusa_heads.cli.flags.arguments import run_command
from medusa_heads.training.runs import callbacks


def test_interruption_and_faults_of_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    def fault() -> None:
        raise RuntimeError("a bug")

    assert run_command(lambda: None) == 0
    assert run_command(interrupt, prog="tool") == 130
    assert capsys.readouterr().err == "tool: interrupted\n"
    with pytest.raises(RuntimeError):
        run_command(fault)


@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize("direct", [True, False])
def test_a_command_whose_output_nobody_reads_on_ends_without_a_word(
    flush: bool, direct: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind `| head -1`; also where it printed little, which waits for its end."""
    reader, writer = os.pipe()
    os.close(reader)
    with io.TextIOWrapper(os.fdopen(writer, "wb", 0 if direct else -1)) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert run_command(lambda: print("text", flush=flush), prog="tool") == 141
    assert capsys.readouterr().err == ""


def test_a_connection_that_breaks_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    def upload() -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    assert run_command(upload, prog="tool") == 2
    assert capsys.readouterr().err == "tool: error: [Errno 32] Broken pipe\n"


def test_sigterm_ends_a_command_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """Files that were begun are removed on the way out."""
    done = []

    def work() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            done.append("cleaned up")

    assert run_command(work, prog="tool") == 143
    assert capsys.readouterr().err == "tool: ended by SIGTERM\n" and done
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_is_known_behind_the_error_that_a_library_makes_of_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def draw() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except SystemExit:
            raise ValueError("Invalid bounding box") from None

    assert run_command(draw, prog="tool") == 143
    assert capsys.readouterr().err == "tool: ended by SIGTERM\n"


@pytest.mark.parametrize("seconds_left", [0.0, 60.0])
def test_sigterm_within_del_ends_the_command_all_the_same(
    seconds_left: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python says "Exception ignored" of what is raised there, and goes on."""

    class Dataset:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def work() -> None:
        dataset = Dataset()
        del dataset
        time.sleep(seconds_left)

    hook, began = sys.unraisablehook, time.monotonic()
    assert run_command(work, prog="tool") == 143
    assert capsys.readouterr().err == "tool: ended by SIGTERM\n"
    assert time.monotonic() - began < 30 and sys.unraisablehook is hook
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_program_that_handles_sigterm_goes_on_handling_it() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        assert run_command(lambda: signal.raise_signal(signal.SIGTERM)) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


def test_a_later_sigterm_ends_a_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one right behind the first does not: a launcher hands on what its processes got too."""
    raised: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    run = callbacks.Interruptions()
    run._on_sigterm()
    run._on_sigterm()
    assert raised == []
    monkeypatch.setattr(callbacks, "_HANDED_ON", -1.0)
    run._on_sigterm()
    assert raised == [signal.SIGTERM]
