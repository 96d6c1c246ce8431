"""Values and bytes that no program expects."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

FOREIGN: list[Any] = [
    None, True, -1, 0, 1, 3, 10**12, 1e308, float("nan"), "", "medusa", "../../etc", [], [[0]], {},
    {"x": 1}, [None], "\N{SNOWMAN}" * 50,
]  # fmt: skip
"""What may stand in place of any value of a JSON file."""

NOT_NUMBERS: list[Any] = [
    "many", "", [], [1], {}, {"a": 1}, None, True, "1e", "\N{SNOWMAN}", "0x10", [[]], "nan ",
]  # fmt: skip
_WORDS = "def return the heads draft import x = 1 tree é naïve"
HUGE = 10**400  # more than a float holds


def deep(depth: int, what: str = "[") -> str:
    """JSON that is nested so deeply that a parser which calls itself gives up."""
    return "[" * depth if what == "[" else '{"a":' * depth


def many_digits(rng: random.Random) -> str:
    """An integer that Python refuses to read: it would take too long."""
    return str(rng.randint(1, 9)) * rng.randint(4_301, 9_000)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Some bytes flipped, cut out, doubled, put in, or the end gone."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8, 40])):
        if not changed:
            break
        at = rng.randrange(len(changed))
        match rng.randrange(6):
            case 0:
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                changed[at] = rng.randrange(256)
            case 2:
                del changed[at : at + rng.choice([1, 3, 30])]
            case 3:
                changed[at:at] = changed[at : at + rng.choice([1, 8, 64])]
            case 4:
                changed[at:at] = rng.choice(
                    [b"\0", b"\xff", b"\n", b'"', b"[", b"{", b"\xef\xbb\xbf"]
                )
            case 5:
                if rng.random() < 0.3:
                    del changed[at:]
    return bytes(changed)


def words(rng: random.Random, least: int = 4, most: int = 20) -> str:
    """A text of ordinary words."""
    known = _WORDS.split()
    return " ".join(rng.choice(known) for _ in range(rng.randint(least, most)))


def draw(rng: random.Random, shares: Sequence[tuple[float, T]]) -> T:
    """One of several, as likely as its share."""
    return rng.choices([each for _, each in shares], [share for share, _ in shares])[0]


def change_one(content: Any, rng: random.Random) -> Any:
    """One value of plain data, at any depth, replaced or taken away, in place."""
    place: Any = content
    while True:
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        key = rng.choice(keys)
        deeper = place[key]
        if not isinstance(deeper, dict | list) or not deeper or rng.random() < 0.2:
            break
        place = deeper
    if rng.random() < 0.2:
        del place[key]
    else:
        place[key] = rng.choice(FOREIGN)
    return content
