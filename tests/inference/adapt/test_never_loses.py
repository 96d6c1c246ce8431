"""`auto` beside plain decoding and fixed ways to draft, where all that counts is known."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from medusa_heads.trees.tree import TokenTree
from tests.inference.adapt.replayed import (
    PROMPT,
    Guesses,
    Machine,
    adaptive,
    compared,
    drawn,
    said,
    seconds,
    written,
)
from tests.inference.clock import Clock as Time
from tests.pairs import with_slow

STEP = 0.01
FLAT = Machine(lambda tokens: STEP * (1 + 0.002 * tokens), lambda rows: 0.1 * STEP)
STEEP = Machine(lambda tokens: STEP * (0.6 + 0.4 * tokens), lambda rows: 0.2 * STEP * rows)
DEAR = Machine(lambda tokens: STEP * (1 + 0.02 * tokens), lambda rows: 0.8 * STEP)
USUAL = Machine(lambda tokens: STEP * (1 + 0.03 * tokens), lambda rows: STEP * (0.1 + 0.05 * rows))


def every_case() -> Iterator[Any]:
    """Texts that are guessed rightly or wrongly, new or repeated, on every machine. One of the four
    is quick on each machine, and each of the four is."""
    alone = {"flat": FLAT, "steep": STEEP, "dear": DEAR, "usual": USUAL}
    machines = {name: (machine, 1, False) for name, machine in alone.items()}
    machines |= {"usual-8": (USUAL, 8, False), "usual-8-even": (USUAL, 8, True)}
    machines["dear-8"] = (DEAR, 8, False)
    texts = enumerate(product((0.15, 0.7), (0.0, 0.4)))
    places = product(enumerate(machines.items()), texts)
    for (place, (name, machine)), (number, (right, copied)) in places:
        words = name, "right" if right == 0.7 else "wrong", "repeated" if copied else "new"
        marks = [] if number == place % 4 else [pytest.mark.slow]
        yield pytest.param(*machine, right, copied, id="-".join(words), marks=marks)


@pytest.mark.parametrize(("machine", "rows", "even", "right", "copied"), [*every_case()])
def test_auto_keeps_up_with_the_best_fixed_way(
    monkeypatch: pytest.MonkeyPatch,
    machine: Machine,
    rows: int,
    even: bool,
    right: float,
    copied: float,
) -> None:
    """From the first text on, what it spends on finding out included; also where nobody knows
    beforehand which of several rows is the last, and where all of them can be guessed alike."""
    time = Time(monkeypatch)
    texts = [written(200, copied, seed) for seed in range(4 if rows == 1 else 16)]
    took = compared(texts, right, machine, time, rows, even=even)
    auto, best = took.pop("auto"), min(took, key=took.__getitem__)
    assert took[best] / auto >= 0.97, (best, took, auto)


@pytest.mark.parametrize(
    ("usual", "machine", "rows"),
    [
        pytest.param(usual, machine, rows, marks=marks, id=f"{text}-{name}-{rows}")
        for i, (text, usual) in enumerate((("random", 0.1), ("chained", 0.5)))
        for j, (name, machine) in enumerate((("dear", DEAR), ("usual", USUAL)))
        for k, rows in enumerate((1, 8))
        for marks in [[] if (i, j, k) == (1, 0, 0) else [pytest.mark.slow]]
    ],
)
def test_auto_keeps_up_where_tokens_are_drawn(
    monkeypatch: pytest.MonkeyPatch, usual: float, machine: Machine, rows: int
) -> None:
    """Of three sources, one of which has seen nothing of the texts at first."""
    time = Time(monkeypatch)
    texts = [drawn(200, usual, seed) for seed in range(4 if rows == 1 else 16)]
    # The largest size is never the best here, and takes longest to replay.
    took = compared(texts, 0.3, machine, time, rows, usual=usual, sizes=(3, 7))
    auto, best = took.pop("auto"), min(took, key=took.__getitem__)
    assert took[best] / auto >= 0.97, (best, took, auto)


@pytest.mark.parametrize(
    ("interrupted", "call", "right", "copied", "reads_on"),
    [
        # Those who read on are interrupted in one quick case, the others in two.
        pytest.param(*case, reads_on, marks=[pytest.mark.slow] * (reads_on != (i == 1)))
        for i, case in enumerate(
            [("text", 20, 0.15, 0.7), ("guesses", 1, 0.7, 0.0), ("guesses", 20, 0.7, 0.0)]
        )
        for reads_on in (False, True)
    ],
)
def test_an_interruption_costs_no_more_than_itself(
    monkeypatch: pytest.MonkeyPatch,
    interrupted: str,
    call: int,
    right: float,
    copied: float,
    reads_on: bool,
) -> None:
    """Another process had the processor for ten thousand steps, or a first draft had to prepare."""
    time, took = Time(monkeypatch), []
    texts = [written(200, copied, seed) for seed in range(4)]
    for pause in (0.0, 1e4 * STEP):
        guesses = Guesses(texts, right, USUAL, time, even=False)
        guesses.reads_on = reads_on
        auto: Any = adaptive(guesses, USUAL)
        source = {"text": auto._text, "guesses": guesses}[interrupted]
        draft, calls = source.draft, iter(range(1, 10**6))

        def paused(state: Any, pause: float = pause, draft: Any = draft, calls: Any = calls) -> Any:
            time.work(pause * (next(calls) == call))
            return draft(state)

        source.draft = paused
        took.append(seconds(auto, texts, USUAL, time) - pause)
        assert next(calls) > call
    assert took[1] <= 1.05 * took[0]


@pytest.mark.parametrize("interrupted", with_slow(["observe"], ["draft"]))
def test_a_source_that_was_not_timed_outlives_an_interruption(
    monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    """Also of its first look at answers, which on a device waits for the prompt to be read."""
    time, took = Time(monkeypatch), []
    texts = [drawn(200, 0.7, seed) for seed in range(2)]
    for pause in (0.0, 1e4 * STEP):
        auto: Any = adaptive(Guesses(texts, 0.3, USUAL, time), USUAL, recycles=True)
        recycled, pauses = auto._sources[0], iter([pause])
        work = getattr(recycled, interrupted)

        def paused(*given: Any, pauses: Any = pauses, work: Any = work) -> Any:
            time.work(next(pauses, 0.0))
            return work(*given)

        setattr(recycled, interrupted, paused)
        began, prompt = time.now, TokenTree.root_only(torch.tensor([texts[0][PROMPT - 1]]))
        auto.observe(prompt, said(prompt.tokens_BN, 0.7))
        seconds(auto, texts, USUAL, time, usual=0.7)
        took.append(time.now - began - pause)
    assert took[1] <= 1.05 * took[0]


def test_sizes_that_were_measured_too_dear_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As beside other programs. Of what is never taken nobody would be told."""
    time = Time(monkeypatch)
    texts = [written(200, 0.0, seed) for seed in range(16)]
    dear = Machine(lambda tokens: STEP * (1 + 0.12 * tokens), USUAL.guess)
    took = [
        seconds(adaptive(Guesses(texts, 0.7, USUAL, time), believed), texts, USUAL, time, rows=4)
        for believed in (USUAL, dear)
    ]
    assert took[1] <= 1.04 * took[0]
