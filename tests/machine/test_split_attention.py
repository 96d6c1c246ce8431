"""The kernel for GPUs says what attention says: interpreted on a CPU, else on the tests' device.

Shapes: B rows, H query heads, G heads of keys, N tokens, S slots, X and Y of a head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from medusa_heads.agreement import relative_error
from medusa_heads.errors import MedusaWarning
from medusa_heads.machine import attention, split_attention
from medusa_heads.machine.attention import (
    Attended,
    attention_of_words,
    kernel_facts,
    replayed,
    rivals,
    seen_words,
    split_pays,
)
from medusa_heads.machine.measurements import Measurements
from medusa_heads.target.attention import additive
from tests.conftest import DEVICE
from tests.elsewhere import compiled_elsewhere
from tests.pairs import with_slow

pytest.importorskip("triton", reason="Triton is made for Linux alone")

B, G, X, Y = 2, 2, 24, 16
BLOCK = 64  # slots that are read together, at most
SIZES = Attended(batch=1, heads=8, shared=2, tokens=8, slots=512, width=64, wide=64)


def case(tokens: int, slots: int, heads: int = 4, dtype: torch.dtype = torch.float32) -> Any:
    """Queries, keys, values, and what is seen: of the middle, by each token about half."""
    random = torch.Generator().manual_seed(tokens * slots)
    query_BHNX = torch.randn(B, tokens, heads, X, generator=random).transpose(1, 2)
    key_BGSX = torch.randn(B, G, slots, X, generator=random)
    value_BGSY = torch.randn(B, slots, G, Y, generator=random).transpose(1, 2)
    allowed_B1NS = torch.rand(B, 1, tokens, slots, generator=random) < 0.5
    allowed_B1NS[0, ..., : slots // 5] = allowed_B1NS[1, ..., -slots // 3 :] = False
    allowed_B1NS[..., slots // 2] = True
    parts = (each.to(DEVICE, dtype) for each in (query_BHNX, key_BGSX, value_BGSY))
    return (*parts, allowed_B1NS.to(DEVICE))


def split(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, *, scale: Any = None
) -> Tensor:
    seen = seen_words(additive(allowed, query.dtype))
    attended: Tensor = attention_of_words(query, key, value, seen, scale)
    return attended


def expected(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, *, scale: Any = None
) -> Tensor:
    every: Any = {"attn_mask": allowed, "scale": scale, "enable_gqa": True}
    return scaled_dot_product_attention(query, key, value, **every).transpose(1, 2)


@pytest.mark.parametrize(
    ("tokens", "slots", "heads", "scale"),
    with_slow(
        [(1, 100, 2 * G, 0.5), (7, 140, 2 * G, None), (64, 70, G, None)],
        [(1, 100, G, None), (5, 33, 2 * G, None), (7, 140, G, 0.5)],
    ),
)
def test_it_is_attention(tokens: int, slots: int, heads: int, scale: float | None) -> None:
    given = case(tokens, slots, heads)
    got_BNHY = split(*given, scale=scale)
    assert got_BNHY.is_contiguous() and got_BNHY.shape == (B, tokens, heads, Y)
    torch.testing.assert_close(got_BNHY, expected(*given, scale=scale))


def test_steps_of_dimensions_with_one_place_ask_for_no_other_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A compiler may give others, in a graph that is recorded already."""
    started: list[list[int]] = []

    class Noted:
        def __init__(self, kernel: Any) -> None:
            self._kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            def start(*given: Any, **sizes: Any) -> None:
                started.append([each for each in given if isinstance(each, int)])
                self._kernel[grid](*given, **sizes)

            return start

    def with_odd_steps(x: Tensor) -> Tensor:
        steps = [5 if size == 1 else step for size, step in zip(x.shape, x.stride(), strict=True)]
        return x.as_strided(x.shape, steps)

    query, key, value, allowed = (each[:1] for each in case(1, 100))
    wanted = expected(query, key, value, allowed)
    seen = seen_words(additive(allowed, query.dtype))
    monkeypatch.setattr(split_attention, "_attend", Noted(split_attention._attend))
    for given in (query, key, value, seen), map(with_odd_steps, (query, key, value, seen)):
        torch.testing.assert_close(attention_of_words(*given, None), wanted)
    assert started[0] == started[1]


def test_in_half_precision() -> None:
    given = case(6, 90, dtype=torch.float16)
    got = split(*given)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got, expected(*given), rtol=2e-3, atol=2e-3)


def test_what_lies_beside_the_span_is_not_read() -> None:
    query, key, value, allowed = case(4, 300)
    wanted = split(query, key, value, allowed)
    for row, (first, behind) in enumerate(((60, 300), (0, 200))):
        for each in (key, value):  # no mask keeps what is no number out of a sum
            each[row, :, : first // BLOCK * BLOCK] = torch.nan
            each[row, :, -(-behind // BLOCK) * BLOCK :] = torch.nan
    assert torch.equal(split(query, key, value, allowed), wanted)
    value[:, :, 150] = torch.nan
    assert split(query, key, value, allowed).isnan().any()


def test_a_token_that_sees_nothing_has_nothing() -> None:
    query, key, value, allowed = case(4, 80)
    wanted = expected(query, key, value, allowed)
    allowed[0, :, 2] = False
    allowed[1] = False
    wanted[0, 2] = wanted[1] = 0.0
    torch.testing.assert_close(split(query, key, value, allowed), wanted)


def test_words_and_the_span_of_what_any_token_sees() -> None:
    allowed_B1NS = torch.zeros(3, 1, 2, 9).bool()
    allowed_B1NS[0, 0, 0, 3] = allowed_B1NS[0, 0, 1, 5] = allowed_B1NS[1] = True
    words_BU = seen_words(additive(allowed_B1NS, torch.float32))
    assert words_BU[:, -2:].tolist() == [[3, 6], [0, 9], [0, 0]]
    assert words_BU[:, :-2].tolist() == [[0, 0, 0, 1, 0, 2, 0, 0, 0], [3] * 9, [0] * 9]


@pytest.mark.parametrize(("tokens", "slots"), [(1, 700), (5, 40), (64, 300)])
def test_a_kernel_makes_the_same_words(tokens: int, slots: int) -> None:
    """Also of half precision, and of rows that lie apart."""
    random = torch.Generator().manual_seed(tokens)
    allowed = torch.rand(3, 1, tokens, slots, generator=random) < 0.3
    allowed[0, ..., : slots // 2] = allowed[1, ..., slots - 7 :] = allowed[2] = False
    for dtype in (torch.float32, torch.bfloat16):
        mask = additive(allowed, dtype)
        wide = torch.cat([mask, mask - 1], dim=2).to(DEVICE)[:, :, :tokens]
        assert torch.equal(split_attention.words_seen(wide).cpu(), seen_words(mask.cpu()))
    moved = mask.mT.contiguous().mT.to(DEVICE)
    assert torch.equal(split_attention.words_seen(moved).cpu(), seen_words(mask.cpu()))


def test_they_are_operators_of_torch() -> None:
    query, key, value, allowed = case(4, 80)
    mask = additive(allowed, torch.float32)
    torch.library.opcheck(torch.ops.medusa_heads.seen.default, (mask,))
    given = query, key, value, seen_words(mask), None
    torch.library.opcheck(torch.ops.medusa_heads.split_attention.default, given)


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU both are measured")
def test_what_was_measured_decides_and_is_kept(cache: Path) -> None:
    gpu, half = torch.device("cuda", 0), torch.bfloat16

    def measured(usual: float, split: float) -> Attended:
        sizes = SIZES._replace(slots=SIZES.slots + len(list(cache.glob("*/*"))))
        facts = {"device": "cuda:0", "dtype": "torch.bfloat16", **sizes._asdict()}
        facts |= kernel_facts(gpu, split_attention)
        Measurements().write(attention.KIND, facts, {"usual": usual, "split": split})
        return sizes

    assert split_pays(gpu, half, measured(usual=2e-5, split=1e-5))
    assert not split_pays(gpu, half, measured(usual=1.05e-5, split=1e-5))
    with pytest.warns(MedusaWarning, match="goes on by torch's own kernel"):
        assert not split_pays(gpu, half, measured(usual=-1.0, split=1e-5))  # and there is no GPU
    assert not split_pays(torch.device("cpu"), half, measured(usual=2e-5, split=1e-5))
    assert not split_pays(gpu, half, measured(2e-5, 1e-5)._replace(tokens=65))
    assert not split_pays(gpu, torch.float64, measured(2e-5, 1e-5))
    assert not split_pays(gpu, torch.float32, measured(2e-5, 1e-5)._replace(width=192))


def test_no_memory_says_nothing_of_kernels(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked again when the next text begins, but not while a graph is recorded."""
    gpu, asked, taken = torch.device("cuda", 0), list[Any](), [2e-5, 1e-5]

    def measured(*sizes: Any) -> list[float]:
        asked.append(sizes)
        if len(asked) == 1:
            raise torch.OutOfMemoryError("none left")
        return taken

    monkeypatch.setattr(attention, "_seconds", measured)
    given = gpu, torch.bfloat16, SIZES
    with pytest.warns(MedusaWarning, match="goes on by torch's own kernel: none left"):
        assert not split_pays(*given)
    assert not split_pays(*given) and len(asked) == 1
    attention.ask_again()
    monkeypatch.setattr(attention, "is_capturing", lambda: True)
    assert not split_pays(*given) and len(asked) == 1
    monkeypatch.setattr(attention, "is_capturing", lambda: False)
    assert split_pays(*given) and len(asked) == 2


@pytest.mark.parametrize("dtype", [torch.half, pytest.param(torch.float, marks=pytest.mark.slow)])
def test_what_is_compared_before_the_choice(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same says the kernel; and not where it takes one slot for another."""
    monkeypatch.setattr(attention, "_HELD", 0)  # so many layers would be drawn, and one is read
    usual, split, layers = rivals(torch.device(DEVICE), dtype, SIZES._replace(slots=70))
    key, value = layers[0]
    torch.testing.assert_close(split(key, value), usual(key, value), rtol=2e-3, atol=2e-3)
    moved = split(key.roll(1, dims=2), value.roll(1, dims=2))
    assert (
        relative_error(moved.flatten(0, 2).float(), usual(key, value).flatten(0, 2).float()) > 0.2
    )


@pytest.mark.skipif(DEVICE == "cpu", reason="there is no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_gpu_measures_both(dtype: torch.dtype, cache: Path) -> None:
    device = torch.device(DEVICE)
    usual, split, layers = rivals(device, dtype, SIZES)
    assert all(0 < seconds < 1 for seconds in replayed((usual, split), layers))
    split_pays(device, dtype, SIZES)
    assert list(cache.glob(f"{attention.KIND}/*.json"))


COMPILE = """
import re
import subprocess
import tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from medusa_heads.machine import split_attention as module

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
HOLDS = {"query": "*{0}", "key": "*{0}", "value": "*{0}", "out": "*{0}", "seen": "*i64"}
HOLDS |= {"mask": "*{0}", "words": "*i64", "least": "fp32"}
HOLDS |= {"scale": "fp32", **dict.fromkeys(("added", "peak", "total"), "*fp32")}

def compiled(kernel, dtype, capability, warps, **sizes):
    signature = {
        name: "constexpr" if name in sizes else HOLDS.get(name, "i32").format(dtype)
        for name in kernel.arg_names
    }
    aligned = [name for name in signature if name not in {*sizes, "scale", "least", "tokens"}]
    places = {name: (number,) for number, name in enumerate(signature)}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={places[name]: size for name, size in sizes.items()},
        attrs={places[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": warps, "num_stages": module._STAGES, **module.FUSED}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)

shapes = [(2, "bf16", 64), (2, "fp16", 128), (2, "bf16", 256), (4, "fp32", 128)]
for capability in (80, 90):
    for size, dtype, width in shapes:
        rows, slots = module._blocks(width, size)
        common = {"SHARED": 8, "ROWS": 124, "Y": width, "PARTS": 16, "BLOCK_Y": width}
        attend = compiled(
            module._attend, dtype, capability, 8 if rows > 64 else 4, X=width, BLOCK_X=width,
            BLOCK_M=rows, BLOCK_S=slots, **common,
        )
        add_up = compiled(module._add_up, dtype, capability, 4, BLOCK_P=16, **common)
        held = {"BLOCK_N": 16 * size, "BLOCK_S": module._MASK_AT_ONCE // (16 * size)}
        words_seen = compiled(module._words_seen, dtype, capability, 8, **held)
        for made in (attend, add_up, words_seen):
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(made.asm["cubin"])
                file.flush()
                asked = [BIN / "cuobjdump", "-res-usage", file.name]
                used = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
            print(made.metadata.shared, re.search(r"STACK:(\\d+)", used)[1])
"""


@pytest.mark.slow
def test_it_compiles_for_gpus_that_are_not_here() -> None:
    numbers = [
        [int(word) for word in line.split()] for line in compiled_elsewhere(COMPILE).splitlines()
    ]
    assert len(numbers) == 2 * 12
    for shared, stack in numbers:
        assert shared <= 99 << 10  # what the smallest processors of these generations have
        assert stack == 0  # no number finds no register
