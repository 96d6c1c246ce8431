"""Drafters are told how long their trees took, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from medusa_heads import TargetModel
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.trees.tree import TokenTree
from tests.conftest import DEVICE, TinyLlama
from tests.inference.clock import Clock
from tests.inference.planted import PlantedDrafter
from tests.inference.rereading import run

SLOW = 0.03


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class SlowDrafter(PlantedDrafter):
    """Takes its time, and remembers what it is told."""

    def __init__(
        self,
        clock: Clock,
        vocab_size: int,
        choices: list[tuple[int, ...]],
        reference: Sequence[int] = (),
    ) -> None:
        self.clock = clock
        super().__init__([reference] * 8, vocab_size, choices, share=1.0)
        self.rows: list[int] = []
        self.steps: list[tuple[int, float]] = []
        self.observed: list[int] = []

    def propose(self, state: DecodingState) -> TokenTree:
        self.clock.work(SLOW)
        self.rows.append(len(state.rows))
        return super().propose(state)

    def observe(self, tree: TokenTree, logits_BNV: Tensor) -> None:
        assert logits_BNV.shape[:2] == tree.tokens_BN.shape
        self.observed.append(logits_BNV.shape[0])

    def learn_seconds(self, nodes: int, seconds: float) -> None:
        self.steps.append((nodes, seconds))


class SlowProcessor(LogitsProcessor):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.clock.work(SLOW)
        return scores

    def of_row(self, row: int) -> SlowProcessor:
        return self  # a copy would have a clock of its own


def test_steps_are_timed_without_drafting_and_with_what_one_token_takes(
    tiny_llama: TinyLlama, clock: Clock
) -> None:
    model: Any = tiny_llama().to(DEVICE)
    ids_BT = torch.tensor([[5, 6, 7]], device=DEVICE)
    expected = model.generate(ids_BT, max_new_tokens=20, do_sample=False)[0, 3:].tolist()
    drafter = SlowDrafter(clock, 199, [(0,), (0, 0), (0, 0, 0)], expected)
    model.generate(
        ids_BT,
        max_new_tokens=20,
        do_sample=False,
        logits_processor=LogitsProcessorList([SlowProcessor(clock)]),
        custom_generate=partial(run, TargetModel(model), drafter),
    )
    assert len(drafter.rows) == 5  # every draft was accepted
    # The first steps of a text also make what later ones find.
    assert [nodes for nodes, _ in drafter.steps] == [3, 3, 3]
    seconds = median(seconds for _, seconds in drafter.steps)
    # A step that commits four tokens waits for the processor four times, but elsewhere than on a
    # CPU nobody knows what of it was the target.
    assert seconds == pytest.approx(SLOW if DEVICE == "cpu" else 4 * SLOW, rel=0.01)


@pytest.mark.skipif(DEVICE != "cpu", reason="elsewhere the walk also waits for the target")
def test_of_a_batch_s_walk_a_level_is_taken_off_for_each_token_of_a_mean_row(
    tiny_llama: TinyLlama, clock: Clock
) -> None:
    model: Any = tiny_llama().to(DEVICE)
    ids_BT = torch.tensor([[5, 6, 7], [8, 9, 10]], device=DEVICE)
    expected = model.generate(ids_BT, max_new_tokens=20, do_sample=False)[0, 3:].tolist()
    drafter = SlowDrafter(clock, 199, [(0,), (0, 0), (0, 0, 0)], expected)
    model.generate(
        ids_BT,
        max_new_tokens=20,
        do_sample=False,
        logits_processor=LogitsProcessorList([SlowProcessor(clock)]),
        custom_generate=partial(run, TargetModel(model), drafter),
    )
    # One row's drafts were all accepted, none of the other's, which then goes on alone.
    assert drafter.rows[:6] == [2, 2, 2, 2, 2, 1]
    together, alone = drafter.steps[0][1], drafter.steps[-1][1]
    # The processor works for five tokens, on four levels; a mean row commits 2.5, one of them in
    # any case.
    assert together == pytest.approx(5 * SLOW * (1 - 1.5 / 4), rel=0.01)
    assert alone == pytest.approx(SLOW, rel=0.01)
