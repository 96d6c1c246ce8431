"""One input, ready to be given to the program, and what became of it."""

from __future__ import annotations

import contextlib
import io
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Literal
from unittest.mock import patch

from scripts.prove.hostile.workshop import Place, Workshop

Expect = Literal["bad", "skip", "mend", "good", "either"]
"""bad: to be refused; skip: broken rows to be counted; mend: to be measured anew; good: a control;
either: bytes changed at random, refused or taken with an equal meaning."""

FAULTS = ("traceback", "sentence", "silent", "refused", "outside", "ran")
"""An exception or a hang; a refusal that is not one sentence with a name in it; bad input taken, or
taken with another meaning; a control refused; a file written elsewhere; code run."""

PATIENCE_S = 120.0  # of a machine that does other things as well
LONGEST = 2_000  # characters of a sentence that somebody reads


@dataclass(frozen=True)
class Attempt:
    """An input that lies there.

    Args:
        label: what was made of it.
        expect: see `Expect`.
        run: gives it to the program, and returns the exit code as a command does.
        names: a refusal has one of these words in it: the file, or the field.
        right: whether what the program made of it, where it took it, is what the input says.
        stdin: what stands on standard input.
    """

    label: str
    expect: Expect
    run: Callable[[], int]
    names: tuple[str, ...] = ()
    right: Callable[[], bool] = lambda: True
    stdin: Any = None


@dataclass
class Outcome:
    """What became of an input; `faults` is empty where all is well."""

    label: str
    expect: Expect
    became: Literal["refused", "skipped", "mended", "accepted", "nothing"] = "nothing"
    faults: list[str] = field(default_factory=list)
    said: str = ""
    cpu_seconds: float = 0.0


class Hung(BaseException):
    """The program did not come back; no `except Exception` is to swallow that."""


def attempt(made: Attempt, workshop: Workshop, place: Place) -> Outcome:
    """Give an input to the program, and look at everything that came of it."""
    outcome = Outcome(made.label, made.expect)
    printed = io.StringIO()
    started = time.process_time()
    code: int | None = None
    with workshop.watched(place) as seen:
        try:
            out, err = (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(printed),
            )
            with patch("sys.stdin", made.stdin or io.StringIO()), _patience(), out, err:
                code = made.run()
        except KeyboardInterrupt:
            raise
        except (Exception, SystemExit, Hung) as error:
            outcome.faults.append("traceback")
            outcome.said = "".join(traceback.format_exception(error)[-3:])[-LONGEST:]
        if code == 0:
            try:
                is_right = made.right()
            except Exception as error:
                outcome.said, is_right = f"not as the input says: {error!r}", False
            _judge_accepted(outcome, is_right)
        elif code is not None:
            _judge_refused(outcome, code, printed.getvalue(), made.names)
    outcome.faults += ["outside"] * bool(seen.outside) + ["ran"] * bool(seen.ran)
    if seen.outside or seen.ran:
        outcome.said = f"{outcome.said} {seen}"[-LONGEST:]
    outcome.cpu_seconds = round(time.process_time() - started, 4)
    return outcome


def _judge_accepted(outcome: Outcome, is_right: bool) -> None:
    if outcome.expect == "bad" or not is_right:
        outcome.faults.append("silent")
    if outcome.expect in ("skip", "mend"):
        outcome.became = "skipped" if outcome.expect == "skip" else "mended"
    else:
        outcome.became = "accepted"


def _judge_refused(outcome: Outcome, code: int, printed: str, names: tuple[str, ...]) -> None:
    outcome.became = "refused"
    lines = printed.splitlines()
    sentences = [line for line in lines if ": error: " in line]
    outcome.said = sentences[-1][:LONGEST] if sentences else printed[-LONGEST:]
    one = len(sentences) == 1 and lines[-1] == sentences[0] and len(sentences[0]) < LONGEST
    named = not names or any(name in outcome.said for name in names)
    if code != 2 or not one or not named or "Traceback" in printed:
        outcome.faults.append("sentence")
    if outcome.expect in ("good", "skip", "mend"):
        outcome.faults.append("refused")


@contextmanager
def _patience() -> Iterator[None]:
    def give_up(number: int, frame: FrameType | None) -> None:
        raise Hung(f"no answer in {PATIENCE_S:.0f} seconds")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
