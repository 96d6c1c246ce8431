"""Mutation testing itself: the plan is true, and a test that notices nothing is found out."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from scripts.prove.mutating.changes import Mutant, find, mutants, put
from scripts.prove.mutating.plan import choose, read_plan, tables
from tests.pairs import with_slow

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "proofs.md"
LAWS, SURVIVORS = read_plan()


def test_tests_of_the_plan_are_there_and_functions_stand_in_it_once() -> None:
    functions = [name for law in LAWS for name in law.functions]
    assert len({find(name).__qualname__ for name in functions}) == len(functions)
    for test in {test for law in LAWS for test in law.tests if not test.startswith("-")}:
        assert (ROOT / test.partition("::")[0]).is_file(), test


FUNCTIONS = sorted({s.mutant.function for s in SURVIVORS})
SHORT = ("SampleThenMatch._draw_among_all", "SampleThenMatch._pick", "SampleThenMatch._scores")


# Those of long functions are made by `make mutants` as well.
@pytest.mark.parametrize(
    "function", with_slow(SHORT, [name for name in FUNCTIONS if name not in SHORT])
)
def test_listed_survivors_are_mutants_of_the_code_as_it_is(function: str) -> None:
    (name,) = [name for law in LAWS for name in law.functions if name.endswith(f":{function}")]
    listed = Counter(s.mutant for s in SURVIVORS if s.mutant.function == function)
    assert listed <= Counter(mutant for mutant, _ in mutants(find(name)))


def test_the_page_shows_laws_and_survivors_as_they_are_listed() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for table in tables(LAWS, SURVIVORS):
        assert table in page, f"put this table into {PAGE.name}:\n{table}"


def test_a_function_is_changed_in_every_way_and_nothing_else_is() -> None:
    found = [mutant for mutant, _ in mutants(find("medusa_heads.config:head_offset"))]
    assert set(found) == {
        Mutant("head_offset", "return head + 2", "return head - 2"),
        Mutant("head_offset", "return head + 2", "return head + 3"),
    }


class Base:
    def say(self, times: int = 1) -> str:
        return f"{times} words"


class Kind(Base):
    def say(self, times: int = 2) -> str:
        if times > 2:
            return super().say(times)
        return "more"


def test_a_mutant_takes_the_place_of_a_method_for_all_who_hold_it() -> None:
    held, kept = Kind().say, (Kind.say.__code__, Kind.say.__defaults__)
    said = set()
    for _, source in mutants(Kind.say):  # type: ignore[arg-type]
        put(Kind.say, source)  # type: ignore[arg-type]
        said.add((held(), held(3)))
        Kind.say.__code__, Kind.say.__defaults__ = kept
    assert ("2 words", "3 words") in said  # times >= 2
    assert ("3 words", "3 words") in said  # the default is 3
    assert ("XXmoreXX", "3 words") in said
    assert (held(), held(3)) == ("more", "3 words")


def test_names_choose_laws_or_functions() -> None:
    chosen = choose(LAWS, ["labels", "Row.commit"])
    assert [(law.name, len(functions)) for law, functions in chosen] == [
        ("labels", len(LAWS[0].functions)),
        ("commit", 1),
    ]
    assert choose(LAWS, []) == [(law, law.functions) for law in LAWS]
    with pytest.raises(ValueError, match="neither laws nor functions: \\['labells'\\]"):
        choose(LAWS, ["labells"])


PLAN = """
laws:
  offset:
    promise: Head i looks i + 2 tokens ahead.
    functions: [medusa_heads.config:head_offset]
    tests: [{test}]
survivors: [{survivors}]
"""
TEST = """
from medusa_heads.config import head_offset
def test_offset():
    assert head_offset(0) {sign} 2
"""
LISTED = "{why: of no account, mutants: [[head_offset, return head + 2, return head + 3]]}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sign", "survivors", "code", "said"),
    [
        ("==", "", 0, "offset: 2 mutants, 0 survive"),
        (">=", "", 1, 'listed: ["head_offset", "return head + 2", "return head + 3"]'),
        (">=", LISTED, 0, "offset: 2 mutants, 1 survive"),
        ("==", LISTED, 1, "listed, yet it does not survive"),
        (">", "", 1, "the tests fail without any mutation"),
    ],
)
def test_a_test_that_notices_nothing_is_found_out(
    sign: str, survivors: str, code: int, said: str, tmp_path: Path
) -> None:
    test, plan = tmp_path / "test_offset.py", tmp_path / "plan.yaml"
    test.write_text(TEST.format(sign=sign))
    plan.write_text(PLAN.format(test=test, survivors=survivors))
    call = (
        "import sys, pathlib; from scripts.prove.mutants import main; "
        f"sys.exit(main([], pathlib.Path({str(plan)!r})))"
    )
    ran = subprocess.run([sys.executable, "-c", call], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == code and said in ran.stdout + ran.stderr
