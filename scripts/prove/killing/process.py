"""A command of this project in a process of its own, killed at a moment that is chosen by what it
does to its files.

The process is forked from a parent that has imported everything: what remains is the command's own
work. It tells its parent of every file that it opens to write, moves or removes, by an audit hook
of the interpreter, and can be made to stand still there until the signal has come.
"""

from __future__ import annotations

import faulthandler
import os
import random
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.prove.forks import make_forks_safe

_MOVES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")
_PATIENCE = 120.0  # seconds that a command may take in all
_CORES = os.sched_getaffinity(0)  # for all alike: their number decides what is measured anew
GRACE = 20.0  # seconds from SIGTERM to the end


@dataclass(frozen=True)
class Moment:
    """When a process is sent its signal.

    Attributes:
        event: after the event of this number; 0: by its own time, however busy the machine is.
        seconds: so much later; or, of the processor's time that it has had.
        held: the process stands still at that event until the signal has come.
    """

    event: int
    seconds: float
    held: bool

    @classmethod
    def draw(cls, rng: random.Random, events: list[int], seconds: float) -> Moment:
        """At one of these events, or a moment after it; without events, within so many seconds of
        the process's own."""
        if not events:
            return cls(0, rng.uniform(0.01, seconds), held=False)
        held = rng.random() < 0.6
        return cls(rng.choice(events), 0.0 if held else rng.expovariate(1000.0), held)


@dataclass(frozen=True)
class Ending:
    """How a process ended.

    Attributes:
        code: of the exit; negative: the signal that ended it.
        events: what it did to its files, in order.
        stood_at: the event at which it stood still when the signal came.
        output: what it printed.
        seconds: of the processor's time that it had.
        dying: from the signal to its end; None where none was sent.
    """

    code: int
    events: list[str]
    stood_at: str | None
    output: str
    seconds: float
    dying: float | None


class Gate:
    """Events on their way to whoever watches; one of them may be held up."""

    def __init__(self) -> None:
        self._seen, self._tell = os.pipe()
        self._wait, self._release = os.pipe()
        self._count, self._held = 0, 0
        self._lock = threading.Lock()

    def hold(self, event: int) -> None:
        """Let the event of this number wait for `release`; the count begins anew."""
        self._count, self._held = 1, event

    def begin(self) -> None:
        """The first event, which none is held at: the process begins its work."""
        os.write(self._tell, b"begins\n")

    def pass_by(self, event: str) -> None:
        """Tell of an event, and wait where it is held."""
        with self._lock:
            self._count += 1
            held = self._count == self._held
            os.write(self._tell, event.replace("\n", " ").encode()[:400] + b"\n")
        if held:
            os.read(self._wait, 1)

    def release(self) -> None:
        """Let go what is held."""
        os.write(self._release, b"\n")

    def events(self, seconds: float) -> bytes:
        """What has come by, after waiting for it so long."""
        ready, _, _ = select.select([self._seen], [], [], seconds)
        return os.read(self._seen, 1 << 16) if ready else b""

    def close(self) -> None:
        """Free what the system holds for it."""
        for end in (self._seen, self._tell, self._wait, self._release):
            os.close(end)

    def watch_files(self, folder: Path) -> None:
        """Pass by whatever this process does to the files of a folder, from now on."""
        root = f"{folder}{os.sep}"

        def hook(name: str, arguments: tuple[Any, ...]) -> None:
            if name == "open":
                path, mode, flags = arguments
                to_write = os.O_WRONLY | os.O_RDWR
                if not (set(mode) & set("wax+") if mode else flags & to_write):
                    return
            elif name not in _MOVES or arguments[-1] not in (-1, None):
                return  # within a folder that is removed as a whole
            else:
                path = arguments[0]
            paths = arguments[:2] if name == "os.rename" else (path,)
            if all(isinstance(each, str | os.PathLike) for each in paths):
                full = [os.path.abspath(each) for each in paths]
                if full[-1].startswith(root):
                    self.pass_by(" ".join([name, *(each.removeprefix(root) for each in full)]))

        sys.addaudithook(hook)


def run(
    work: Callable[[], int],
    folder: Path,
    moment: Moment | None = None,
    sign: signal.Signals = signal.SIGKILL,
    *,
    gate: Gate | None = None,
) -> Ending:
    """Run `work` in a process of its own and, where a moment is given, kill it then.

    Args:
        work: returns the exit code.
        folder: where the process works, and whose files count as its events.
        moment: when it is sent the signal, if it has not ended by then.
        sign: the signal.
        gate: which others tell of events, in place of the process's own files.
    """
    own = gate is None
    gate = gate or Gate()
    gate.hold(moment.event if moment and moment.held else 0)
    log = folder.parent / f"{folder.name}.log"
    log.write_text("")
    make_forks_safe()
    process = os.fork()
    if process == 0:
        _become(work, folder, log, gate, watch=own)
    try:
        code, events, seconds, dying = _follow(process, gate, moment, sign)
    finally:
        if own:
            gate.close()
    stood = dying is not None and moment is not None and moment.held
    return Ending(
        code,
        events,
        events[moment.event - 1] if stood and moment is not None else None,
        log.read_text(encoding="utf-8", errors="replace"),
        seconds,
        dying,
    )


def _follow(
    process: int, gate: Gate, moment: Moment | None, sign: signal.Signals
) -> tuple[int, list[str], float, float | None]:
    """Exit code, events, seconds of processor time, and seconds from the signal to the end."""
    start, text = time.monotonic(), b""
    due: float | None = None  # when the signal is to be sent
    sent: float | None = None
    while True:
        wait = 0.02 if due is None or sent is not None else due - time.monotonic()
        text += gate.events(min(0.02, max(0.0, wait)))
        if due is None and moment is not None and _has_come(moment, process, text.count(b"\n")):
            due = time.monotonic() + (moment.seconds if moment.event else 0.0)
        if due is not None and sent is None and time.monotonic() >= due:
            sent = time.monotonic()
            os.kill(process, sign)
            if moment is not None and moment.held:
                gate.release()
        ended, status, used = os.wait4(process, os.WNOHANG)
        if ended:
            text += gate.events(0.0)
            code, seconds = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
            dying = None if sent is None else time.monotonic() - sent
            return code, text.decode().splitlines(), seconds, dying
        if time.monotonic() - (sent or start) > (GRACE if sent else _PATIENCE):
            os.kill(process, signal.SIGKILL)  # seen by its exit code, which none asked for


def _has_come(moment: Moment, process: int, events: int) -> bool:
    """Whether a process has done what its moment waits for."""
    if moment.event:
        return events >= moment.event
    after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    ticks = int(after_name[11]) + int(after_name[12])
    return events > 0 and ticks / os.sysconf("SC_CLK_TCK") >= moment.seconds


def _become(work: Callable[[], int], folder: Path, log: Path, gate: Gate, *, watch: bool) -> None:
    """The life of the forked process; never returns."""
    code = 70
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.chdir(folder)
        os.sched_setaffinity(0, _CORES)
        to_log = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(to_log, 1)
        os.dup2(to_log, 2)
        sys.stdout, sys.stderr = (os.fdopen(end, "w", 1, closefd=False) for end in (1, 2))
        faulthandler.dump_traceback_later(_PATIENCE - 5, file=sys.stderr)  # where it hangs
        if watch:
            gate.watch_files(folder)
        gate.begin()
        code = work()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
