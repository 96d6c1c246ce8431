"""The cases of one target, run one after the other: every text, by every way, with every fault.

A target is a unit of work: it is built once, and so is what `generate()` makes of each text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from medusa_heads.errors import UnsupportedArchitecture
from scripts.prove.architecture_check import ATTEMPTS, ROUNDS_TO_HALF, one_line
from scripts.prove.lossless.comparison import compare
from scripts.prove.lossless.corpus import texts
from scripts.prove.lossless.faults import FAULTS, Fault
from scripts.prove.lossless.targets import (
    DEMO,
    PROCESSORS,
    ProofTarget,
    demo_target,
    processors_target,
    random_target,
)
from scripts.prove.lossless.texts import Reference, Text
from scripts.prove.lossless.ways import (
    HEADS_FAMILY,
    Noticed,
    Way,
    demo_ways,
    every_way,
    planted,
)

LIVELY_TOKENS = 48  # of the text by which weights are chosen
LIVELY_DISTINCT = 12
# What a broken engine may stumble over, instead of writing something else.
STUMBLES = (RuntimeError, ValueError, IndexError, AssertionError)


@dataclass
class Record:
    """One case.

    Attributes:
        case: its name; no other has it.
        target: its name.
        group: where it is counted.
        family, way: who drafted.
        fault: of the engine; None for the engine as it is.
        rows: texts.
        tokens, mismatches, ties, gaps, where: see Comparison.
        tokens_per_step: committed tokens a forward of the target.
        caught: of a fault: "difference", "error" or "" where it went unnoticed.
        seconds: that it took.
        note: why a target was left out, or what is said of it.
        failed: why nothing is known of the case.
    """

    case: str
    target: str
    group: str = ""
    family: str = ""
    way: str = ""
    fault: str | None = None
    rows: int = 0
    tokens: int = 0
    mismatches: int = 0
    ties: int = 0
    gaps: list[float] = field(default_factory=list)
    where: Sequence[Any] | None = None
    tokens_per_step: float = 0.0
    caught: str | None = None
    seconds: float = 0.0
    note: str = ""
    failed: str = ""


def run(
    name: str, turn: int, seed: int, new_tokens: int, known: frozenset[str]
) -> Iterator[Record]:
    """Every case of a target that is not known yet."""
    built = f"{name} / {seed} / target"
    try:
        target = build(name)
    except UnsupportedArchitecture as error:
        yield Record(built, name, note=f"refused: {error.reason}")
        return
    except Exception as error:  # whatever a model's own code objects to
        yield Record(built, name, note=f"not buildable: {one_line(error)}")
        return
    ways = list(demo_ways(target) if name == DEMO else every_way(target, turn))
    for place, text in enumerate(texts(target, turn, seed, new_tokens)):
        case = f"{name} / {seed} / {text.name}"
        if f"{case} / done" in known:
            continue
        made = Reference(text, target.model)
        yield from _compared(target, made, ways, case, known)
        yield from _broken(target, made, case, turn + place, known)
        yield Record(f"{case} / done", name)
    yield Record(built, name, note=target.note)


def build(name: str) -> ProofTarget:
    """The target of that name; a random one with weights that let faults show."""
    if name == DEMO:
        return demo_target()
    if name == PROCESSORS:
        return processors_target()
    if name in ROUNDS_TO_HALF:
        raise UnsupportedArchitecture("its kernels round to half precision")
    liveliest: tuple[int, ProofTarget] | None = None
    for widths, options in ATTEMPTS:
        target = random_target(name, widths)
        target.options |= options
        unnoticed = _unnoticed(target)
        if liveliest is None or unnoticed < liveliest[0]:
            liveliest = (unnoticed, target)
        if not unnoticed:
            break
    assert liveliest is not None
    return liveliest[1]


def _unnoticed(target: ProofTarget) -> int:
    """How many faults a short greedy text does not show, and one more if it repeats itself."""
    options = {"do_sample": False, **target.options}
    text = Text("lively", "", target.prompts(1, 0), lambda: options, LIVELY_TOKENS)
    made = Reference(text, target.model)
    repeats = len(set(made.rows[0])) < LIVELY_DISTINCT
    matter = [fault for fault in FAULTS if fault.matters(target, made)]
    return repeats + sum(not caught(fault, target, made) for fault in matter)


def _compared(
    target: ProofTarget, made: Reference, ways: list[Way], name: str, known: frozenset[str]
) -> Iterator[Record]:
    """A text by every way that suits it."""
    for way in ways:
        case = f"{name} / {way.family} / {way.name}"
        if case in known or not way.suits(made):
            continue
        started = time.perf_counter()
        try:
            sequences_BT, stats = way.decode(made)
        except UnsupportedArchitecture:
            if way.family != HEADS_FAMILY:
                raise
            continue  # features of layers that put out several states a token
        found = compare(made, sequences_BT)
        yield Record(
            case,
            target.name,
            made.text.group,
            family=way.family,
            way=way.name,
            rows=made.text.batch,
            **asdict(found),
            tokens_per_step=stats.tokens_per_step,
            seconds=time.perf_counter() - started,
        )


def _broken(
    target: ProofTarget, made: Reference, name: str, turn: int, known: frozenset[str]
) -> Iterator[Record]:
    """A text by engines with every fault that matters to it; of a random target's batch, by two of
    them in turn."""
    faults = [fault for fault in FAULTS if fault.matters(target, made)]
    if target.name not in (DEMO, PROCESSORS) and made.text.batch > 1:
        faults = [faults[turn % len(faults)], faults[(turn + len(faults) // 2) % len(faults)]]
    for fault in faults:
        case = f"{name} / fault: {fault.name}"
        if case in known:
            continue
        started = time.perf_counter()
        noticed = caught(fault, target, made)
        yield Record(
            case,
            target.name,
            made.text.group,
            fault=fault.name,
            rows=made.text.batch,
            caught=noticed,
            seconds=time.perf_counter() - started,
        )


def caught(fault: Fault, target: ProofTarget, made: Reference) -> str:
    """How a broken engine is noticed: by a difference or an error; empty if it is not."""
    try:
        with fault.broken():
            sequences_BT, _ = planted(target, watched=True).decode(made)
    except Noticed:
        return "difference"
    except STUMBLES:
        return "error"
    return "difference" if compare(made, sequences_BT, judge_ties=False).mismatches else ""
