"""What a suffix drafter keeps of every row's text.

Shapes: B active rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from medusa_heads.inference.drafters.trust import SuffixTrust
from medusa_heads.inference.suffix_automaton import SuffixAutomaton

if TYPE_CHECKING:
    from medusa_heads.inference.row import Row
    from medusa_heads.inference.state import DecodingState


class SuffixMemory:
    """A suffix automaton for every active row.

    Args:
        trust: learns from every step.
        most: tokens that a continuation has at most.
    """

    def __init__(self, trust: SuffixTrust, most: int) -> None:
        self._trust = trust
        self._most = most
        self._automata: dict[int, SuffixAutomaton] = {}
        self._promised: dict[int, tuple[int, list[int]]] = {}

    def continuations(self, state: DecodingState) -> list[tuple[list[int], list[float]]]:
        """For every active row what may follow, and the chance that all up to each token does."""
        found = []
        for row, padding in zip(state.rows, state.padding, strict=True):
            automaton = self._read(row, padding)
            draft = automaton.continuation(self._most)
            self._promised[row.index] = (automaton.match_length, draft)
            found.append((draft, self._trust.chances(automaton.match_length, len(draft))))
        return found

    def _read(self, row: Row, padding: int) -> SuffixAutomaton:
        automaton = self._automata.get(row.index)
        if automaton is None:
            prompt: list[int] = row.ids_1T()[0, padding:].tolist()
            automaton = self._automata[row.index] = SuffixAutomaton(prompt)
            return automaton
        committed = row.behind(padding + len(automaton.text))
        self._trust.learn(*self._promised[row.index], committed)
        automaton.extend(committed)
        return automaton
