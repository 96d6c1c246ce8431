"""Products with several matrices at once say what they say one by one: interpreted on a CPU, else
on the tests' device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from medusa_heads.agreement import relative_error
from medusa_heads.errors import MedusaWarning
from medusa_heads.machine.attention import kernel_facts
from medusa_heads.machine.measurements import Measurements
from medusa_heads.machine.programs import traced
from medusa_heads.target.graphs import joined
from medusa_heads.target.graphs.joined import KIND, fastest, join_products, joined_products
from tests.conftest import DEVICE
from tests.elsewhere import compiled_elsewhere
from tests.pairs import alternately

triton_products: Any = pytest.importorskip("medusa_heads.target.graphs.triton_products")

SIZES: dict[str, Any] = {"tokens": 8, "inputs": 512, "outputs": [128, 64, 64]}


def numbers(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    random = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=random).to(DEVICE, dtype)


@pytest.mark.parametrize(
    ("outputs", "which"),
    alternately([[128, 64, 64], [64]], range(len(triton_products.BLOCKS)), slow=([64],)),
)
def test_they_say_what_products_say(outputs: list[int], which: int) -> None:
    x, matrices = (
        numbers(2, 3, 512),
        [numbers(size + place, 512)[place:] for place, size in enumerate(outputs)],
    )
    made = joined_products(x, matrices, which)
    for own, matrix in zip(made, matrices, strict=True):
        expected = linear(x, matrix)
        assert own.shape == expected.shape
        assert relative_error(own.flatten(0, 1).float(), expected.flatten(0, 1).float()) < 2e-3
    torch.library.opcheck(torch.ops.medusa_heads.joined_products.default, (x, matrices, which))


@pytest.mark.parametrize("shape", [(1, 4, 512), (3, 2, 512), (6, 512), (0, 512)])
def test_of_tokens_that_lie_apart(shape: tuple[int, ...]) -> None:
    """As half of what another product made."""
    x, matrices = numbers(*shape[:-1], 1024)[..., 512:], [numbers(64, 512), numbers(32, 512)]
    for own, matrix in zip(joined_products(x, matrices, 1), matrices, strict=True):
        torch.testing.assert_close(own, linear(x, matrix), rtol=2e-2, atol=2e-1)


def layer(dtype: torch.dtype, tokens: int = 4, between: Callable[..., Any] = lambda *_: 0) -> Any:
    """What multiplies one input three times, and what is between the products."""
    x, cache = numbers(1, tokens, 512, dtype=dtype), numbers(64, dtype=dtype)
    first, second, third = (numbers(size, 512, dtype=dtype) for size in (128, 64, 32))

    def function() -> list[Tensor]:
        input_BND = x * 2
        made = [linear(input_BND, first).tanh()]
        between(cache, made[0])
        made += [linear(input_BND, second), linear(input_BND, third) + made[0][..., :32]]
        return [*made, cache + 1]

    return function


# Interpreted products of bfloat16 are others.
@pytest.mark.parametrize("dtype", [torch.float16] + [torch.bfloat16] * (DEVICE != "cpu"))
def test_products_of_one_input_become_one(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def second(*sizes: Any) -> int:
        asked.append(sizes)
        return 1

    monkeypatch.setattr(joined, "fastest", second)
    with torch.inference_mode():
        program = traced(layer(dtype))
        expected = program()
        join_products(program)
        assert [sizes[1:] for sizes in asked] == [(dtype, 4, 512, [128, 64, 32])]
        names = [str(node.target) for node in program.operations.nodes]
        assert "aten.linear.default" not in names
        assert sum("joined_products" in name for name in names) == 1
        for own, other in zip(program(), expected, strict=True):
            torch.testing.assert_close(own, other, rtol=2e-2, atol=2e-1)


@pytest.mark.parametrize(
    "function",
    [
        layer(torch.float32),
        layer(torch.float16, tokens=65),
        layer(torch.float16, between=lambda cache, made: cache.add_(made.sum())),
    ],
    ids=["of float32", "of many tokens", "behind what is written"],
)
def test_others_stay(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[Any] = []
    monkeypatch.setattr(joined, "fastest", lambda *sizes: groups.append(sizes[-1]))
    with torch.inference_mode():
        join_products(traced(function))
    assert groups in ([], [[128], [64, 32]])


def test_where_a_shape_changes_in_place_all_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    x, matrices = numbers(4, 512), [numbers(512, 512) for _ in range(2)]

    def function() -> list[Tensor]:
        for matrix in matrices:
            matrix.t_()  # it does not lie in order any more
        return [linear(x, matrix) for matrix in matrices]

    monkeypatch.setattr(joined, "fastest", lambda *sizes: 1)
    with torch.inference_mode():
        program = traced(function)
        program()  # which turns them back
        expected = program()
        program()
        join_products(program)
        for own, other in zip(program(), expected, strict=True):
            torch.testing.assert_close(own, other)


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU it is measured")
def test_what_was_measured_decides(cache: Path) -> None:
    gpu, half = torch.device("cuda", 0), torch.bfloat16

    def measured(**seconds: float) -> list[Any]:
        sizes = SIZES | {"tokens": 1 + len(list(cache.glob("*/*")))}
        facts = {"device": "cuda:0", "dtype": "torch.bfloat16", **sizes}
        facts |= kernel_facts(gpu, triton_products)
        Measurements().write(KIND, facts, {"one by one": seconds.pop("alone"), **seconds})
        return [*sizes.values()]

    assert fastest(gpu, half, *measured(alone=3e-5, **{"0": 2e-5, "2": 1e-5})) == 2
    assert fastest(gpu, half, *measured(alone=2.05e-5, **{"1": 2e-5})) is None
    assert fastest(gpu, half, *measured(alone=1e-5)) is None
    # What somebody else wrote there.
    assert fastest(gpu, half, *measured(alone=3e-5, **{"0": 2e-5, "7": 1e-5, "-1": 1e-5})) == 0
    assert fastest(gpu, half, *measured(alone=3e-5, other=1e-5)) is None
    with pytest.warns(MedusaWarning, match="products go on one by one"):  # there is no GPU
        assert fastest(gpu, half, *measured(alone=-1.0)) is None
    assert fastest(torch.device("cpu"), half, *SIZES.values()) is None


def test_what_is_joined_has_been_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a graph is recorded no kernel can be loaded; and one that was measured by another
    process, or of matrices that lie otherwise, has not been."""
    started: list[list[int]] = []
    products = triton_products.products

    def noted(x_ND: Tensor, matrices: list[Tensor], which: int) -> list[Tensor]:
        assert x_ND.shape == (4, 512)
        started.append([matrix.data_ptr() for matrix in matrices])
        made: list[Tensor] = products(x_ND, matrices, which)
        return made

    monkeypatch.setattr(joined, "fastest", lambda *sizes: 1)
    monkeypatch.setattr(triton_products, "products", noted)
    with torch.inference_mode():
        program = traced(layer(torch.float16))
        join_products(program)
        assert len(started) == 1
        program()
    assert len(started) == 2 and started[0] == started[1]


def test_what_does_not_start_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "fastest", lambda *sizes: len(triton_products.BLOCKS))
    with torch.inference_mode():
        program = traced(layer(torch.float16))
        expected = program()
        with pytest.warns(MedusaWarning, match="products go on one by one"):
            join_products(program)
        for own, other in zip(program(), expected, strict=True):
            assert torch.equal(own, other)


def test_tokens_that_lie_at_an_odd_place() -> None:
    """The kernel for those is another one, which may not be loaded yet."""
    x, matrix = numbers(1, 600)[:, 5:517], numbers(64, 512)
    seen: list[int] = []
    products = triton_products.products

    def noted(x_ND: Tensor, *others: Any) -> list[Tensor]:
        seen.append(x_ND.data_ptr() % 16)
        made: list[Tensor] = products(x_ND, *others)
        return made

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(triton_products, "products", noted)
        (own,) = joined_products(x, [matrix], 1)
    torch.testing.assert_close(own, linear(x, matrix), rtol=2e-2, atol=2e-1)
    assert seen == [0]


def test_no_memory_says_nothing_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked again, once in a program."""
    asked: list[Any] = []

    def no_memory(*sizes: Any) -> Any:
        asked.append(sizes)
        raise torch.OutOfMemoryError("no memory")

    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(joined, "_seconds", no_memory)
    for number in (1, 2):
        with pytest.warns(MedusaWarning, match="products go on one by one: no memory"):
            assert fastest(gpu, torch.float16, 3, 512, [96]) is None
        assert len(asked) == number
    asked.clear()
    monkeypatch.setattr(joined, "fastest", lambda _, *sizes: fastest(gpu, *sizes))
    first, second = layer(torch.float16), layer(torch.float16)
    with torch.inference_mode(), pytest.warns(MedusaWarning, match="no memory"):
        join_products(traced(lambda: [*first(), *second()]))
    assert len(asked) == 1


COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from medusa_heads.machine.kernels import FUSED
from medusa_heads.target.graphs.triton_products import BLOCKS, _products

NUMBERS = "tokens first_tiles second_tiles first_O second_O third_O D".split()
ANY = {"tokens", "first_tiles", "second_tiles"}

for capability in (80, 90):
    for dtype in ("*bf16", "*fp16"):
        for tokens in (16, 32, 64):
            shared = []
            for outputs, inputs, warps, stages in BLOCKS:
                sizes = {"BLOCK_N": tokens, "BLOCK_O": outputs, "BLOCK_D": inputs}
                signature = {
                    name: "constexpr" if name in sizes else "i32" if name in NUMBERS else dtype
                    for name in _products.arg_names
                }
                places = {name: (number,) for number, name in enumerate(signature)}
                aligned = signature.keys() - sizes.keys() - ANY
                source = ASTSource(
                    _products,
                    signature,
                    {places[name]: size for name, size in sizes.items()},
                    {places[name]: [["tt.divisibility", 16]] for name in aligned},
                )
                options = {"num_warps": warps, "num_stages": stages, **FUSED}
                target = GPUTarget("cuda", capability, 32)
                shared.append(compile(source, target=target, options=options).metadata.shared)
            print(min(shared))
"""


@pytest.mark.slow
def test_they_compile_for_gpus_that_are_not_here() -> None:
    least = list(map(int, compiled_elsewhere(COMPILE).split()))
    assert len(least) == 2 * 2 * 3
    # Twice as much is what the smallest processors of these generations have.
    assert max(least) <= 48 << 10
