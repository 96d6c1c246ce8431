"""Texts that are known beforehand, decoded on a machine whose seconds are given.

No model runs and no time passes: what `auto` and fixed ways to draft make of the same texts is the
same on every machine. What is drafted is right as often as it is said to be.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from transformers import StoppingCriteriaList

from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.adapt.evidence import LEVELS, Evidence, level
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.blended import BlendedDrafter
from medusa_heads.inference.drafters.growing import Proposal, Source, by_drawing
from medusa_heads.inference.drafters.recycling import RecyclingSource
from medusa_heads.inference.drafters.text import TextSource
from medusa_heads.inference.engine.rows import Row, StopCheck
from medusa_heads.inference.engine.state import DecodingState
from tests.inference.clock import Clock as Time

SIZES = (0, 1, 3, 7, 15, 31)
PROMPT, VOCABULARY = 40, 997
_MEASURED = (1, 2, 4, 8, 16, 32, 64)


class Machine(NamedTuple):
    """What is dear here: seconds of a step by the tokens that it reads, and of asking the guesses
    for so many rows."""

    step: Callable[[int], float]
    guess: Callable[[int], float]


def written(tokens: int, copied: float, seed: int) -> list[int]:
    """A text. Passages of it are copied from further up, as large a share as is said."""
    chance = random.Random(seed)
    text = [chance.randrange(VOCABULARY) for _ in range(PROMPT)]
    while len(text) < PROMPT + tokens:
        length, start = chance.randint(8, 40), chance.randrange(len(text))
        fresh = [chance.randrange(VOCABULARY) for _ in range(length)]
        text += text[start : start + length] if chance.random() < copied else fresh
    return text[: PROMPT + tokens]


def drawn(tokens: int, usual: float, seed: int) -> list[int]:
    """A text of a chain that all texts share: so often the token comes that usually follows."""
    chance = random.Random(seed)
    text = [chance.randrange(VOCABULARY) for _ in range(PROMPT)]
    while len(text) < PROMPT + tokens:
        usually = chance.random() < usual
        text.append(_usual(text[-1]) if usually else chance.randrange(VOCABULARY))
    return text


def _usual(token: Any) -> Any:
    """What usually follows a token, or each of several."""
    return (token * 31 + 7) % VOCABULARY


def said(tokens_BN: torch.Tensor, usual: float) -> torch.Tensor:
    """What a target that draws such texts says behind these tokens."""
    logits_BNV = torch.zeros(*tokens_BN.shape, VOCABULARY)
    known = math.log(usual * VOCABULARY / (1 - usual))
    return logits_BNV.scatter_(2, _usual(tokens_BN)[..., None], known)


class Guesses(Source):
    """Two guesses at each of the next four tokens. The first is right as often as it says: a known
    share of the time, which falls with the depth, and is another in every text unless they are
    `even`."""

    name = "guesses"

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        right: float,
        machine: Machine,
        time: Time,
        *,
        even: bool = False,
    ):
        self._texts, self._right, self._machine, self._time = texts, right, machine, time
        self._even = even
        self.evidence = by_drawing(lambda: Evidence([1.0] * LEVELS))

    def draft(self, state: DecodingState) -> list[Proposal]:
        self._time.work(self._machine.guess(len(state.rows)))
        evidence = self.evidence[state.drawing]
        return [Proposal(evidence, 0, self._behind(row)) for row in state.rows]

    def _behind(self, row: Any) -> Callable[[int], list[tuple[int, float, int, Any]]]:
        ahead = self._texts[row.index][row.length : row.length + 4]
        chance = random.Random(1000 * row.index + row.length)
        right = self._right
        if not self._even:
            right *= 0.6 + 0.8 * random.Random(row.index).random()

        def behind(place: int) -> list[tuple[int, float, int, Any]]:
            if place >= len(ahead):
                return []
            first = min(right * chance.uniform(0.5, 1.5) * 0.85**place, 0.99)
            chances, drawn = (first, 0.3 * (1 - first)), chance.random()
            guessed = [VOCABULARY, VOCABULARY + 1]  # which no text holds
            if drawn < sum(chances):
                guessed[drawn >= first] = ahead[place]
            each = zip(guessed, chances, strict=True)
            return [(token, own, level(own), place + 1) for token, own in each]

        return behind

    def expected(self, nodes: int) -> float:
        return sum((0.85 * self._right) ** depth for depth in range(1, min(nodes, 4) + 1))


def compared(
    texts: Sequence[Sequence[int]],
    right: float,
    machine: Machine,
    time: Time,
    rows: int = 1,
    *,
    even: bool = False,
    usual: float = 0.0,
    sizes: Sequence[int] = (3, 7, 15),
) -> dict[str, float]:
    """Seconds of plain decoding, of fixed ways to draft, and of `auto`."""

    def fixed(source: str, nodes: int, machine: Machine) -> Drafter | None:
        options: dict[str, Any] = {"sizes": (nodes,), "always": True}
        if source == "text":
            return BlendedDrafter(Clock.flat(), text=TextSource(nodes), **options)
        guesses = source == "guesses"
        own = Guesses(texts, right, machine, time, even=even) if guesses else _recycled()
        return BlendedDrafter(Clock.flat(), sources=[own], **options)

    def plain(machine: Machine) -> None:
        return None

    given = tuple(map(tuple, texts)), rows, usual
    took = {"plain": _work(plain, given, time).seconds(machine)}
    for source in ("text", "guesses", *(["recycling"] if usual else [])):
        known = (right, even) if source == "guesses" else ()
        for nodes in sizes:
            work = _work(partial(fixed, source, nodes), (*given, source, nodes, *known), time)
            took[f"{source} {nodes}"] = work.seconds(machine)
    auto = adaptive(Guesses(texts, right, machine, time, even=even), machine, recycles=usual > 0)
    return took | {"auto": seconds(auto, texts, machine, time, rows, usual)}


def adaptive(guesses: Guesses, machine: Machine, *, recycles: bool = False) -> BlendedDrafter:
    """`auto`, which may ask the text, the guesses, and what came behind a token before."""
    clock = Clock({tokens: machine.step(tokens) for tokens in _MEASURED})
    clock.learn_drafting("guesses", machine.guess(1))
    sources: list[Any] = [_recycled(), guesses] if recycles else [guesses]
    return BlendedDrafter(clock, SIZES, text=TextSource(31), sources=sources)


def _recycled() -> RecyclingSource:
    return RecyclingSource(VOCABULARY + 2)


class Work(NamedTuple):
    """Steps by the tokens that they read, guesses by the rows that they were for, and the seconds
    of looks at the clock."""

    steps: Counter[int]
    guesses: Counter[int]
    looks: float

    def seconds(self, machine: Machine) -> float:
        steps = sum(count * machine.step(tokens) for tokens, count in self.steps.items())
        return self.looks + steps + sum(n * machine.guess(rows) for rows, n in self.guesses.items())


_works: dict[Any, Work] = {}


def _work(way: Callable[[Machine], Drafter | None], key: Any, time: Time) -> Work:
    """What a fixed way to draft does, which is the same on every machine: counted once."""
    if key not in _works:
        steps, guesses = Counter[int](), Counter[int]()
        texts, rows, usual = key[:3]
        machine = Machine(lambda tokens: _counted(steps, tokens), lambda n: _counted(guesses, n))
        looks = seconds(way(machine), texts, machine, time, rows, usual)
        _works[key] = Work(steps, guesses, looks)
    return _works[key]


def _counted(counter: Counter[int], number: int) -> float:
    counter[number] += 1
    return 0.0


def seconds(
    drafter: Drafter | None,
    texts: Sequence[Sequence[int]],
    machine: Machine,
    time: Time,
    rows: int = 1,
    usual: float = 0.0,
) -> float:
    """How long the texts take, so many at once; those that are drawn, by what is usual in them."""
    began = time.now
    stop = StopCheck(StoppingCriteriaList())
    for first in range(0, len(texts), rows):
        batch = [
            Row(first + b, 1, torch.tensor(text[:PROMPT]), stop)
            for b, text in enumerate(texts[first : first + rows])
        ]
        drawing = "drawn" if usual else "greedy"
        state: Any = SimpleNamespace(rows=batch, padding=[0] * len(batch), memories={}, again=0)
        state.drawing, state.noise, state.room = drawing, None, None
        for row in batch:
            row.tokens.append(texts[row.index][PROMPT])
        while state.rows:
            state.roots_B = torch.tensor([row.tokens[-1] for row in state.rows])
            nodes = 1
            paths: list[list[int]] = [[] for _ in state.rows]
            if drafter is not None:
                tree = drafter.propose(state)
                nodes = tree.num_nodes
                ahead = [texts[row.index][row.length :] for row in state.rows]
                drafted = ahead, tree.tokens_BN.tolist(), tree.parents_BN.tolist()
                paths = [_accepted(*each) for each in zip(*drafted, strict=True)]
            took = machine.step(nodes * len(state.rows))
            time.work(took)
            for row, path in zip(state.rows, paths, strict=True):
                text = texts[row.index]
                row.tokens += text[row.length : row.length + len(path) + 1]
            if drafter is not None:
                if usual:
                    drafter.observe(tree, said(tree.tokens_BN, usual))
                drafter.learn_seconds(nodes - 1, took)
            state.rows = [row for row in state.rows if row.length < len(texts[row.index])]
            state.padding = [0] * len(state.rows)
    return time.now - began


def _accepted(ahead: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The nodes of a tree that hold what comes, one behind the other."""
    node, path = 0, []
    for true in ahead:
        children = [n for n in range(1, len(tokens)) if parents[n] == node and tokens[n] == true]
        if not children:
            break
        node = children[0]
        path.append(node)
    return path
