"""The longest suffix that occurred before, against looking for it everywhere."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_heads.inference.lookup.suffix_automaton import Continuation, SuffixAutomaton


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), max_size=60))
def test_finds_what_a_search_finds(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for end, token in enumerate(text, 1):
        automaton.extend([token])
        read = text[:end]
        longest = next((n for n in range(end - 1, 0, -1) if occurs_before(read, n)), 0)
        assert automaton.match_length == longest
        if longest:
            behind = automaton.match_end
            assert behind < end and read[behind - longest : behind] == read[-longest:]
            assert automaton.continuation(4).tokens == read[behind : behind + 4]
        else:
            assert automaton.continuation(4).tokens == []


def occurs_before(text: list[int], length: int) -> bool:
    suffix = text[-length:]
    return any(text[i : i + length] == suffix for i in range(len(text) - length))


def test_reading_at_once_or_bit_by_bit_is_the_same() -> None:
    text = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1]
    whole, parts = SuffixAutomaton(text), SuffixAutomaton(text[:3])
    parts.extend(text[3:7])
    parts.extend(text[7:])
    assert (whole.match_length, whole.match_end) == (parts.match_length, parts.match_end) == (4, 4)
    assert whole.continuation(3) == Continuation(4, [2, 4, 1], [1.0] * 3)
