"""Rows that join and leave a running batch have the texts that generate() writes of each alone."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from medusa_heads import DraftedModel, MedusaModel, TargetModel
from medusa_heads.inference.engine.rows import Row
from medusa_heads.inference.engine.running import RunningBatch
from medusa_heads.inference.models.training_free import TrainingFreeModel
from medusa_heads.target.stacks import Stacks
from scripts.prove.tiny_models import builder
from tests.conftest import DEVICE, TinyLlama
from tests.inference.joining import (
    LONG,
    Breaking,
    Guest,
    PlantedOfPrompt,
    PlantingOfPrompt,
    check,
    guests,
    host,
    of_one_kind,
    truth_of,
)
from tests.inference.recurrent import CHAIN, short_target
from tests.inference.rereading import RereadingDrafter, random_heads
from tests.pairs import with_slow

GREEDY: dict[str, Any] = {"do_sample": False}
WARM: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_p": 0.9, "top_k": 0}
HOT: dict[str, Any] = {"do_sample": True, "temperature": 1.4, "top_k": 0}
PENALISED: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.3}
TOKENS = range(3, 199)


@pytest.fixture(scope="module")
def model(tiny_llama: TinyLlama) -> Any:
    return tiny_llama(eos_token_id=7, pad_token_id=0).to(DEVICE)


@pytest.fixture(scope="module")
def mixed(model: Any) -> list[Guest]:
    """Greedy and drawn texts, which nothing that is drafted changes: written once, by a drafter
    that no test of them has."""
    visitors, alone = guests(9, GREEDY, WARM, tokens=TOKENS), TrainingFreeModel(model, "suffix")
    for guest in visitors:
        guest.expected(alone)
    return visitors


def planted(target: TargetModel, visitors: Any, model: Any, *args: Any) -> PlantedOfPrompt:
    truths = {tuple(guest.prompt): guest.expected(model) for guest in visitors}
    return PlantedOfPrompt(truths, target.vocab_size, *args)


@pytest.mark.parametrize("max_rows", with_slow([1, 5], [2]))
def test_greedy_rows_with_planted_drafts(model: Any, max_rows: int) -> None:
    target, visitors = TargetModel(model), guests(10, GREEDY, PENALISED, tokens=TOKENS)
    batch = RunningBatch(target, planted(target, visitors, model), max_rows)
    check(batch, visitors, model)
    assert batch.stats.tokens_per_step > 1.5  # some hardly begin


def test_drawn_rows_are_those_of_their_seed_alone(model: Any) -> None:
    """Whatever stands beside them: greedy rows, and others of other settings."""
    alone = TrainingFreeModel(model, "recycling")
    visitors = guests(10, GREEDY, WARM, HOT, WARM, tokens=TOKENS, seed=1)
    drafter = planted(alone.target, visitors, alone)
    check(RunningBatch(alone.target, drafter, 6), visitors, alone)


def test_rows_that_join_wrongly_are_noticed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: what a row brings along is another text's."""
    target, visitors = TargetModel(model), guests(10, GREEDY, tokens=TOKENS)
    drafter, join = planted(target, visitors, model), Stacks.join

    def join_wrongly(own: Stacks, other: Stacks, *args: Any) -> None:
        other.stacks = [stack.roll(1, dims=3) for stack in other.stacks]
        join(own, other, *args)

    monkeypatch.setattr(Stacks, "join", join_wrongly)
    got = host(RunningBatch(target, drafter, 5), visitors)
    whole = [pair for pair in zip(got, visitors, strict=True) if pair[1].leaves is None]
    assert any(text != guest.expected(model) for text, guest in whole)


HEADS: dict[str, dict[str, Any]] = {
    "medusa": {},
    "medusa, prefix, features": {"prefix_attention": True, "features": [0]},
    "hydra, prefix": {"kind": "hydra", "prefix_attention": True},
    "hydra, induction": {"kind": "hydra", "induction": True},
    "eagle3": {"kind": "eagle3"},
    "block": {"kind": "block"},
}
READERS = ("medusa, prefix, features", "hydra, prefix")


@pytest.mark.parametrize(
    ("tree", "kind"),
    [
        # Each kind has the adaptive tree, or one fixed tree or another, in a quick one.
        pytest.param(tree, kind, marks=[] if i % 3 == j else [pytest.mark.slow])
        for j, tree in enumerate(("auto", 8, "dynamic:8"))
        for i, kind in enumerate(HEADS)
    ],
)
def test_heads_draft_for_rows_that_come_and_go(
    model: Any, mixed: list[Guest], kind: str, tree: Any
) -> None:
    torch.manual_seed(0)
    heads = random_heads(model, **HEADS[kind])
    medusa = MedusaModel(model, heads, tree=tree)
    batch = medusa.running_batch(4)
    truths = {tuple(guest.prompt): guest.expected(model) for guest in mixed}
    if tree != "auto":  # which learns from what it drafts
        batch = RunningBatch(
            medusa.target, PlantingOfPrompt(medusa.drafter, truths, medusa.target.vocab_size), 4
        )
    check(batch, mixed, model)


@pytest.mark.parametrize(
    "drafter", with_slow(["auto"], ["recycling", "suffix", "lookahead", "early_exit"])
)
def test_drafters_without_training(tiny_llama: TinyLlama, drafter: str) -> None:
    model = tiny_llama(vocab_size=24, eos_token_id=7, pad_token_id=0).to(DEVICE)
    drafted = TrainingFreeModel(model, drafter)
    visitors = guests(7, GREEDY, WARM, tokens=range(8, 24))
    check(drafted.running_batch(4), visitors, drafted)


@pytest.mark.parametrize("tree", with_slow(["auto", "sampled:3"], ["chain:3", "dynamic:9"]))
def test_a_draft_model(model: Any, mixed: list[Guest], tiny_llama: TinyLlama, tree: str) -> None:
    draft = tiny_llama(num_layers=1, eos_token_id=7, pad_token_id=0).to(DEVICE)
    # Drafts that are drawn keep the law of a drawn text alone, which other drafts would change.
    own = guests(6, GREEDY, WARM, tokens=TOKENS) if tree.startswith("sampled") else mixed
    drafted = DraftedModel(model, draft, tree=tree)
    check(drafted.running_batch(4), own, drafted)


@pytest.mark.parametrize("kind", with_slow(READERS[:1], READERS[1:]))
def test_what_heads_read_of_a_text_is_what_they_would_read_of_it_anew(
    model: Any, kind: str
) -> None:
    target, heads = TargetModel(model), random_heads(model, **HEADS[kind])
    visitors = guests(9, GREEDY, tokens=TOKENS)
    truths = {tuple(guest.prompt): guest.expected(model) for guest in visitors}

    class Rereading(RereadingDrafter):
        def truth(self, row: Row) -> Sequence[int]:
            return truth_of(truths, row)

    drafter = Rereading(heads, target, [], target.vocab_size)
    check(RunningBatch(drafter.target, drafter, 4), visitors, model)
    assert drafter.compared > 30


def test_a_draft_model_that_is_the_target_is_always_right(model: Any) -> None:
    """With rows that come and go it has read of each text what was committed, and nothing else."""
    drafted = DraftedModel(model, copy.deepcopy(model), tree="chain:3")
    visitors = guests(9, GREEDY, tokens=TOKENS)
    batch = drafted.running_batch(4)
    check(batch, visitors, drafted)
    accepted = batch.stats.accepted
    ends = 2 * len(visitors)  # the prompt's own step, and the last
    assert accepted[3] >= batch.stats.steps - ends


@pytest.mark.parametrize("kind", with_slow(["lfm2"], ["qwen3_next", "falcon_h1"]))
@pytest.mark.filterwarnings("ignore:.*verifies a chain of drafts, not a tree")
def test_targets_with_a_recurrent_state(kind: str) -> None:
    target = short_target(kind)
    visitors = guests(7, GREEDY, tokens=range(1, 190))
    batch = RunningBatch(target, planted(target, visitors, target.model, CHAIN), 4)
    assert batch.max_rows == 4
    check(batch, visitors, target.model)
    assert batch.tokens / batch.stats.steps > 1.5


@pytest.mark.filterwarnings("ignore:.*verifies a chain of drafts, not a tree")
def test_a_target_whose_rows_cannot_be_decoded_together_takes_them_one_by_one() -> None:
    target = TargetModel(builder("bloom")((0.15, 0.15)))
    target.freeze()
    visitors = guests(4, GREEDY, tokens=range(3, 100))
    batch = RunningBatch(target, planted(target, visitors, target.model, CHAIN), 4)
    assert batch.max_rows == 1 and "goes by cache slots" in str(batch.alone)
    check(batch, visitors, target.model)


def test_a_long_row_gives_its_cache_back(model: Any) -> None:
    batch = TrainingFreeModel(model, "suffix").running_batch(2)
    long, short = (torch.arange(8, 8 + n, device=DEVICE)[None] % 190 + 8 for n in (300, 3))
    first = batch.add(long, max_new_tokens=4, min_new_tokens=4)
    batch.add(short, max_new_tokens=90, min_new_tokens=90)
    both = batch.cache_bytes()
    held = batch.held_bytes
    while not first.done:
        assert not batch.step()
    assert batch.cache_bytes() < both / 2 and batch.held_bytes < held / 2
    while batch.rows:
        assert not batch.step()
    assert batch.cache_bytes() == batch.held_bytes == 0


@pytest.mark.parametrize("at_ends", [False, True])
def test_a_row_whose_streamer_raises_leaves_alone(model: Any, at_ends: bool) -> None:
    first, second = of_one_kind(2)
    batch, gone = TrainingFreeModel(model, "suffix").running_batch(4), OSError("nobody listens")
    left = batch.add(first.inputs(), Breaking(gone, 3, at_ends), **LONG)
    stays = batch.add(second.inputs(), **LONG)
    failed: dict[Row, Exception] = {}
    while batch.rows:
        failed |= batch.step()
    assert failed == {left: gone} and left.done and len(left.tokens) < 20
    assert stays.tokens == second.expected(model)


def test_an_interrupt_ends_the_rows_beside_which_it_came(model: Any) -> None:
    """They would go on with a cache that holds half a step; rows of another kind do go on."""
    first, second, third = of_one_kind(3)
    batch = TrainingFreeModel(model, "suffix").running_batch(4)
    third.options = {**LONG, "repetition_penalty": 1.3}
    row = batch.add(first.inputs(), Breaking(KeyboardInterrupt(), 4), **LONG)
    beside = batch.add(second.inputs(), **LONG)
    other = batch.add(third.inputs(), **third.options)
    with pytest.raises(KeyboardInterrupt):
        while not row.done:
            assert not batch.step()
    assert batch.rows == [other] and row.done and beside.done
    while batch.rows:
        assert not batch.step()
    assert other.tokens == third.expected(model)


def test_rows_that_a_broken_join_spoilt_fail(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError

    first, second = of_one_kind(2)
    batch = TrainingFreeModel(model, "suffix").running_batch(4)
    row = batch.add(first.inputs(), **LONG)
    monkeypatch.setattr(Stacks, "join", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        batch.add(second.inputs(), **LONG)
    assert list(batch.step()) == [row] and not batch.rows


@pytest.mark.parametrize("of_streamer", [False, True])
def test_what_rows_that_failed_held_is_free_at_once(
    of_streamer: bool, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not when Python collects cycles, though somebody keeps the row."""
    (guest,) = of_one_kind(1)
    batch, gone = TrainingFreeModel(model, "suffix").running_batch(4), MemoryError("none left")
    row = batch.add(guest.inputs(), Breaking(gone, 3) if of_streamer else None, **LONG)
    assert not batch.step()
    (running,) = batch._batches.values()
    cache = weakref.ref(running.state.cache)
    del running

    def fall(*_: Any, **__: Any) -> None:
        raise gone

    gc.collect()
    gc.disable()
    try:
        if not of_streamer:
            monkeypatch.setattr(model, "forward", fall)
        failed: dict[Row, Exception] = {}
        while batch.rows:
            failed |= batch.step()
        assert cache() is None
    finally:
        gc.enable()
    assert failed == {row: gone} and row.fault is gone


def test_long_settings_are_told_apart_by_their_middle(model: Any) -> None:
    """A long tensor is written without it."""
    (guest,) = of_one_kind(1)
    plain = guest.expected(model)
    batch, rows = TrainingFreeModel(model, "suffix").running_batch(2), []
    for suppressed in ([0] * 3001, [0] * 1500 + plain[4:5] + [0] * 1500):
        asked = Guest(guest.prompt, 0, {**LONG, "suppress_tokens": suppressed})
        rows.append((asked, batch.add(asked.inputs(), **asked.options)))
    while batch.rows:
        assert not batch.step()
    for asked, row in rows:
        assert row.tokens == asked.expected(model)
