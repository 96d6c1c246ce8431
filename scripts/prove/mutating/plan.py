"""Which functions are mutated, by which tests, and which mutants may survive."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from medusa_heads.tables import in_markdown
from scripts.prove.mutating.changes import Mutant

PLAN = Path(__file__).parents[1] / "mutants.yaml"


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


def choose(laws: Sequence[Law], names: Sequence[str]) -> list[tuple[Law, list[str]]]:
    """The functions that names of laws or of functions mean; all where there is no name.

    Raises:
        ValueError: a name that is neither.
    """
    known = {name for law in laws for name in (law.name, *map(path_of, law.functions))}
    if unknown := sorted(set(names) - known):
        raise ValueError(f"neither laws nor functions: {unknown}; there are {sorted(known)}")
    chosen = []
    for law in laws:
        whole = not names or law.name in names
        functions = [name for name in law.functions if whole or path_of(name) in names]
        if functions:
            chosen.append((law, functions))
    return chosen


def path_of(function: str) -> str:
    return function.partition(":")[2]


def tables(laws: Sequence[Law], survivors: Sequence[Survivor]) -> tuple[str, str]:
    """Laws and survivors as docs/proofs.md shows them."""
    of_laws = [
        (law.name, law.promise, ", ".join(f"`{path_of(name)}`" for name in law.functions))
        for law in laws
    ]
    of_survivors = [
        (f"`{of.function}`", f"`{of.was}`", f"`{of.becomes}`", survivor.why)
        for survivor in survivors
        for of in [survivor.mutant]
    ]
    return (
        in_markdown((("law", "what it promises", "functions"), of_laws), texts=3),
        in_markdown((("function", "was", "becomes", "why nothing changes"), of_survivors), texts=4),
    )


def entry(mutant: Mutant) -> str:
    """As the plan lists it."""
    return json.dumps([mutant.function, mutant.was, mutant.becomes])
