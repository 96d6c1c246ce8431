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

import ast
import difflib
import inspect
import json
import math
import os
import resource
import signal
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
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

QUIETLY = [
    *("-qq", "--no-header", "--disable-warnings", "--capture=no"),
    *("-p", "no:cacheprovider", "-p", "no:xdist"),
]
PLAN = Path(__file__).with_suffix(".yaml")
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
    seen = {_meaning(source)}
    for mutation in visitor.mutations:
        changed = deep_replace(module, mutation.original_node, mutation.mutated_node)
        assert isinstance(changed, cst.Module)
        try:
            meaning = _meaning(changed.code)
        except SyntaxError:
            continue
        if meaning not in seen:
            seen.add(meaning)
            was, becomes = _difference(source, changed.code)
            yield Mutant(function.__qualname__, was, becomes), changed.code


class _WithoutGuards(ast.NodeTransformer):
    """zip's `strict` asserts that lengths agree: whether it is there makes no mutant."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id == "zip":
            node.keywords = []
        return self.generic_visit(node)


def _meaning(source: str) -> str:
    return ast.dump(_WithoutGuards().visit(ast.parse(source)))


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
                    print(f"survives: {_entry(mutant)}", flush=True)
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


def main(names: Sequence[str], plan: Path = PLAN) -> int:
    """Mutate the named functions, or all. Returns the exit code."""
    laws, listed = read_plan(plan)
    try:
        chosen = choose(laws, names)
    except ValueError as mistake:
        print(mistake, file=sys.stderr)
        return 2
    settings.register_profile(
        "mutants", derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
    )
    settings.load_profile("mutants")
    survived: Counter[Mutant] = Counter()
    for law, functions in chosen:
        survived.update(survivors_of(law, functions))
    looked_at = {_path(name) for _, functions in chosen for name in functions}
    expected = Counter(s.mutant for s in listed if s.mutant.function in looked_at)
    for mutant in survived - expected:
        print(f"new, to be killed or listed: {_entry(mutant)}")
    for mutant in expected - survived:
        print(f"listed, yet it does not survive: {_entry(mutant)}")
    return int(survived != expected)


def _entry(mutant: Mutant) -> str:
    """As the plan lists it."""
    return json.dumps([mutant.function, mutant.was, mutant.becomes])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
