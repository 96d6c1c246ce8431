"""Proof that the tests of the central functions notice when one of them is changed.

python -m scripts.prove.mutants
python -m scripts.prove.mutants labels
python -m scripts.prove.mutants DecodingState.advance

Which functions, by which tests, and which mutants may survive, stands in mutants.yaml beside this
file. A function is mutated in memory: no file is written. Everything is imported once, then each
mutant and its tests run in a fork of this process. The run fails where a mutant survives that is
not listed, and where a listed one does not survive.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import os
import resource
import signal
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

import libcst as cst
import pytest
import yaml
from hypothesis import HealthCheck, settings
from mutmut.mutation.file_mutation import MutationVisitor, deep_replace
from mutmut.mutation.mutators import mutation_operators
from mutmut.mutation.pragma_handling import IgnoredCode

PLAN = Path(__file__).with_suffix(".yaml")
QUIET = ["-x", "-qq", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist"]
_FUTURE = "from __future__ import annotations\n"
_PATIENCE = 5  # times what the tests take without a mutation; then it runs for ever


@dataclass(frozen=True)
class Mutant:
    """A function with one change; equal where the change reads the same."""

    function: str
    was: str
    becomes: str


@dataclass(frozen=True)
class Survivor:
    """A mutant that behaves as the function does, and why."""

    mutant: Mutant
    why: str


@dataclass(frozen=True)
class Law:
    """Functions that keep one promise, and the tests that are about it."""

    name: str
    promise: str
    functions: list[str]
    tests: list[str]  # arguments of pytest


def read_plan(plan: Path = PLAN) -> tuple[list[Law], list[Survivor]]:
    """What is mutated, and what may survive."""
    content = yaml.safe_load(plan.read_text(encoding="utf-8"))
    laws = [Law(name, **of_law) for name, of_law in content["laws"].items()]
    survivors = [
        Survivor(Mutant(function, was, becomes), group["why"])
        for group in content["survivors"]
        for function, was, becomes in group["mutants"]
    ]
    return laws, survivors


# --- mutations: those of mutmut, and two more ---------------------------------------------------


def _negated(test: cst.BaseExpression) -> cst.BaseExpression:
    inner = test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return cst.UnaryOperation(cst.Not(), inner)


def _negate(node: cst.If | cst.While | cst.CompIf) -> Iterator[cst.CSTNode]:
    test = _negated(node.test)
    yield node.with_changes(test=test)


def _leave_out(node: cst.Expr) -> Iterator[cst.CSTNode]:
    if not isinstance(node.value, cst.SimpleString | cst.ConcatenatedString):  # a docstring
        yield cst.Pass()


OPERATORS = [
    *mutation_operators,
    (cst.If, _negate),
    (cst.While, _negate),
    (cst.CompIf, _negate),
    (cst.Expr, _leave_out),
]


def find(name: str) -> FunctionType:
    """The function of `module:Class.function`, without its decorators."""
    module, _, path = name.partition(":")
    found: Any = import_module(module)
    for part in path.split("."):
        found = vars(found)[part]
    if isinstance(found, property):
        found = found.fget
    elif isinstance(found, cached_property):
        found = found.func
    found = inspect.unwrap(found)
    assert isinstance(found, FunctionType), name
    return found


def source_of(function: FunctionType) -> str:
    """The function as a module of its own, in a class where it is a method of one."""
    lines = textwrap.dedent(inspect.getsource(function)).splitlines(keepends=True)
    start = next(i for i, line in enumerate(lines) if line.startswith("def "))
    text = "".join(lines[start:])
    *classes, _ = function.__qualname__.split(".")
    for kind in reversed(classes):
        text = f"class {kind}:\n" + textwrap.indent(text, "    ")
    return _FUTURE + text


def mutants(function: FunctionType) -> Iterator[tuple[Mutant, str]]:
    """All changes of one function, each with the source that it gives."""
    source = source_of(function)
    wrapper = cst.MetadataWrapper(cst.parse_module(source))
    visitor = MutationVisitor(OPERATORS, IgnoredCode(set(), set(), set()))
    module = wrapper.visit(visitor)
    seen = {ast.dump(ast.parse(source))}
    for mutation in visitor.mutations:
        changed = deep_replace(module, mutation.original_node, mutation.mutated_node)
        assert isinstance(changed, cst.Module)
        try:
            meaning = ast.dump(ast.parse(changed.code))
        except SyntaxError:
            continue
        if meaning not in seen:
            seen.add(meaning)
            was, becomes = _difference(source, changed.code)
            yield Mutant(function.__qualname__, was, becomes), changed.code


def _difference(old: str, new: str) -> tuple[str, str]:
    lines = list(difflib.ndiff(old.splitlines(), new.splitlines()))
    was, becomes = (
        " ".join(line[2:].strip() for line in lines if line.startswith(sign)) for sign in "-+"
    )
    return was, becomes


def put(function: FunctionType, source: str) -> None:
    """Let everyone who holds the function run this source from now on."""
    scope = dict(function.__globals__)
    exec(compile(source, f"<mutant of {function.__qualname__}>", "exec"), scope)
    found: Any = scope
    for part in function.__qualname__.split("."):
        found = (found if isinstance(found, dict) else vars(found))[part]
    function.__code__ = found.__code__
    function.__defaults__, function.__kwdefaults__ = found.__defaults__, found.__kwdefaults__


# --- running ------------------------------------------------------------------------------------


def run_tests(
    tests: Sequence[str], prepare: Callable[[], None], seconds: int
) -> tuple[bool, float]:
    """Run tests in a fork of this process; whether they passed, and the CPU seconds they took."""
    child = os.fork()
    if not child:
        with _silence():
            signal.alarm(20 * seconds)  # of a clock: a mutant may wait for ever
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            status = 3
            try:
                prepare()
                status = int(pytest.main([*QUIET, *tests]))
            finally:
                os._exit(status)
    _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    # Signals end what runs for ever or breaks the interpreter. All else is no verdict of a test.
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and code >= 0:
        raise RuntimeError(f"pytest ended with {code} on {' '.join(tests)}")
    return code == pytest.ExitCode.OK, usage.ru_utime + usage.ru_stime


@contextmanager
def _silence() -> Iterator[None]:
    kept = [os.dup(stream) for stream in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    try:
        yield
    finally:
        for stream, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, stream)
            os.close(copy)
        os.close(nowhere)


def survivors_of(law: Law, functions: Sequence[str]) -> tuple[int, list[Mutant]]:
    """How many mutants there were, and those that the tests of the law let pass."""
    passed, usual = run_tests(law.tests, lambda: None, seconds=600)
    if not passed:
        raise SystemExit(f"{law.name}: the tests fail without any mutation: run them by hand")
    limit = math.ceil(_PATIENCE * usual) + 1
    count, survived = 0, []
    for function in map(find, functions):
        for mutant, source in mutants(function):
            count += 1
            if run_tests(law.tests, lambda f=function, s=source: put(f, s), limit)[0]:
                survived.append(mutant)
                change = f"{mutant.was}  ->  {mutant.becomes}"
                print(f"  survives: {mutant.function}: {change}", flush=True)
    return count, survived


def import_all(tests: Sequence[str]) -> None:
    """Import the tests, and so all that they test, in this process."""
    settings.register_profile(
        "mutants", derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
    )
    settings.load_profile("mutants")
    with _silence():
        code = pytest.main([*QUIET, "--collect-only", *tests])
    if code != pytest.ExitCode.OK:
        raise SystemExit(f"the tests cannot be collected: {' '.join(tests)}")


def choose(laws: Sequence[Law], names: Sequence[str]) -> list[tuple[Law, list[str]]]:
    """The functions that names of laws or of functions mean; all where there is no name.

    Raises:
        ValueError: a name that is neither.
    """
    known = {name for law in laws for name in (law.name, *map(_path, law.functions))}
    if unknown := sorted(set(names) - known):
        raise ValueError(f"neither laws nor functions: {unknown}; there are {sorted(known)}")
    chosen = []
    for law in laws:
        whole = not names or law.name in names
        functions = [name for name in law.functions if whole or _path(name) in names]
        if functions:
            chosen.append((law, functions))
    return chosen


def _path(function: str) -> str:
    return function.partition(":")[2]


def table(survivors: Sequence[Survivor]) -> str:
    """The survivors as the page shows them."""
    lines = ["| function | was | becomes | why nothing changes |", "|---|---|---|---|"]
    for survivor in survivors:
        mutant = survivor.mutant
        cells = [f"`{text}`" for text in (mutant.function, mutant.was, mutant.becomes)]
        lines.append(
            f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} | {survivor.why} |"
        )
    return "\n".join(lines)


def main(names: Sequence[str]) -> int:
    laws, listed = read_plan()
    try:
        chosen = choose(laws, names)
    except ValueError as mistake:
        print(mistake, file=sys.stderr)
        return 2
    import_all(list(dict.fromkeys(test for law, _ in chosen for test in law.tests)))
    survived: Counter[Mutant] = Counter()
    for law, functions in chosen:
        count, of_law = survivors_of(law, functions)
        survived.update(of_law)
        print(f"{law.name}: {count} mutants, {len(of_law)} survive", flush=True)
    looked_at = {_path(name) for _, functions in chosen for name in functions}
    expected = Counter(s.mutant for s in listed if s.mutant.function in looked_at)
    for mutant in survived - expected:
        print(f"new: {mutant}")
    for mutant in expected - survived:
        print(f"listed, yet it does not survive: {mutant}")
    return int(survived != expected)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
