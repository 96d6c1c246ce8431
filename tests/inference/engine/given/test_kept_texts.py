"""Prompts that begin as ended texts did: what the target had read of these is not read again, and
every text stays the one that generate() writes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch

from medusa_heads import MedusaModel, TargetModel
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.engine.given import kept_texts
from medusa_heads.inference.engine.rows import Row
from medusa_heads.inference.engine.running import RunningBatch
from medusa_heads.inference.models.training_free import TrainingFreeModel
from medusa_heads.target.cache import RowLayer
from medusa_heads.trees.statistics import prior_statistics
from scripts.prove.tiny_models import builder
from tests.conftest import DEVICE, TinyLlama
from tests.inference.joining import Guest, PlantedOfPrompt, check, host
from tests.inference.recurrent import CHAIN, short_target
from tests.inference.rereading import random_heads
from tests.pairs import with_slow

PLENTY = 10**9
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
WARM: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_k": 0, "max_new_tokens": 12}
SYSTEM = [*range(20, 50)]


@pytest.fixture(scope="module")
def model(tiny_llama: TinyLlama) -> Any:
    return tiny_llama(eos_token_id=7, pad_token_id=0).to(DEVICE)


def conversation(model: Any, turns: int, options: dict[str, Any] = GREEDY) -> list[Guest]:
    """Each prompt is all that was said before, and a few tokens more; one comes when the one before
    has ended."""
    said, found = list(SYSTEM), list[Guest]()
    for turn in range(turns):
        said += [60 + turn, 80 + turn, 100 + turn]
        seed = 5 + turn if options["do_sample"] else None
        found.append(Guest(list(said), 40 * turn, options, seed))
        said += found[-1].expected(model)
    return found


def planted(visitors: list[Guest], model: Any, target: TargetModel, *args: Any) -> PlantedOfPrompt:
    truths = {tuple(guest.prompt): guest.expected(model) for guest in visitors}
    return PlantedOfPrompt(truths, target.vocab_size, *args)


@contextmanager
def read_tokens(model: Any) -> Iterator[list[int]]:
    """Tokens of every forward."""
    seen: list[int] = []

    def look(_: Any, args: Any, kwargs: Any) -> None:
        seen.append(int((kwargs.get("input_ids") if not args else args[0]).shape[-1]))

    handle = model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


@pytest.mark.parametrize("options", [GREEDY, WARM], ids=["greedy", "drawn"])
def test_a_conversation_goes_on_where_it_was(model: Any, options: dict[str, Any]) -> None:
    alone = TrainingFreeModel(model, "suffix")
    visitors = conversation(alone, 4, options)
    drafter = planted(visitors, alone, alone.target)
    batch = RunningBatch(alone.target, drafter, 2, kept_bytes=PLENTY)
    with read_tokens(model) as seen:
        check(batch, visitors, alone)
    prompts = [len(guest.prompt) for guest in visitors]
    assert seen[0] == prompts[0]
    # An ended text's last token was not read, and three are new.
    assert [n for n in prompts if n in seen] == prompts[:1] and seen.count(4) >= 3
    # A text that went on is kept once.
    assert batch.kept.held_bytes <= batch.row_bytes(prompts[-1] + 12)


def test_settings_that_name_the_usual_cache(model: Any) -> None:
    options = GREEDY | {"cache_implementation": "dynamic"}
    visitors = conversation(model, 2, options)
    target = TargetModel(model)
    batch = RunningBatch(target, planted(visitors, model, target), 2, kept_bytes=PLENTY)
    check(batch, visitors, model)


def test_prompts_with_the_same_instructions(model: Any) -> None:
    """Many begin alike, run side by side, and leave before their end."""
    visitors = [
        Guest([*SYSTEM, 60 + i, *range(90, 90 + i)], 3 * i, GREEDY, leaves=(None, None, 2)[i % 3])
        for i in range(9)
    ]
    target = TargetModel(model)
    batch = RunningBatch(target, planted(visitors, model, target), 3, kept_bytes=PLENTY)
    begun, join = list[Row](), batch.add

    def joined(*args: Any, **settings: Any) -> Row:
        begun.append(join(*args, **settings))
        return begun[-1]

    with mock.patch.object(batch, "add", joined):
        check(batch, visitors, model)
    assert [row.begun for row in begun[-4:]] == [len(SYSTEM)] * 4


def test_rows_of_another_text_would_be_noticed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = TargetModel(model)
    visitors = [Guest([*SYSTEM, 60], 0, GREEDY), Guest([*range(51, 81), 60, 61], 30, GREEDY)]
    expected = [guest.expected(model) for guest in visitors]
    drafter = planted(visitors, model, target)
    assert host(RunningBatch(target, drafter, 2, kept_bytes=PLENTY), visitors) == expected
    monkeypatch.setattr(kept_texts, "_in_common", lambda one, other: min(len(one), len(other)))
    assert host(RunningBatch(target, drafter, 2, kept_bytes=PLENTY), visitors) != expected


@pytest.mark.parametrize("heads", with_slow(["prefix"], ["induction", "eagle3"]))
def test_heads_that_read_the_text(model: Any, heads: str) -> None:
    """They know what is read of a prompt alone, and the text stays."""
    configs: dict[str, dict[str, Any]] = {
        "prefix": {"prefix_attention": True},
        "induction": {"induction": True},
        "eagle3": {"kind": "eagle3"},
    }
    made = random_heads(TargetModel(model), **configs[heads])
    medusa = MedusaModel(model, made, statistics=prior_statistics(3), tree="static:8")
    visitors = conversation(model, 3)
    check(medusa.running_batch(2, kept_bytes=PLENTY), visitors, model)


@pytest.mark.parametrize("kind", with_slow(["gemma2", "gpt2", "mllama"], ["deepseek_v3"]))
def test_other_architectures(kind: str) -> None:
    """Windows, keys that are values too, learnt positions, layers that read images alone."""
    target = TargetModel(builder(kind)((0.15, 0.15)))
    target.freeze()
    visitors = conversation(target.model, 3)
    batch = RunningBatch(target, planted(visitors, target.model, target), 2, kept_bytes=PLENTY)
    check(batch, visitors, target.model)
    assert batch.kept.held_bytes


@pytest.mark.filterwarnings("ignore:.*verifies a chain of drafts, not a tree")
def test_states_are_not_kept() -> None:
    target = short_target("qwen3_5_text")
    visitors = conversation(target.model, 2)
    drafter = planted(visitors, target.model, target, CHAIN)
    batch = RunningBatch(target, drafter, 2, kept_bytes=PLENTY)
    check(batch, visitors, target.model)
    assert not batch.kept.held_bytes


def test_they_take_no_more_than_was_said(model: Any) -> None:
    """The one that was of no use for longest goes first; one that is too long is not kept."""
    target = TargetModel(model)
    prompts = [[*range(20 + 40 * i, 50 + 40 * i)] for i in range(4)]
    visitors = [Guest(prompt, 0, GREEDY | {"max_new_tokens": 2}) for prompt in prompts]
    drafter = planted(visitors, model, target)
    batch = RunningBatch(target, drafter, 1)
    two = 2 * 31 * batch._slot_bytes
    batch = RunningBatch(target, drafter, 1, kept_bytes=two)

    def begins(place: int) -> int:
        row = batch.add(torch.tensor([prompts[place]], device=DEVICE), **visitors[place].options)
        while batch.rows:
            batch.step()
        assert batch.kept.held_bytes <= two
        return row.begun

    assert [begins(place) for place in (0, 1, 0, 2, 0, 1)] == [0, 0, 29, 0, 29, 0]
    small = RunningBatch(target, drafter, 1, kept_bytes=two // 4)
    host(small, visitors)
    assert not small.kept.held_bytes


@pytest.mark.parametrize("fails", [2, 4])
def test_texts_go_on_where_there_is_no_memory_for_a_copy(
    fails: int, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one's second layer, or that of the cache that the second text begins with."""
    target, visitors = TargetModel(model), conversation(model, 3)
    batch = RunningBatch(target, planted(visitors, model, target), 2, kept_bytes=PLENTY)
    update, calls, reads = RowLayer.update, [0], [False]
    began = model.register_forward_pre_hook(lambda *_: reads.__setitem__(0, True))
    ended = model.register_forward_hook(lambda *_: reads.__setitem__(0, False))

    def fall(layer: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        if not reads[0]:  # no forward of the model's calls it
            calls[0] += 1
            if calls[0] == fails:
                raise torch.OutOfMemoryError
        return update(layer, keys, values, *args, **kwargs)

    monkeypatch.setattr(RowLayer, "update", fall)
    with began, ended:
        check(batch, visitors, model)
    assert calls[0] > fails + 2 and batch.kept.held_bytes


@pytest.mark.parametrize("breaks", [False, True])
def test_a_row_that_has_ended_holds_none_of_them(model: Any, breaks: bool) -> None:
    target, visitors = TargetModel(model), conversation(model, 1)
    drafter = planted(visitors, model, target)
    batch = RunningBatch(target, drafter, 1, kept_bytes=PLENTY)
    host(batch, visitors)
    row = batch.add(visitors[0].inputs(), **GREEDY)
    with mock.patch.object(target, "verify", side_effect=ArithmeticError if breaks else None):
        batch.step() if breaks else batch.leave(row)
    assert row.done and not batch.rows and batch.kept.held_bytes
    kept = ref(batch.kept)
    del batch
    gc.collect()
    assert kept() is None


def test_none_are_kept_unless_asked(model: Any) -> None:
    target = TargetModel(model)
    visitors = conversation(model, 2)
    drafter: Drafter = planted(visitors, model, target)
    batch = RunningBatch(target, drafter, 2)
    check(batch, visitors, model)
    assert not batch.kept.held_bytes
    deterministic = TrainingFreeModel(model, "suffix", deterministic=True)
    batch = deterministic.running_batch(2, kept_bytes=PLENTY)
    check(batch, visitors, model)
    assert not batch.kept.held_bytes
