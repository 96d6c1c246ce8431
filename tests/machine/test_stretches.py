"""In which order the operations of a program are done, and what is made of those side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_heads.machine import programs
from medusa_heads.machine.programs import traced
from medusa_heads.machine.stretches import like_of
from tests.machine.test_programs import Counting


@torch.no_grad()
def test_what_writes_waits_behind_what_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so one part is made of what stands between."""
    kept = [torch.ones(3) for _ in range(4)]
    product_NN, total_N = torch.eye(3), torch.zeros(3)

    def step() -> Tensor:
        value_N = torch.mv(product_NN, kept[0])
        for each_N in kept:
            value_N = value_N * 2.0 + 1.0
            each_N.copy_(value_N)
            largest, place = value_N[:, None].max(dim=0)
            total_N.index_add_(0, place, largest)
        return torch.mv(product_NN, total_N)

    monkeypatch.setattr(programs, "_LEAST", 0)
    compiler = Counting()
    program = traced(step).compiled(compiler)
    assert len(compiler.made) == 1
    outcomes: list[list[Tensor]] = []
    for run in (step, lambda: program()[0]):
        kept[0].fill_(5.0)
        total_N.zero_()
        outcomes.append([run(), *[each.clone() for each in (*kept, total_N)]])
    assert all(map(torch.equal, *outcomes))


@torch.no_grad()
@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 40))]
)
def test_whatever_order_is_taken(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sums, views, products, and what is written in place, to what is kept or was just made."""
    monkeypatch.setattr(programs, "_LEAST", 0)
    torch.manual_seed(seed)
    kept = [torch.randn(4, 4) for _ in range(3)]
    choices = torch.randint(0, 1 << 20, (60, 3)).tolist()

    def step() -> list[Tensor]:
        known = list(kept)
        for kind, one, other in choices:
            a, b = known[one % len(known)], known[other % len(known)]
            if kind % 8 == 0:
                a.copy_((b * 0.5).t())
            elif kind % 8 == 1:
                a.add_(b * 0.5).clamp_(-2, 2)
            else:
                make: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
                    torch.add,
                    lambda a, _: a.t(),
                    lambda a, b: (a @ b).tanh(),
                    lambda a, b: a[1:2].expand(4, 4) * 0.5,
                    lambda a, b: a.max(dim=1, keepdim=True)[0].expand_as(b).sin(),
                    lambda a, _: a.sort(dim=1)[0],
                )
                known.append(make[kind % 8 - 2](a, b))
        return known

    def outcome(run: Callable[[], list[Tensor]]) -> list[Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(seed + 1)
            for each in kept:
                each.normal_()
        return [each.clone() for _ in range(2) for each in (*run(), *kept)]

    program = traced(step).compiled(Counting())
    for got, expected in zip(outcome(program), outcome(step), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("later", [lambda x: torch.rand(4), torch.rand_like, torch.bernoulli])
def test_numbers_are_drawn_in_their_order(
    later: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "_LEAST", 0)
    x_N, kept_N = torch.rand(4), torch.zeros(4)

    def step() -> list[Tensor]:
        twice_N = x_N * 2
        kept_N.exponential_()
        return [twice_N, later(x_N), kept_N]

    program, outcomes = traced(step).compiled(Counting()), list[list[Tensor]]()
    for run in (step, program):
        torch.manual_seed(3)
        outcomes.append([each.clone() for each in run()])
    assert all(map(torch.equal, *outcomes))


@torch.no_grad()
@pytest.mark.parametrize(
    ("dtype", "aside"), [(torch.long, 1), (torch.float, 3), (torch.bfloat16, 7), (torch.bool, 5)]
)
def test_a_part_is_made_for_numbers_where_they_lie(
    dtype: torch.dtype, aside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies aside of where a compiler counts on, its code would copy at every call."""
    monkeypatch.setattr(programs, "_LEAST", 0)
    kept_NM, eye = torch.ones(6, 16).to(dtype), torch.eye(6)
    part_N2 = kept_NM[:, aside : aside + 2]
    offsets: list[int] = []

    class Placing(Counting):
        def __call__(self, module: Any, given: Any) -> Any:
            offsets.extend(each.storage_offset() for each in given)
            assert [each.stride() for each in given] == [part_N2.stride()]
            return super().__call__(module, given)

    program = traced(lambda: torch.mm(eye, (part_N2 * 2 + 1).float())).compiled(Placing())
    assert offsets == [aside]
    assert torch.equal(program()[0], (part_N2 * 2 + 1).float())


def test_examples_of_what_is_empty_or_there_again_and_again() -> None:
    for tensor in (torch.zeros(0, 3), torch.zeros(2, 0, 3), torch.zeros(3)[:, None].expand(3, 4)):
        example = like_of(tensor).example()
        assert (example.shape, example.stride()) == (tensor.shape, tensor.stride())
