"""Proof that the tests of the central functions notice when one of them is changed.

python -m scripts.prove.mutants
python -m scripts.prove.mutants labels
python -m scripts.prove.mutants DecodingState.advance

Which functions, by which tests, and which mutants may survive, stands in mutants.yaml beside this
file. A function is mutated in memory: no file is written. Tests are imported and collected once,
then run for each mutant in a fork of this process. The proof fails where a mutant survives that is
not listed, and where a listed one does not survive.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from scripts.prove.mutating.changes import Mutant, find, mutants, put
from scripts.prove.mutating.plan import PLAN, Law, choose, entry, path_of, read_plan

QUIETLY = [
    "-qq", "--no-header", "--disable-warnings", "--capture=no",
    "-p", "no:cacheprovider", "-p", "no:xdist",
]  # fmt: skip
_PATIENCE = 5  # times what the tests take without a mutation; then it runs for ever


class MutatedRuns:
    """A plugin of pytest that runs the tests it has collected once for each mutant.

    Attributes:
        count: how many mutants there were.
        survived: those that all tests let pass.
    """

    def __init__(self, functions: Sequence[str]) -> None:
        self.count = 0
        self.survived: list[Mutant] = []
        self._functions = functions

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Instead of pytest's own loop.

        Raises:
            UsageError: the tests fail as it is.
        """
        passed, usual = _in_fork(session, lambda: None, seconds=600)
        if not passed:
            raise pytest.UsageError("the tests fail without any mutation: run them by hand")
        limit = math.ceil(_PATIENCE * usual) + 1
        for function in map(find, self._functions):
            for mutant, source in mutants(function):
                self.count += 1
                if _in_fork(session, partial(put, function, source), limit)[0]:
                    self.survived.append(mutant)
                    print(f"survives: {entry(mutant)}", flush=True)
        return True


def _in_fork(
    session: pytest.Session, prepare: Callable[[], None], seconds: int
) -> tuple[bool, float]:
    """Run the tests in a fork of this process until one fails; whether all passed, and the CPU
    seconds that they took. One that runs for longer is ended, and has failed."""
    child = os.fork()
    if not child:
        status = 2
        try:
            _silence()
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            signal.alarm(20 * seconds)  # a mutant may also wait for ever
            prepare()
            for item, following in zip(session.items, [*session.items[1:], None], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if session.testsfailed:
                    break
            status = 1 if session.testsfailed else 0
        finally:
            os._exit(status)
    _, status, usage = os.wait4(child, 0)
    if os.waitstatus_to_exitcode(status) == 2:
        raise RuntimeError("a mutant could not be made, or ended pytest itself")
    return status == 0, usage.ru_utime + usage.ru_stime


def _silence() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def survivors_of(law: Law, functions: Sequence[str]) -> list[Mutant]:
    """The mutants of the functions that the tests of the law let pass."""
    runs = MutatedRuns(functions)
    code = pytest.main([*QUIETLY, *law.tests], plugins=[runs])
    if code != pytest.ExitCode.OK:
        raise SystemExit(f"{law.name}: the tests could not be run")
    print(f"{law.name}: {runs.count} mutants, {len(runs.survived)} survive", flush=True)
    return runs.survived


def main(names: Sequence[str], plan: Path = PLAN) -> int:
    """Mutate the named functions, or all. Returns the exit code."""
    laws, listed = read_plan(plan)
    try:
        chosen = choose(laws, names)
    except ValueError as mistake:
        print(mistake, file=sys.stderr)
        return 2
    # The same examples each time, and no more than find a mutant.
    settings.register_profile(
        "mutants",
        derandomize=True,
        deadline=None,
        max_examples=30,
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("mutants")
    survived: Counter[Mutant] = Counter()
    for law, functions in chosen:
        survived.update(survivors_of(law, functions))
    looked_at = {path_of(name) for _, functions in chosen for name in functions}
    expected = Counter(s.mutant for s in listed if s.mutant.function in looked_at)
    for mutant in survived - expected:
        print(f"new, to be killed or listed: {entry(mutant)}")
    for mutant in expected - survived:
        print(f"listed, yet it does not survive: {entry(mutant)}")
    return int(survived != expected)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
