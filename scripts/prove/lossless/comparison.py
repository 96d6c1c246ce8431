"""A decoded text against what `generate()` writes, token by token.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from torch import Tensor

from scripts.prove.lossless.texts import Reference

EPSILON = 1e-4  # standard deviations of the logits; forwards of unlike shapes round by some 1e-6


@dataclass
class Comparison:
    """What came of it.

    Attributes:
        tokens: compared; of a row that differs by a tie, those up to the tie. Rows that draw from
            one stream of random numbers are compared up to the first tie of any of them.
        mismatches: of them, from a row's first difference on.
        ties: rows that take the other of two candidates which fp32 does not tell apart.
        gaps: of each tie, in standard deviations of the logits.
        where: row, place, token of generate() and token decoded of the first mismatch.
    """

    tokens: int = 0
    mismatches: int = 0
    ties: int = 0
    gaps: list[float] = field(default_factory=list)
    where: tuple[int, int, int | None, int | None] | None = None


def compare(reference: Reference, got_BT: Tensor, *, judge_ties: bool = True) -> Comparison:
    """Compare every row up to its end, and what it is padded with behind that."""
    found = Comparison()
    prompt, expected_BT = reference.prompt_length, reference.sequences_BT
    same_prompts = got_BT.shape[0] == expected_BT.shape[0] and bool(
        (got_BT[:, :prompt] == expected_BT[:, :prompt]).all()
    )
    got_rows = got_BT[:, prompt:].tolist() if same_prompts else [[]] * len(expected_BT)
    # A tie may let the longest row end elsewhere: all are padded to that.
    ragged = got_BT.shape[1] != expected_BT.shape[1]
    rows = list(zip(reference.rows, got_rows, strict=True))
    places = [_first_difference(expected, got) for expected, got in rows]
    gaps = {
        row: gap
        for row, place in enumerate(places)
        if place is not None
        and judge_ties
        and (gap := _tie(reference, row, place, *_tokens_at(*rows[row], place))) is not None
    }
    # Rows that draw from one stream of random numbers all draw others, once one has left the rest.
    together = _first(places, gaps) if reference.text.in_step else sys.maxsize
    for row, (place, (expected, got)) in enumerate(zip(places, rows, strict=True)):
        if place is None:
            found.tokens += len(expected)
        elif row in gaps and place <= together:
            found.tokens += place
            found.ties += 1
            found.gaps.append(gaps[row])
        elif place > together:
            found.tokens += together + 1
        else:
            found.tokens += len(expected)
            found.mismatches += max(len(expected) - place, 1)
            found.where = found.where or (row, place, *_tokens_at(expected, got, place))
    if ragged and not found.ties and not found.mismatches:
        found.mismatches = 1  # every token right, and not as many columns as generate() returns
    return found


def _tokens_at(expected: list[int], got: list[int], place: int) -> tuple[int | None, int | None]:
    right = expected[place] if place < len(expected) else None
    return right, got[place] if place < len(got) else None


def _first(places: list[int | None], gaps: dict[int, float]) -> int:
    """The place of the first tie."""
    return min((place for row in gaps if (place := places[row]) is not None), default=sys.maxsize)


def _first_difference(expected: list[int], got: list[int]) -> int | None:
    for place, token in enumerate(expected):
        if place >= len(got) or got[place] != token:
            return place
    # Behind its end a row is filled with padding, which is 0 in every text here.
    return len(expected) if any(got[len(expected) :]) else None


def _tie(
    reference: Reference, row: int, place: int, right: int | None, wrong: int | None
) -> float | None:
    """How far apart the two tokens are, if they are the two best and next to equal."""
    if right is None or wrong is None:
        return None
    best = reference.two_best(row, place)
    if best is None or {best.best, best.second} != {right, wrong} or best.gap > EPSILON:
        return None
    return best.gap
