"""Bad inputs in small: some hundred of all kinds; and that the proof sees what it looks for."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.prove.hostile.attempt import Attempt, Expect, attempt
from scripts.prove.hostile.workshop import Place, Workshop
from scripts.prove.inputs import KINDS, ProofArguments, prove, read_record, table, tried, verdict


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    with Workshop(tmp_path_factory.mktemp("workshop")).entered() as workshop:
        yield workshop


def refuse(*lines: str) -> int:
    print("\n".join(lines), file=sys.stderr)
    return 2


def raise_an_error() -> int:
    raise TypeError("a fault of the program")


def exit_at_once() -> int:
    raise SystemExit(1)


def write(path: Path) -> int:
    path.write_text("x")
    return 0


def remove(path: Path) -> int:
    path.unlink()
    return 0


def run_code(path: Path) -> int:
    exec(compile("1 + 1", str(path), "exec"))
    return 0


Run = Callable[[Place], int]
SEEN: list[tuple[Expect, Run, list[str]]] = [
    ("good", lambda place: 0, []),
    ("good", lambda place: write(place.out), []),
    ("bad", lambda place: refuse("it: error: words.txt is none"), []),
    ("bad", lambda place: refuse("it: warning: x", "it: error: words.txt is none"), []),
    ("either", lambda place: 0, []),
    ("bad", lambda place: 0, ["silent"]),
    ("good", lambda place: refuse("it: error: words.txt is none"), ["refused"]),
    ("mend", lambda place: refuse("it: error: words.txt is none"), ["refused"]),
    ("bad", lambda place: raise_an_error(), ["traceback"]),
    ("bad", lambda place: exit_at_once(), ["traceback"]),
    ("bad", lambda place: refuse("it: error: something is wrong"), ["sentence"]),
    ("bad", lambda place: refuse("it: error: words.txt", "is none"), ["sentence"]),
    ("bad", lambda place: refuse("Traceback", "it: error: words.txt"), ["sentence"]),
    ("bad", lambda place: refuse("it: error: words.txt") - 1, ["sentence"]),
    ("bad", lambda place: refuse(f"it: error: words.txt {'x' * 9_000}"), ["sentence"]),
    ("good", lambda place: write(place.outside / "new"), ["outside"]),
    ("good", lambda place: write(place.inputs / "words.txt"), ["outside"]),
    ("good", lambda place: write(Path.home() / "new"), ["outside"]),
    ("good", lambda place: write(Path("here")), ["outside"]),
    ("good", lambda place: write(place.out.with_name("beside")), ["outside"]),
    ("good", lambda place: remove(place.outside / "secret.txt"), ["outside"]),
    ("good", lambda place: write(place.marker), ["ran"]),
    ("good", lambda place: run_code(place.inputs / "evil.py"), ["ran"]),
    ("good", lambda place: os.system("true"), ["ran"]),
]


@pytest.mark.parametrize(("expect", "run", "faults"), SEEN)
def test_what_becomes_of_an_input_is_seen(
    expect: Expect, run: Run, faults: list[str], tmp_path: Path
) -> None:
    workshop = Workshop(tmp_path)
    with workshop.entered(), workshop.place("one") as place:
        (place.inputs / "words.txt").write_text("given")
        made = Attempt("one", expect, lambda: run(place), names=("words.txt",))
        assert attempt(made, workshop, place).faults == faults


def test_what_is_taken_with_another_meaning_is_seen(workshop: Workshop) -> None:
    for expect in ("good", "skip", "mend", "either"):
        with workshop.place("one") as place:
            made = Attempt("one", expect, lambda: 0, right=lambda: False)
            assert attempt(made, workshop, place).faults == ["silent"]


class Hurried:
    """The clock of a hub's client, which else waits a second before it asks again."""

    def __getattr__(self, name: str) -> object:
        return getattr(time, name)

    def sleep(self, _: float) -> None: ...


def test_some_hundred_inputs_of_all_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time", Hurried())
    lines = list(tried(tmp_path, KINDS, 24, seed=2, done=set()))
    found = [(line["kind"], line["label"], line["said"]) for line in lines if line["faults"]]
    assert found == []
    assert len(lines) == 24 * len(KINDS) and verdict(lines)
    for kind in KINDS:  # something of every kind is taken, and most is not
        of_kind = [line for line in lines if line["kind"] == kind]
        assert any(line["expect"] == "good" and line["became"] == "accepted" for line in of_kind)
        assert sum(line["became"] in ("refused", "skipped", "mended") for line in of_kind) > 12


@pytest.mark.slow
def test_ten_thousand_inputs(tmp_path: Path) -> None:
    assert verdict(prove(ProofArguments(str(tmp_path / "record.jsonl"))))


def test_a_record_is_gone_on_with(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    record.write_text('{"seed": 1}\n{"kind": "hub", "number": 0}\n{"kind": "hu')
    assert read_record(record, 1) == [{"seed": 1}, {"kind": "hub", "number": 0}]
    assert record.read_text().endswith("0}\n")
    with pytest.raises(ValueError, match="was made with the seed 1: name another file"):
        read_record(record, 2)
    record.write_text("no record\n\n")
    with pytest.raises(ValueError, match="is no record of this proof"):
        read_record(record, 1)


def line(kind: str, expect: str, became: str, *faults: str) -> dict[str, object]:
    return {"kind": kind, "expect": expect, "became": became, "faults": list(faults)}


def test_the_table_counts_faults_apart() -> None:
    lines = [
        line("hub", "bad", "refused"),
        line("hub", "bad", "accepted", "silent"),
        line("hub", "good", "accepted"),
        line("hub", "either", "refused"),
        line("caches", "mend", "mended", "outside"),
    ]
    rows = table(lines).splitlines()
    assert rows[2] == "| caches | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 1 | 0 |"
    assert rows[3] == "| hub | 4 | 1 | 0 | 0 | 1 | 1 | 0 | 0 | 1 | 0 | 0 | 0 |"
    assert rows[4].startswith("| all | 5 |")


def test_the_verdict_needs_controls_and_no_fault() -> None:
    good, bad = line("hub", "good", "accepted"), line("hub", "bad", "refused")
    assert verdict([{"seed": 1}, good, bad])
    assert not verdict([bad]) and not verdict([])
    assert not verdict([good, line("hub", "bad", "accepted", "silent")])
    assert not verdict([line("hub", "good", "refused", "refused")])


def test_a_run_writes_a_line_an_input(tmp_path: Path) -> None:
    lines = list(tried(tmp_path, ["prompts"], 3, seed=0, done={("prompts", 1)}))
    assert [line["number"] for line in lines] == [0, 2]
    again = list(tried(tmp_path / "again", ["prompts"], 3, seed=0, done={("prompts", 1)}))
    for each in (*lines, *again):
        del each["cpu_seconds"]
    assert json.dumps(again) == json.dumps(lines)
