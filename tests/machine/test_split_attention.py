"""The kernel for GPUs says what attention says: interpreted on a CPU, else on the tests' device.

Shapes: B rows, H query heads, G heads of keys, N tokens, S slots, X and Y of a head.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from medusa_heads.errors import MedusaWarning
from medusa_heads.machine import Measurements
from medusa_heads.machine.attention import (
    KIND,
    Attended,
    attention_of_words,
    replayed,
    rivals,
    seen_words,
    split_pays,
)
from medusa_heads.target.attention import additive
from tests.conftest import DEVICE

pytest.importorskip("triton", reason="Triton is made for Linux and x86 alone")

B, G, X, Y = 2, 2, 24, 16
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
    seen, span = seen_words(additive(allowed[:, 0], query.dtype))
    attended: Tensor = attention_of_words(query, key, value, seen, span, scale)
    return attended


def expected(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, *, scale: Any = None
) -> Tensor:
    every: Any = {"attn_mask": allowed, "scale": scale, "enable_gqa": True}
    return scaled_dot_product_attention(query, key, value, **every).transpose(1, 2)


@pytest.mark.parametrize("heads", [G, 3 * G])
@pytest.mark.parametrize(("tokens", "slots"), [(1, 100), (5, 33), (7, 256), (64, 70)])
def test_it_is_attention(tokens: int, slots: int, heads: int) -> None:
    for scale in (None, 0.5):
        given = case(tokens, slots, heads)
        got_BNHY = split(*given, scale=scale)
        assert got_BNHY.is_contiguous() and got_BNHY.shape == (B, tokens, heads, Y)
        torch.testing.assert_close(got_BNHY, expected(*given, scale=scale))


def test_in_half_precision() -> None:
    given = case(6, 90, dtype=torch.float16)
    got = split(*given)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got, expected(*given), rtol=2e-3, atol=2e-3)


def test_what_no_token_sees_plays_no_part() -> None:
    query, key, value, allowed = case(4, 80)
    allowed[:, :, :, 41] = False
    wanted = split(query, key, value, allowed)
    unseen_BS = ~allowed.any(dim=2)[:, 0]
    assert unseen_BS[:, 41].all()
    for each in (key, value):  # no mask keeps what is no number out of a sum
        each[unseen_BS[:, None].expand(-1, G, -1)] = torch.nan
    assert torch.equal(split(query, key, value, allowed), wanted)
    value[:, :, 40] = torch.nan
    assert split(query, key, value, allowed).isnan().any()


def test_a_token_that_sees_nothing_has_nothing() -> None:
    query, key, value, allowed = case(4, 80)
    wanted = expected(query, key, value, allowed)
    allowed[0, :, 2] = False
    allowed[1] = False
    wanted[0, 2] = wanted[1] = 0.0
    torch.testing.assert_close(split(query, key, value, allowed), wanted)


def test_a_span_is_what_any_token_sees() -> None:
    allowed_B1NS = torch.zeros(3, 1, 2, 9).bool()
    allowed_B1NS[0, 0, 0, 3] = allowed_B1NS[0, 0, 1, 5] = allowed_B1NS[1] = True
    words_BS, span_B2 = seen_words(additive(allowed_B1NS[:, 0], torch.float32))
    assert span_B2.tolist() == [[3, 6], [0, 9], [0, 0]]
    assert words_BS.tolist() == [[0, 0, 0, 1, 0, 2, 0, 0, 0], [3] * 9, [0] * 9]


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU both are measured")
def test_what_was_measured_decides_and_is_kept(cache: Path) -> None:
    gpu, half = torch.device("cuda", 0), torch.bfloat16

    def measured(usual: float, split: float) -> Attended:
        sizes = SIZES._replace(slots=SIZES.slots + len(list(cache.glob("*/*"))))
        facts = {"device": "cuda:0", "dtype": "torch.bfloat16", **sizes._asdict()}
        Measurements().write(KIND, facts, {"usual": usual, "split": split})
        return sizes

    assert split_pays(gpu, half, measured(usual=2e-5, split=1e-5))
    assert not split_pays(gpu, half, measured(usual=1.05e-5, split=1e-5))
    with pytest.warns(MedusaWarning, match="goes on by torch's own kernel"):
        assert not split_pays(gpu, half, measured(usual=-1.0, split=1e-5))  # and there is no GPU
    assert not split_pays(torch.device("cpu"), half, measured(usual=2e-5, split=1e-5))
    assert not split_pays(gpu, half, measured(2e-5, 1e-5)._replace(tokens=65))
    assert not split_pays(gpu, torch.float64, measured(2e-5, 1e-5))


@pytest.mark.skipif(DEVICE == "cpu", reason="there is no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_gpu_measures_both(dtype: torch.dtype, cache: Path) -> None:
    device = torch.device(DEVICE)
    usual, split, layers = rivals(device, dtype, SIZES)
    assert 0 < replayed(usual, layers) < 1 and 0 < replayed(split, layers) < 1
    split_pays(device, dtype, SIZES)
    assert list(cache.glob(f"{KIND}/*.json"))


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from medusa_heads.machine import split_attention as module

HOLDS = {"query": "*{0}", "key": "*{0}", "value": "*{0}", "out": "*{0}", "seen": "*i64"}
HOLDS |= {"span": "*i32", "scale": "fp32", **dict.fromkeys(("added", "peak", "total"), "*fp32")}

def compiled(kernel, dtype, capability, warps, **sizes):
    signature = {
        name: "constexpr" if name in sizes else HOLDS.get(name, "i32").format(dtype)
        for name in kernel.arg_names
    }
    aligned = [name for name in signature if name not in {*sizes, "scale", "tokens"}]
    places = {name: (number,) for number, name in enumerate(signature)}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={places[name]: size for name, size in sizes.items()},
        attrs={places[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": warps, "num_stages": 2}
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
        print(attend.metadata.shared, len(attend.asm["cubin"]), len(add_up.asm["cubin"]))
"""


def test_it_compiles_for_gpus_that_are_not_here() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    made = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    shared = [int(line.split()[0]) for line in made.stdout.splitlines()]
    assert len(shared) == 8
    assert max(shared) <= 99 << 10  # the least that a processor of these generations has
