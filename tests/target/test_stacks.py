"""Buffers of many layers: they grow, move and let rows go without a second copy of the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from medusa_heads.machine.programs import traced
from medusa_heads.machine.watched import Watched
from medusa_heads.target import stacks
from medusa_heads.target.cache import RowCache
from medusa_heads.target.graphs.static_cache import StaticRowCache
from medusa_heads.target.stacks import _move_gathered, _move_rows, _put_wide
from tests.allocations import Allocations
from tests.conftest import DEVICE
from tests.elsewhere import compiled_elsewhere
from tests.target.test_cache import config, fill, held


@pytest.fixture
def many_stacks(monkeypatch: pytest.MonkeyPatch) -> RowCache:
    """Sixteen layers of four rows, whose stacks hold an eighth of them each."""
    monkeypatch.setattr("medusa_heads.target.stacks._STACK_BYTES", 1)
    return RowCache(config(layers=16))


def size(cache: RowCache) -> int:
    return sum(stack.nbytes for stack in cache._stacks.stacks)


def test_growth_holds_little_more_than_the_new_cache(many_stacks: RowCache) -> None:
    with Allocations() as allocations:
        fill(many_stacks, 0, 40, batch=4)
        before = size(many_stacks)
        allocations.peak = 0
        many_stacks._stacks.reserve(297)
    assert len(many_stacks._stacks.stacks) == 8
    assert size(many_stacks) == before * 3 // 2
    assert allocations.peak <= 1.1 * size(many_stacks) + before // 8
    assert all(
        held(many_stacks, layer, 3)[-1] == pytest.approx(3039 + layer * 0.1) for layer in range(16)
    )


class _NoMemory(TorchDispatchMode):
    """Within the block, operations fail behind the first so many."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.left:
            raise torch.OutOfMemoryError
        self.left -= 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("operations", range(20))
def test_rows_survive_growth_that_breaks_off(many_stacks: RowCache, operations: int) -> None:
    fill(many_stacks, 0, 40)
    with pytest.raises(torch.OutOfMemoryError), _NoMemory(operations):
        many_stacks._stacks.reserve(297)
    fill(many_stacks, 40, 500)
    for layer in range(16):
        assert held(many_stacks, layer) == [pytest.approx(n + layer * 0.1) for n in range(540)]


def test_rows_leave_without_a_second_cache(many_stacks: RowCache) -> None:
    with Allocations() as allocations:
        fill(many_stacks, 0, 40, batch=4)
        before = size(many_stacks)
        allocations.peak = 0
        many_stacks.select_batch([0, 2, 3])
        assert allocations.live() == size(many_stacks) == before * 3 // 4
    assert allocations.peak <= 1.15 * before
    assert [held(many_stacks, 15, row)[0] for row in range(3)] == [
        pytest.approx(row + 1.5) for row in (0, 2000, 3000)
    ]


def test_rows_move_in_every_stack(many_stacks: RowCache) -> None:
    for batch, cache in ((1, RowCache(config(layers=16))), (2, many_stacks)):
        fill(cache, 0, 6, batch)
        fill(cache, 6, 4, batch)
        cache.move_rows(torch.tensor([[7, 9]] * batch), torch.tensor([[6, 7]] * batch))
        cache.set_length(8)
        for layer in range(16):
            kept = [0, 1, 2, 3, 4, 5, 7, 9]
            assert held(cache, layer) == [pytest.approx(n + layer * 0.1) for n in kept]


@pytest.mark.parametrize("width", [4, 6])
@pytest.mark.parametrize("stacked", [True, False])
def test_the_rows_of_a_tree_are_written_where_they_belong(stacked: bool, width: int) -> None:
    """Keys and values by one operation, where recordings have them side by side."""
    cache = StaticRowCache(config(), 16, stacked=stacked)
    keys, values = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3, width)

    def write() -> list[Tensor]:
        return [each for layer in range(3) for each in cache.update(keys + layer, values, layer)]

    with torch.no_grad(), cache.tree_slots(None, 3, keys.device):
        cache.slots_N.copy_(torch.tensor([2, 9, 4]))
        write()
        program = traced(write)
        written = program()
    for layer in range(3):
        for buffer, new in zip(written[2 * layer :], (keys + layer, values), strict=False):
            assert torch.equal(buffer[:, :, [2, 9, 4]], new)
            assert not buffer[:, :, [0, 1, 3, 5, 15]].any()
    copies = sum("index_copy_" in str(node.target) for node in program.operations.nodes)
    assert copies == (3 if stacked and width == 4 else 6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [3, 4, 8])
@pytest.mark.parametrize("dim", [1, 3])
def test_rows_are_put_whole(dtype: torch.dtype, width: int, dim: int) -> None:
    """As a GPU writes them, and a recording compares them: as the numbers that they are."""
    buffer = torch.randn(2, 5, 3, 6, width).to(DEVICE, dtype)
    places_A = torch.tensor([4, 0, 3], device=DEVICE)
    rows = (buffer + 1).index_select(dim, places_A).mT.contiguous().mT
    expected = buffer.clone()
    expected.index_copy_(dim, places_A, rows)
    with torch.no_grad(), Watched() as watched:
        _put_wide(buffer[:], dim, places_A, rows)
    assert torch.equal(buffer, expected)
    assert watched.written == {buffer.untyped_storage().data_ptr(): dtype}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [4, 12])
@pytest.mark.parametrize(("batch", "moves"), [(1, 3), (3, 7), (2, 16)])
def test_a_kernel_moves_what_moves(batch: int, moves: int, width: int, dtype: torch.dtype) -> None:
    """Paths behind the text, in order; what is read is as it was before any was written."""
    pytest.importorskip("triton", reason="Triton is made for Linux alone")
    random = torch.Generator().manual_seed(moves)
    stack = torch.randn(4, batch, 2, 40, width, generator=random).to(DEVICE, dtype)
    columns_A = torch.arange(moves)
    first = torch.randint(1, 9, (batch, 1), generator=random)
    path_BA = torch.stack([torch.randperm(30, generator=random)[:moves] for _ in range(batch)])
    destination_BA = first + columns_A
    source_BA = first + path_BA.sort(dim=1).values
    source_BA[0, moves // 2 :] = destination_BA[0, moves // 2 :]  # not taken
    given = source_BA.to(DEVICE), destination_BA.to(DEVICE)
    expected, moved = stack.clone(), stack.clone()
    _move_gathered(expected, *given)
    with torch.no_grad(), Watched() as watched:
        _move_rows(moved, *given)
    assert torch.equal(moved, expected) and not torch.equal(moved, stack)
    assert watched.written == {moved.untyped_storage().data_ptr(): dtype}


def test_what_stays_is_not_written() -> None:
    """Also where another row is moved to its place."""
    pytest.importorskip("triton", reason="Triton is made for Linux alone")
    stack = torch.arange(12.0, device=DEVICE).view(1, 1, 1, 6, 2)
    source_BA, destination_BA = torch.tensor([[2, 5]]), torch.tensor([[2, 2]])
    for order in ([0, 1], [1, 0]):
        moved = stack.clone()
        _move_rows(moved, source_BA[:, order].to(DEVICE), destination_BA[:, order].to(DEVICE))
        assert moved[0, 0, 0, 2].tolist() == [10, 11]


def test_a_kernel_that_moves_other_rows_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is made for Linux alone")
    assert stacks._agree(torch.device(DEVICE))
    monkeypatch.setattr(stacks, "_move_rows", lambda *_: None)
    with pytest.raises(ArithmeticError, match="does not move rows as torch does"):
        stacks._agree(torch.device(DEVICE))


def test_rows_of_whole_words_are_moved_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it serves; of others torch's."""
    pytest.importorskip("triton", reason="Triton is made for Linux alone")
    monkeypatch.setattr(stacks._tried, "serve", lambda _: True)
    monkeypatch.setattr(stacks, "_move_gathered", None)
    slots_BA = torch.tensor([[7, 9], [8, 9]], device=DEVICE), torch.tensor([[6, 7]] * 2).to(DEVICE)
    for width in (3, 4):
        cache = RowCache(config(layers=2))
        keys = torch.randn(2, 2, 10, width).to(DEVICE, torch.bfloat16)
        for layer in range(2):
            cache.update(keys + layer, keys - layer, layer)
        if width == 3:
            with pytest.raises(TypeError):
                cache.move_rows(*slots_BA)
            continue
        cache.move_rows(*slots_BA)
        for layer in range(2):
            moved = cache.row_layers[layer].keys[:, :, 6:8]
            assert torch.equal(moved[0], (keys + layer)[0, :, [7, 9]])
            assert torch.equal(moved[1], (keys + layer)[1, :, [8, 9]])


COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from medusa_heads.machine.kernels import FUSED
from medusa_heads.target.triton_rows import _move_rows

TYPES = {"words": "*i64", "sources": "*i64", "destinations": "*i64"}
for capability in (80, 90):
    for width, moves in ((32, 8), (24, 64), (1, 1)):
        sizes = {"W": width, "BLOCK_A": moves, "BLOCK_W": max(width, 32)}
        names = _move_rows.arg_names
        signature = {name: TYPES.get(name, "i32") for name in names}
        signature |= dict.fromkeys(sizes, "constexpr")
        given = {(names.index(name),): size for name, size in sizes.items()}
        made = ASTSource(_move_rows, signature, given)
        options = {"num_warps": 4, **FUSED}
        compile(made, target=GPUTarget("cuda", capability, 32), options=options)
"""


@pytest.mark.slow
def test_the_kernel_compiles_for_gpus_that_are_not_here() -> None:
    pytest.importorskip("triton", reason="Triton is made for Linux alone")
    compiled_elsewhere(COMPILE)


def test_rows_of_another_type_are_no_numbers_of_this_one() -> None:
    """As numbers of 64 bits they would be."""
    buffer, places_A = torch.zeros(2, 6, 4, dtype=torch.bfloat16), torch.tensor([1, 5])
    with pytest.raises(RuntimeError, match="same dtype"):
        _put_wide(buffer, 1, places_A, torch.ones(2, 2, 4, dtype=torch.float16))
    assert not buffer.any()


@pytest.mark.parametrize("layers", [1, 16])
def test_a_cache_that_inference_mode_made_is_written_outside_of_it(layers: int) -> None:
    """Also one that is handed out as a copy of another's rows."""
    with torch.inference_mode():
        cache, copy = RowCache(config(layers=layers)), RowCache(config(layers=layers))
        fill(cache, 0, 6)
        copy.take_over(cache)
    for made in (cache, copy):
        fill(made, 6, 4)
        assert held(made, layers - 1) == [pytest.approx(n + (layers - 1) * 0.1) for n in range(10)]
        assert not made.row_layers[0].keys.is_inference()
