"""What a suffix drafter keeps of every row's text, and where it looks for the text's end.

Shapes: B active rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from medusa_heads.inference.continuation import Continuation
from medusa_heads.inference.drafters.trust import SuffixTrust
from medusa_heads.inference.suffix_automaton import SuffixAutomaton

if TYPE_CHECKING:
    from medusa_heads.inference.corpus_index import CorpusIndex
    from medusa_heads.inference.row import Row
    from medusa_heads.inference.state import DecodingState

_WORTH_LOOKING = 0.05  # tokens
_SELDOM = 8  # looks of which one is taken

TokenPath = tuple[list[int], list[float]]  # tokens, and the chance that all up to each follow


class SuffixSources:
    """Where the end of a text may have occurred before: in the text itself, and in a corpus. How
    far each can be believed is learnt from every text.

    Args:
        corpus: besides the text; None for none.
    """

    def __init__(self, corpus: CorpusIndex | None = None) -> None:
        self._corpus = corpus
        self._trusts = (SuffixTrust(), SuffixTrust())  # of the text, and of the corpus
        self._promised = 1.0  # tokens that a look into the corpus promises: a running mean
        self._passed_by = 0  # looks since the last

    def search(self, automaton: SuffixAutomaton, most: int) -> list[Continuation]:
        """What each of them says to follow a text, at most so many tokens."""
        found = [automaton.continuation(most)]
        if self._corpus is not None and self._worth_looking():
            found.append(self._corpus.continuation(automaton.text, most))
        return found

    def paths(self, found: list[Continuation]) -> list[TokenPath]:
        """The same with the chances that they are right."""
        paths = []
        for trust, each in zip(self._trusts, found, strict=False):
            chances = trust.chances(each)
            paths.append((each.tokens[: len(chances)], chances))
        if len(paths) == len(self._trusts):
            self._promised += 0.05 * (sum(paths[-1][1]) - self._promised)
        return paths

    def learn(self, found: list[Continuation], committed: list[int]) -> None:
        """Compare what was found with what the target wrote."""
        for trust, each in zip(self._trusts, found, strict=False):
            trust.learn(each, committed)

    def _worth_looking(self) -> bool:
        """Whether a look promises more than it takes; else one is taken now and then."""
        self._passed_by += 1
        if self._promised < _WORTH_LOOKING and self._passed_by < _SELDOM:
            return False
        self._passed_by = 0
        return True


class SuffixMemory:
    """A suffix automaton for every active row.

    Args:
        sources: learn from every step.
        most: tokens that a continuation has at most.
    """

    def __init__(self, sources: SuffixSources, most: int) -> None:
        self._sources = sources
        self._most = most
        self._automata: dict[int, SuffixAutomaton] = {}
        self._promised: dict[int, list[Continuation]] = {}

    def continuations(self, state: DecodingState) -> list[list[TokenPath]]:
        """For every active row what may follow, from each source."""
        paths_B = []
        for row, padding in zip(state.rows, state.padding, strict=True):
            found = self._sources.search(self._read(row, padding), self._most)
            self._promised[row.index] = found
            paths_B.append(self._sources.paths(found))
        return paths_B

    def _read(self, row: Row, padding: int) -> SuffixAutomaton:
        automaton = self._automata.get(row.index)
        if automaton is None:
            prompt: list[int] = row.ids_1T()[0, padding:].tolist()
            automaton = self._automata[row.index] = SuffixAutomaton(prompt)
            return automaton
        committed = row.behind(padding + len(automaton.text))
        self._sources.learn(self._promised[row.index], committed)
        automaton.extend(committed)
        return automaton
