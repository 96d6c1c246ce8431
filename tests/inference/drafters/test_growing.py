"""Growth from several sources: the likeliest nodes, agreeing sources in one of them."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_heads.inference.adapt.evidence import LEVELS, Evidence, level
from medusa_heads.inference.drafters.growing import Agreement, Growing, Proposal
from tests.inference.drafters.growing import grow

# What is offered behind each path of tokens.
Table = dict[tuple[int, ...], dict[int, float]]


class Tabled(Proposal):
    """A place is the path that leads to it."""

    def __init__(self, table: Table, evidence: Evidence | None = None) -> None:
        super().__init__(evidence or Evidence([1.0], memory=1e9), (), self._after)
        self._table = table

    def _after(self, place: Hashable) -> list[tuple[int, float, int, Hashable]]:
        assert isinstance(place, tuple)
        found = self._table.get(place, {})
        return [(token, chance, 0, (*place, token)) for token, chance in found.items()]


def paths_of(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for node in range(1, len(tokens)):
        found.append((*found[parents[node]], tokens[node]))
    return found[1:]


CHANCES = st.lists(st.floats(0.05, 0.3), min_size=3, max_size=3)
PATHS = [(), *((a,) for a in range(3)), *((a, b) for a in range(3) for b in range(3))]


@settings(deadline=None)
@given(st.fixed_dictionaries(dict.fromkeys(PATHS, CHANCES)), st.integers(0, 14))
def test_the_likeliest_nodes_in_order(
    chances: dict[tuple[int, ...], list[float]], most: int
) -> None:
    table = {path: dict(enumerate(each)) for path, each in chances.items()}
    tree = grow(9, [Tabled(table)], most)
    reached: dict[tuple[int, ...], float] = {(): 1.0}
    for path in PATHS:
        for token, chance in table[path].items():
            longer = (*path, token)
            reached[longer] = reached[path] * chance
    del reached[()]
    best = sorted(reached.values(), reverse=True)[:most]
    assert tree.chances[1:] == pytest.approx(best)
    found = paths_of(tree.tokens, tree.parents)
    assert len(set(found)) == len(found)
    assert [reached[path] for path in found] == pytest.approx(tree.chances[1:])


def test_sources_that_agree_share_a_node_and_go_on_behind_it_together() -> None:
    one: Table = {(): {1: 0.5}, (1,): {2: 0.4}}
    other: Table = {(): {1: 0.4, 3: 0.1}, (1,): {4: 0.6}}
    tree = grow(9, [Tabled(one), Tabled(other)], 9)
    assert tree.tokens == [9, 1, 4, 2, 3] and tree.parents == [-1, 0, 1, 1, 0]
    both = 0.5 + 0.4 - 0.5 * 0.4  # right more often than either
    assert tree.chances[1:] == pytest.approx([both, both * 0.6, both * 0.4, 0.1])


def test_agreement_is_believed_as_far_as_it_came_true() -> None:
    """Two that always agree know no more than one of them; who is contradicted knows less."""
    one: Table = {(): {1: 0.6, 2: 0.3}, (1,): {4: 0.5}}
    other: Table = {(): {1: 0.6, 3: 0.3}}
    agreement = Agreement()
    for step in range(2000):  # 1 comes six times in ten, 2 twice, 3 once, and once none of them
        agreement.learn([Tabled(one), Tabled(other)], [(1, 2, 1, 3, 1, 2, 1, 5, 1, 1)[step % 10]])
    tree = grow(9, [Tabled(one), Tabled(other)], 9, agreement=agreement)
    assert tree.tokens == [9, 1, 4, 2, 3]
    agreed, behind, *alone = tree.chances[1:]
    assert agreed == pytest.approx(0.6, abs=0.02)
    assert behind == pytest.approx(0.5 * agreed)  # where one speaks alone it is no question
    assert alone == pytest.approx([0.15, 0.15], abs=0.01)
    assert grow(9, [Tabled(one)], 9, agreement=agreement).chances[1:] == [0.6, 0.3, 0.3]
    silent = grow(9, [Tabled(one), Tabled({})], 9, agreement=agreement)
    assert silent.chances[1:] == [0.6, 0.3, 0.3]  # who says nothing contradicts nobody
    sure = [Tabled({(): {1: 1.0}}) for _ in range(2)]
    assert grow(9, sure, 1, agreement=agreement).chances == [1.0, 0.999]  # no draft is certain


def test_each_place_teaches_who_speaks_there() -> None:
    """One source of itself, several of what comes of them together, as far as any was right; and
    nothing is learnt of what a budget would not have thought about."""
    deep: Table = {(): {1: 0.5}, (1,): {2: 0.5}, (1, 2): {3: 0.4}, (1, 2, 3): {4: 0.6}}
    short: Table = {(): {1: 0.5, 7: 0.007}, (1,): {2: 0.5, 8: 0.1}, (5,): {6: 0.5}}
    both, alone = level(0.75) + LEVELS, level(0.1)
    twice = [(both, 1.0, 0.75)] * 2
    for committed, together, own in [
        # Two right tokens that both offered, and a wrong one that one of them did.
        ([1, 2, 3, 4], [*twice, (alone, 0.0, 0.1)], [(0, 1.0, 0.4), (0, 1.0, 0.6)]),
        ([1, 2, 9, 4], [*twice, (alone, 0.0, 0.1)], [(0, 0.0, 0.4)]),
        ([5, 6], [(both, 0.0, 0.75)], []),
        ([1], [(both, 1.0, 0.75)], []),
    ]:
        agreement, evidence = Agreement(), Evidence([1.0], memory=1e9)
        agreement.learn([Tabled(deep, evidence), Tabled(short)], committed)
        expected, of_one = Evidence([1.0] * 2 * LEVELS), Evidence([1.0], memory=1e9)
        # Tokens of one place in the order in which they were offered: of each group that is one.
        expected.learn_all(together)
        of_one.learn_all(own)
        assert evidence.columns == of_one.columns
        for got, wanted in zip(agreement.evidence.columns, expected.columns, strict=True):
            assert got == pytest.approx(wanted)


def test_what_is_no_number_is_left_out_and_teaches_nothing() -> None:
    """Of one source or beside others, whose offers all stay."""
    nan, evidence = float("nan"), Evidence([1.0], memory=1e9)
    unsure = Tabled({(): {1: nan, 2: 0.3}}, evidence)
    assert grow(9, [unsure], 9).tokens == [9, 2]
    tree = grow(9, [unsure, Tabled({(): {1: 0.5, 3: 0.1}})], 9)
    assert tree.tokens == [9, 1, 2, 3] and tree.chances[1:] == pytest.approx([0.5, 0.3, 0.1])
    unsure.learn([1])
    assert evidence.rate(0) == pytest.approx(4.0 / 4.3)


def test_sources_that_contradict_each_other_promise_no_more_than_certainty() -> None:
    tree = grow(9, [Tabled({(): {1: 0.9}}), Tabled({(): {2: 0.9}})], 9)
    assert tree.chances[1:] == pytest.approx([0.5, 0.5]) and tree.expected[-1] <= 1.0


def test_a_node_that_sources_share_is_promised_once() -> None:
    one: Table = {(): {1: 0.8, 2: 0.15}}
    other: Table = {(): {1: 0.5, 3: 0.4}}
    tree = grow(9, [Tabled(one), Tabled(other)], 9)
    both = 0.8 + 0.5 - 0.8 * 0.5
    total = both + 0.15 + 0.4
    assert tree.tokens == [9, 1, 3, 2]
    assert tree.chances[1:] == pytest.approx([both / total, 0.4 / total, 0.15 / total])


def test_a_chain_where_branches_cannot_be_verified() -> None:
    table: Table = {(): {1: 0.3, 2: 0.5}, (2,): {3: 0.2, 4: 0.1}, (1,): {5: 0.9}}
    tree = grow(9, [Tabled(table)], 9, chain_only=True)
    assert tree.tokens == [9, 2, 3] and tree.parents == [-1, 0, 1]


def test_no_node_below_the_least_chance() -> None:
    table: Table = {(): {1: 0.5, 2: 0.05}, (1,): {3: 0.5, 4: 0.1}}
    tree = grow(9, [Tabled(table)], 9, least=0.2)
    assert tree.tokens == [9, 1, 3]
    assert grow(9, [], 9).tokens == [9]


def test_what_was_committed_teaches_as_far_as_the_source_was_right() -> None:
    evidence = Evidence([1.0], weight=1.0, memory=1e9)
    proposal = Tabled({(): {1: 0.5, 2: 0.5}, (1,): {3: 0.5}, (2,): {4: 1.0}}, evidence)
    proposal.learn([1, 8, 9])
    # Expected 0.5 + 0.5 + 0.5 over a prior of 1; one was right, and nothing behind 8 is known.
    assert evidence.rate(0) == pytest.approx((1.0 + 1.0) / (1.0 + 1.5))
    proposal.learn([7])
    assert evidence.rate(0) == pytest.approx(2.0 / 3.5)


def test_of_equal_chances_the_first_to_be_offered_comes_first() -> None:
    table: Table = {(): {5: 0.25, 3: 0.25, 4: 0.25}, (5,): {1: 0.999}}
    tree = grow(9, [Tabled(table)], 9)
    # A source offers the larger of equally likely tokens first.
    assert tree.tokens == [9, 5, 4, 3, 1] and tree.parents == [-1, 0, 0, 0, 1]


def test_the_least_chance_itself_is_wanted() -> None:
    table: Table = {(): {1: 0.5, 2: 0.25}, (1,): {3: 0.5, 4: 0.25}}
    tree = grow(9, [Tabled(table)], 9, least=0.25)
    assert tree.tokens == [9, 1, 2, 3] and tree.parents == [-1, 0, 0, 1]


def test_of_several_sources_too_the_least_chance_itself_is_wanted() -> None:
    one: Table = {(): {1: 0.5, 2: 0.25, 3: 0.1}}
    other: Table = {(): {4: 0.25, 5: 0.1}}
    assert grow(9, [Tabled(one), Tabled(other)], 9, least=0.25).tokens == [9, 1, 2, 4]


def test_a_chain_goes_on_with_the_first_of_equally_likely_tokens() -> None:
    sources = [Tabled({(): {3: 0.5}}), Tabled({(): {7: 0.5}})]
    assert grow(9, sources, 9, chain_only=True).tokens == [9, 3]


def test_a_tree_grows_as_far_as_it_is_asked_to() -> None:
    growing = Growing(9, [Tabled({(): {1: 0.9, 2: 0.6, 3: 0.3}, (1,): {4: 0.5}})], 3)
    growing.to(1)
    assert growing.tree.tokens == [9, 1] and growing.next == pytest.approx(0.6 / 1.8)
    growing.to(9)
    # One source may promise more than a certainty, too.
    assert growing.tree.chances[1:] == pytest.approx([0.9 / 1.8, 0.6 / 1.8, 0.5 * 0.9 / 1.8])
    assert growing.next == 0.0  # there is no room for another
