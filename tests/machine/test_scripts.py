"""What a function did, called by torch's interpreter: the same bits, of what is given then, for all
sizes where two have been seen; and refused where they do not say how others would be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from medusa_heads.machine.programs import Script, traced

Function = Callable[..., list[Tensor]]
WIDTH = 6


@pytest.fixture
def memory() -> tuple[Tensor, Tensor]:
    """Weights, and what the function keeps, neither of which is given anew."""
    torch.manual_seed(0)
    return torch.randn(WIDTH, WIDTH), torch.zeros(64, WIDTH)


def attends(memory: tuple[Tensor, Tensor]) -> Function:
    """Numbers that grow with the rows come from all over, some twice as fast, some ahead."""
    weight_DD, kept_SD = memory

    def run(x_ND: Tensor, slots_N: Tensor) -> list[Tensor]:
        rows = len(x_ND)
        made_ND = torch.mm(x_ND.pow(2).mean(-1, keepdim=True).rsqrt() * x_ND, weight_DD)
        kept_SD.index_copy_(0, slots_N, made_ND)
        twice = made_ND.repeat(2, 1).view(2 * rows, 2, WIDTH // 2).transpose(0, 1)
        ahead = torch.arange(rows + 3).float().view(1, rows + 3)
        return [twice.contiguous().view(2 * rows, WIDTH), ahead * kept_SD[:1, :1], kept_SD[:4]]

    return run


def given(rows: int) -> list[Tensor]:
    torch.manual_seed(rows)
    return [torch.randn(rows, WIDTH), torch.arange(rows) + rows % 3]


def script(function: Function, rows: int) -> Script:
    some = given(rows)
    return Script(traced(lambda: function(*some)), some, rows)


def says(made: Script, function: Function, rows: int, memory: Sequence[Tensor]) -> bool:
    """Whether it does what the function does, bit for bit, to the memory as well."""
    some, before = given(rows), [each.clone() for each in memory]
    expected = [each.clone() for each in function(*some)]
    after = [each.clone() for each in memory]
    for each, content in zip(memory, before, strict=True):
        each.copy_(content)
    got = made(some, rows)
    pairs = [*zip(got, expected, strict=True), *zip(memory, after, strict=True)]
    return all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("inference", [False, True])
def test_one_size_is_done_again_with_other_tensors(
    memory: tuple[Tensor, Tensor], inference: bool
) -> None:
    function = attends(memory)
    with torch.no_grad(), torch.inference_mode(inference):
        made = script(function, 4)
        assert made.size == 4
        memory[0].mul_(2.0)  # what is not given lies where it lay, whatever it holds
        assert says(made, function, 4, memory)
        some = given(4)
        assert not torch.equal(made([some[0] + 1.0, some[1]], 4)[0], function(*some)[0])


@pytest.mark.parametrize("sizes", [(2, 3), (9, 5)])
def test_two_sizes_tell_all(memory: tuple[Tensor, Tensor], sizes: tuple[int, int]) -> None:
    function = attends(memory)
    with torch.no_grad():
        made = script(function, sizes[0]).with_other(script(function, sizes[1]))
        assert made.size is None
        assert all(says(made, function, rows, memory) for rows in range(2, 30))


def test_to_put_two_together_does_nothing(memory: tuple[Tensor, Tensor]) -> None:
    function = attends(memory)
    with torch.no_grad():
        one, other = script(function, 4), script(function, 7)
        memory[1].fill_(5.0)  # as if later steps had moved what they wrote
        one.with_other(other)
    assert torch.equal(memory[1], torch.full_like(memory[1], 5.0))


def test_the_single_ones_serve_still(memory: tuple[Tensor, Tensor]) -> None:
    function = attends(memory)
    with torch.no_grad():
        one, other = script(function, 4), script(function, 7)
        one.with_other(other)
        assert says(one, function, 4, memory) and says(other, function, 7, memory)


def test_more_than_numbers_that_differ(memory: tuple[Tensor, Tensor]) -> None:
    other_DD = torch.ones_like(memory[0])

    def jumps(x_ND: Tensor, _: Tensor) -> list[Tensor]:
        return [x_ND.neg() if len(x_ND) > 4 else x_ND]

    def turns(x_ND: Tensor, _: Tensor) -> list[Tensor]:
        return [x_ND.neg() if len(x_ND) > 4 else x_ND.abs()]

    def scales(x_ND: Tensor, _: Tensor) -> list[Tensor]:
        return [x_ND * (0.5 / len(x_ND))]

    def leaps(x_ND: Tensor, _: Tensor) -> list[Tensor]:
        return [x_ND[: len(x_ND) // 2]]

    def reads(x_ND: Tensor, _: Tensor) -> list[Tensor]:
        return [torch.mm(x_ND, memory[0] if len(x_ND) > 4 else other_DD)]

    for function, why in {
        jumps: "something else",
        turns: "something else",
        scales: "something else",
        leaps: "does not grow",
        reads: "other memory",
    }.items():
        with torch.no_grad(), pytest.raises(RuntimeError, match=why):
            script(function, 3).with_other(script(function, 6))


def test_nothing_is_fused_whatever_the_process_wants(memory: tuple[Tensor, Tensor]) -> None:
    function = attends(memory)
    with torch.no_grad():
        made = script(function, 4)
        for wanted in (True, False):
            torch._C._set_graph_executor_optimize(wanted)
            torch._C._jit_override_can_fuse_on_cpu(wanted)
            try:
                assert all(says(made, function, 4, memory) for _ in range(4))
                assert torch._C._get_graph_executor_optimize() is wanted
            finally:
                torch._C._set_graph_executor_optimize(True)
                torch._C._jit_override_can_fuse_on_cpu(False)
