"""Rows that join a running batch and leave it, at steps that a test says.

Shapes: T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.engine.rows import Row
from medusa_heads.inference.engine.running import RunningBatch
from tests.conftest import DEVICE
from tests.inference.planted import PlantedDrafter, Planting
from tests.inference.reference import reference


@dataclass
class Guest:
    """A text that joins when so many steps were taken; one that leaves does so many steps later."""

    prompt: list[int]
    joins: int
    options: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    leaves: int | None = None
    text: list[int] | None = None

    def inputs(self) -> Tensor:
        return torch.tensor([self.prompt], device=DEVICE)

    def expected(self, model: Any) -> list[int]:
        """What generate() of this model writes of it alone."""
        if self.text is None:
            if self.seed is not None:
                torch.manual_seed(self.seed)
            ids_1T = self.inputs()
            given = {"input_ids": ids_1T, "attention_mask": torch.ones_like(ids_1T)}
            # Which later tests ask of the same model, where it is one of transformers.
            asked = partial(reference, model) if isinstance(model, nn.Module) else model.generate
            text_1T = asked(**given, **self.options)
            self.text = text_1T[0, len(self.prompt) :].tolist()
        return self.text


def guests(count: int, *options: Mapping[str, Any], tokens: range, seed: int = 0) -> list[Guest]:
    """Texts of mixed length, in turns with each of these options, that come one after the other;
    every fifth leaves before it is done."""
    random = torch.Generator().manual_seed(seed)

    def draw(least: int, beyond: int) -> int:
        return int(torch.randint(least, beyond, (), generator=random))

    found = []
    for i in range(count):
        asked = dict(options[i % len(options)])
        prompt = [draw(tokens.start, tokens.stop) for _ in range(draw(1, 40))]
        asked["max_new_tokens"] = draw(1, 30)
        found.append(
            Guest(
                prompt,
                joins=draw(0, count),
                options=asked,
                seed=100 + i if asked.get("do_sample") else None,
                leaves=draw(0, 4) if i % 5 == 4 else None,
            )
        )
    return sorted(found, key=lambda guest: guest.joins)


LONG: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20, "min_new_tokens": 20}


def of_one_kind(count: int) -> list[Guest]:
    """Texts of prompts of one length, from which settings count, and so of one batch."""
    return [Guest([*range(40 * i + 9, 40 * i + 20)], 0, LONG) for i in range(count)]


def host(batch: RunningBatch, visitors: Sequence[Guest]) -> list[list[int]]:
    """What each of them wrote; those that leave, up to where they left. While they join others draw
    random numbers, as threads of a program may, and are not given the same ones again."""
    waiting, rows, left = list(enumerate(visitors)), dict[int, Row](), set[int]()
    joined: dict[int, int] = {}
    step = 0
    while waiting or batch.rows:
        if waiting and waiting[0][1].joins <= step and len(batch.rows) < batch.max_rows:
            place, guest = waiting.pop(0)
            drawn = torch.get_rng_state()
            with mock.patch.object(batch, "_join", _while_others_draw(batch._join)):
                rows[place] = batch.add(guest.inputs(), seed=guest.seed, **guest.options)
            assert not torch.equal(drawn, torch.get_rng_state())
            joined[place] = step
        for place, row in rows.items():
            leaves = visitors[place].leaves
            if leaves is not None and place not in left and step >= joined[place] + leaves:
                batch.leave(row)
                left.add(place)
        failed = batch.step()
        assert not failed, failed
        step += 1
    return [rows[place].tokens for place in range(len(visitors))]


def _while_others_draw(join: Callable[..., Row]) -> Callable[..., Row]:
    def joined(*args: Any, **settings: Any) -> Row:
        torch.rand(1)
        return join(*args, **settings)

    return joined


def check(batch: RunningBatch, visitors: Sequence[Guest], model: Any) -> None:
    """Every text is what the model's generate() writes of it alone, or began so; nothing stays."""
    for guest, got in zip(visitors, host(batch, visitors), strict=True):
        expected = guest.expected(model)
        assert got == (expected if guest.leaves is None else expected[: len(got)])
    assert not batch.rows and batch.cache_bytes() == 0


class PlantedOfPrompt(PlantedDrafter):
    """The truth of every prompt planted among random tokens, whichever row it is."""

    def __init__(self, truths: Mapping[tuple[int, ...], Sequence[int]], *args: Any) -> None:
        super().__init__([], *args)
        self.truths = truths

    def truth(self, row: Row) -> Sequence[int]:
        return truth_of(self.truths, row)


class PlantingOfPrompt(Planting):
    """The same on another drafter's trees."""

    def __init__(
        self, drafter: Drafter, truths: Mapping[tuple[int, ...], Sequence[int]], *args: Any
    ) -> None:
        super().__init__(drafter, [], *args)
        self.truths = truths

    def truth(self, row: Row) -> Sequence[int]:
        return truth_of(self.truths, row)


def truth_of(truths: Mapping[tuple[int, ...], Sequence[int]], row: Row) -> Sequence[int]:
    return truths[tuple(row.ids_1T()[0, : row.prompt_length].tolist())]


class Breaking:
    """A streamer whose call of so many breaks off."""

    def __init__(self, fault: BaseException, calls: int, at_ends: bool = False) -> None:
        self.fault, self.left, self.at_ends = fault, calls, at_ends

    def put(self, token: Tensor) -> None:
        if not self.at_ends:
            self.count()

    def end_step(self) -> None:
        if self.at_ends:
            self.count()

    def count(self) -> None:
        self.left -= 1
        if not self.left:
            raise self.fault
