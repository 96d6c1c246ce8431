"""How much text is read before training, by whom, and that it never goes on for ever."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from medusa_heads.config import HeadsConfig
from medusa_heads.heads import DraftHeads, new_heads
from medusa_heads.target.target import TargetModel
from medusa_heads.training.hidden.states import HiddenStates
from medusa_heads.training.measure.beginning import fit_fresh

Rows = Callable[..., Dataset]
LEARNT = 20  # of each row


class Counted(HiddenStates):
    """Remembers the first tokens of the rows of every batch."""

    def __init__(self, target: TargetModel) -> None:
        super().__init__(target)
        self.batches: list[list[list[int]]] = []

    def of(self, inputs: Any) -> Tensor:
        self.batches.append(inputs["input_ids"][:, :2].tolist())
        return super().of(inputs)

    @property
    def read(self) -> int:
        return sum(map(len, self.batches))


def run(**settings: Any) -> Any:
    """As much of a run's arguments as matters: two passes in steps of four rows."""
    usual = {
        "train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "max_steps": -1,
        "num_train_epochs": 2,
        "world_size": 1,
        "process_index": 0,
        "seed": 0,
        "data_seed": None,
        "accelerator_config": SimpleNamespace(split_batches=False),
    }
    return SimpleNamespace(**(usual | settings))


def text(rows: Dataset, *, stream: bool = False, learnt: int = LEARNT) -> Any:
    data: Any = cycle(rows) if stream else rows
    return SimpleNamespace(
        rows=data,
        first_pass=rows if stream else None,
        rows_and_learnt=lambda: (None if stream else len(rows), float(learnt)),
    )


def heads_of(target: TargetModel, num_heads: int = 4) -> DraftHeads:
    return new_heads(target, HeadsConfig(kind="hydra", num_heads=num_heads))


@pytest.mark.parametrize(
    ("settings", "read"),
    [
        ({}, 32),  # of 64 rows and two passes
        ({"num_train_epochs": 12}, 64),  # once each
        ({"max_steps": 20}, 20),
        ({"max_steps": 20, "gradient_accumulation_steps": 2}, 40),
        ({"max_steps": 2}, 0),  # fewer positions than half the columns: nothing is read in vain
    ],
    ids=str,
)
def test_a_quarter_of_what_a_run_reads(
    target: TargetModel, make_rows: Rows, settings: dict[str, Any], read: int
) -> None:
    states = Counted(target)
    fitted = fit_fresh(heads_of(target), states, text(make_rows(64)), run(**settings))
    assert states.read == read
    assert fitted == read * (LEARNT - 4)
    assert all(len(batch) == 4 for batch in states.batches)  # no larger than those of training


@pytest.mark.parametrize("stream", [False, True])
def test_no_row_counts_twice(target: TargetModel, make_rows: Rows, stream: bool) -> None:
    """Where they fill no whole number of batches, and where a stream begins anew: fewer rows want a
    larger ridge, and no text is held out of itself."""
    states, passes = Counted(target), run(max_steps=500)
    fitted = fit_fresh(heads_of(target), states, text(make_rows(50), stream=stream), passes)
    assert states.read == 50 and len(states.batches[-1]) == 2
    assert fitted == 50 * (LEARNT - 4)


def test_text_that_teaches_no_last_head_is_not_read_for_ever(
    target: TargetModel, make_rows: Rows
) -> None:
    """Answers of four tokens teach the fifth head nothing, however many they are."""
    heads, states = heads_of(target, num_heads=5), Counted(target)
    before = {name: tensor.clone() for name, tensor in heads.state_dict().items()}
    short = text(make_rows(120, length=8), stream=True, learnt=4)
    assert fit_fresh(heads, states, short, run(max_steps=100)) == 0
    assert states.read == 100
    assert all(torch.equal(found, before[name]) for name, found in heads.state_dict().items())


@pytest.mark.parametrize("stream", [False, True])
def test_processes_read_the_same_text_between_them(
    target: TargetModel, make_rows: Rows, stream: bool
) -> None:
    def reads(**process: Any) -> list[list[list[int]]]:
        states = Counted(target)
        settings = {"max_steps": 80 // process["world_size"], **process}
        rows = text(make_rows(60), stream=stream)
        assert fit_fresh(heads_of(target), states, rows, run(**settings)) > 0
        return states.batches

    alone = reads(world_size=1, train_batch_size=8)
    of_each = [reads(world_size=2, process_index=i, max_steps=80) for i in range(2)]
    assert len(of_each[0]) == len(of_each[1]) == len(alone)
    assert [[*first, *second] for first, second in zip(*of_each, strict=True)] == alone


def test_every_process_reads_as_many_rows_of_the_last_batch(
    target: TargetModel, make_rows: Rows
) -> None:
    """Also where there are fewer rows than processes: a target in shards waits for all of them."""
    rows = text(make_rows(3), learnt=200)
    batches = []
    for process in range(8):
        states = Counted(target)
        fit_fresh(heads_of(target), states, rows, run(world_size=8, process_index=process))
        batches.append(states.batches)
    assert [[len(batch) for batch in of_one] for of_one in batches] == [[1]] * 8


def test_heads_without_such_maps_read_nothing(target: TargetModel, make_rows: Rows) -> None:
    states = Counted(target)
    assert fit_fresh(new_heads(target), states, text(make_rows(64)), run()) == 0
    assert states.read == 0
