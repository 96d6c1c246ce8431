"""Drafts from the text itself, or a corpus: what followed where the text's end occurred before.

Source: prompt lookup (Saxena 2023) with the longest match of any length, as in SAM-Decoding (Hu et
al. 2024, arXiv:2411.10666).
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, TypeVar

from torch import Tensor

from medusa_heads.inference.adapt.evidence import Evidence
from medusa_heads.inference.drafters.growing import Offer, Proposal, by_drawing
from medusa_heads.inference.engine.noise import Luck, chance_drawn
from medusa_heads.inference.engine.rows import Row
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.inference.lookup.corpus_index import CorpusIndex
from medusa_heads.inference.lookup.suffix_automaton import Continuation, SuffixAutomaton

BOUNDS = (2, 3, 4, 6, 10, 16, 32)  # from these lengths of a match on, it is believed more
PRIOR = (0.3, 0.45, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
_SURE = 0.5  # of copied tokens those whose chance is near 0 or 1, so that luck says nothing of it
_WORTH_LOOKING = 0.05  # tokens
_SELDOM = 8  # searches of a corpus of which one is made that does not seem worth it
_Chance = TypeVar("_Chance", float, Tensor)


class TextProposal(Proposal):
    """What followed an earlier occurrence of the text's end. Places count its tokens."""

    def __init__(self, evidence: Evidence, found: Continuation, luck: Luck | None = None) -> None:
        super().__init__(evidence, 0, self._following)
        self._found, self._luck = found, luck

    def expected(self) -> float:
        """How many of its tokens are expected to be accepted."""
        total, chance, place = 0.0, 1.0, 0
        while chance > 0.05 and (offers := self.offers(place)):
            chance *= offers[0][0]
            total += chance
            place += 1
        return total

    def _offers(self, place: Any) -> list[Offer]:
        luck = self._luck
        if luck is None:
            return super()._offers(place)
        return [
            (chance_copied(chance, chance_drawn(chance, luck(place, token))), token, *known)
            for chance, token, *known in super()._offers(place)
        ]

    def _following(self, place: Any) -> list[tuple[int, float, int, Any]]:
        found = self._found
        if place >= len(found.tokens):
            return []
        # With each token that is right, the match is one longer.
        group = bisect_right(BOUNDS, found.match_length + place)
        return [(found.tokens[place], found.shares[place], group, place + 1)]


def chance_copied(chance: _Chance, drawn: _Chance) -> _Chance:
    """That a copied token is drawn, where one of just this probability would be with the chance
    `drawn`, by its luck. The probability is a mean over places: where the target is sure one way or
    the other, luck changes nothing."""
    return _SURE * chance + (1.0 - _SURE) * drawn


class TextSource:
    """Where the end of a text may have occurred before: in the text itself, and in a corpus. Of
    either a continuation has at `most` so many tokens."""

    name = "text"

    def __init__(self, most: int, corpus: CorpusIndex | None = None) -> None:
        self._most, self._corpus = most, corpus
        self.evidence: dict[Any, Evidence] = {**by_drawing(lambda: Evidence(PRIOR))}
        self.facts = {"corpus": corpus and corpus.digest}
        if corpus is not None:  # what is copied from there is right more or less often
            self.evidence |= {("corpus", way): Evidence(PRIOR) for way in self.evidence}
        self._usual = 1.0  # accepted tokens expected of a search of the corpus: a running mean
        self._passed_by = 0  # searches since the last that was made

    def draft(self, state: DecodingState) -> list[list[TextProposal]]:
        """For every active row what may follow: by its own text, and by the corpus."""
        known: dict[Row, SuffixAutomaton] = state.memories.get(self, {})
        drawing, drafts = state.drawing, []
        each = zip(state.rows, state.padding, strict=True)
        automata = {row: _read(known.get(row), row, padding) for row, padding in each}
        state.memories[self] = automata  # of rows that have left nothing is kept
        for row, automaton in automata.items():
            luck = None if state.noise is None else state.noise.luck(row)
            own = automaton.continuation(self._most)
            found = [TextProposal(self.evidence[drawing], own, luck)]
            if self._corpus is not None and self._worth_looking():
                continuation = self._corpus.continuation(automaton.text, self._most)
                found.append(TextProposal(self.evidence["corpus", drawing], continuation, luck))
                self._usual += 0.05 * (found[-1].expected() - self._usual)
            drafts.append(found)
        return drafts

    def _worth_looking(self) -> bool:
        """Whether a search is expected to pay; else one is made now and then."""
        self._passed_by += 1
        if self._usual < _WORTH_LOOKING and self._passed_by < _SELDOM:
            return False
        self._passed_by = 0
        return True


def _read(automaton: SuffixAutomaton | None, row: Row, padding: int) -> SuffixAutomaton:
    """A row's automaton, which has read all of the row."""
    if automaton is None:
        return SuffixAutomaton(row.ids_1T()[0, padding:].tolist())
    automaton.extend(row.behind(padding + len(automaton.text)))
    return automaton
