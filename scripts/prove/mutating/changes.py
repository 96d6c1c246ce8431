"""A function changed in one place, put where it was: the mutations of mutmut, and three more."""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from types import FunctionType
from typing import Any

import libcst as cst
from mutmut.mutation.file_mutation import MutationVisitor, deep_replace
from mutmut.mutation.mutators import mutation_operators
from mutmut.mutation.pragma_handling import IgnoredCode

_FUTURE = "from __future__ import annotations\n"


@dataclass(frozen=True)
class Mutant:
    """A function with one change; equal where the change reads the same."""

    function: str
    was: str
    becomes: str


def _negated(test: cst.BaseExpression) -> cst.BaseExpression:
    inner = test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return cst.UnaryOperation(cst.Not(), inner)


def _negate(node: cst.If | cst.While | cst.CompIf) -> Iterator[cst.CSTNode]:
    test = _negated(node.test)
    yield node.with_changes(test=test)


def _leave_out(node: cst.Expr) -> Iterator[cst.CSTNode]:
    if not isinstance(node.value, cst.SimpleString | cst.ConcatenatedString):  # a docstring
        yield cst.Pass()


def _one_side(node: cst.BooleanOperation) -> Iterator[cst.CSTNode]:
    yield node.left
    yield node.right


OPERATORS: list[tuple[type, Callable[[Any], Iterable[cst.CSTNode]]]] = [
    *mutation_operators,
    (cst.If, _negate),
    (cst.While, _negate),
    (cst.CompIf, _negate),
    (cst.BooleanOperation, _one_side),
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
        code = changed.code  # which is written anew whenever it is asked for
        try:
            meaning = _meaning(code)
        except SyntaxError:
            continue
        if meaning not in seen:
            seen.add(meaning)
            was, becomes = _difference(source, code)
            yield Mutant(function.__qualname__, was, becomes), code


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
