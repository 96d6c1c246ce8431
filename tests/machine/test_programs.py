"""What a function did, done again, and its small operations compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from medusa_heads.machine import programs
from medusa_heads.machine.programs import Program, traced

LAYERS = 6


def layers(x_ND: Tensor, weights: list[Tensor], kept_LND: Tensor) -> Callable[[], list[Tensor]]:
    """Layers, each with a norm, a product and what it keeps, of what lies where it lies."""

    def run() -> list[Tensor]:
        hidden_ND = x_ND * 2.0
        for layer, weight_DD in enumerate(weights):
            squares_N1 = hidden_ND.pow(2).mean(dim=-1, keepdim=True)
            normed_ND = hidden_ND * torch.rsqrt(squares_N1 + 1e-6)
            kept_LND[layer].copy_(normed_ND)
            made_ND = torch.mm(normed_ND, weight_DD)
            gated_ND = torch.nn.functional.silu(made_ND).neg() + kept_LND[layer]
            hidden_ND = hidden_ND + torch.mm(gated_ND.contiguous(), weight_DD)
        return [hidden_ND.sum(dim=0), hidden_ND]

    return run


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, list[Tensor], Tensor]:
    monkeypatch.setattr(programs, "_LEAST", 24)  # more than is saved by what comes once
    torch.manual_seed(0)
    weights = [torch.randn(8, 8) / 3 for _ in range(LAYERS)]
    return torch.randn(4, 8), weights, torch.zeros(LAYERS, 4, 8)


class Counting:
    """A compiler that leaves everything as it is, and counts."""

    def __init__(self) -> None:
        self.made: list[fx.GraphModule] = []

    def __call__(self, module: fx.GraphModule, examples: Any) -> Any:
        self.made.append(module)
        return module


@pytest.mark.parametrize("inference", [False, True])
def test_it_is_done_again(given: tuple[Tensor, list[Tensor], Tensor], inference: bool) -> None:
    x_ND, _, kept_LND = given
    function = layers(*given)
    with torch.inference_mode(inference), torch.no_grad():
        first = [result.clone() for result in function()]
        program = traced(function)
        for factor in (1.0, 3.0):
            x_ND.mul_(factor)
            expected = [each.clone() for each in function()]
            kept = kept_LND.clone()
            kept_LND.zero_()
            for got, result in zip(program(), expected, strict=True):
                assert torch.equal(got, result)
            assert torch.equal(kept_LND, kept)
    assert not torch.equal(expected[1], first[1])


def test_what_comes_again_is_compiled_once(given: tuple[Tensor, list[Tensor], Tensor]) -> None:
    with torch.no_grad():
        expected = [each.clone() for each in layers(*given)()]
        program, compiler = traced(layers(*given)), Counting()
        known: dict[str, Any] = {}
        fewer = program.compiled(compiler, known)
        assert len(compiler.made) == 1  # a sum and a norm, of all layers but the first
        assert len(known) == 1
        for got, result in zip(fewer(), expected, strict=True):
            assert torch.equal(got, result)
        program.compiled(compiler, known)
    assert len(compiler.made) == 1


@pytest.mark.slow
@torch.no_grad()
def test_a_compiler_of_its_own(given: tuple[Tensor, list[Tensor], Tensor]) -> None:
    backend: Any = torch._dynamo.lookup_backend("inductor")
    program = traced(layers(*given)).compiled(backend)
    kept = given[2].clone()
    for got, result in zip(program(), layers(*given)(), strict=True):
        torch.testing.assert_close(got, result)
    torch.testing.assert_close(given[2], kept)


@torch.no_grad()
def test_what_is_read_before_it_is_written() -> None:
    """Small operations wait for who needs them, but not beyond what writes where they read."""
    total_N, out_N = torch.ones(3), torch.zeros(3)

    def step() -> Tensor:
        twice_N = total_N * 2.0
        view_N1 = total_N[:, None]
        for _ in range(30):
            before_N = view_N1[:, 0] + 1.0
            total_N.add_(1.0)
            after_N = total_N + before_N
            out_N.copy_(after_N)
        return twice_N + out_N

    program = traced(step).compiled(Counting())
    for _ in range(2):
        held_N = total_N.clone()
        (got_N,) = program()
        after_N = total_N.clone()
        total_N.copy_(held_N)
        assert torch.equal(step(), got_N)
        assert torch.equal(total_N, after_N)


def times(factor: float) -> Any:
    return lambda module, _: lambda *given: [each * factor for each in module(*given)]


def fails(module: fx.GraphModule, examples: Any) -> Any:
    raise AssertionError("no compiler here")


@torch.no_grad()
@pytest.mark.parametrize("factor", [1.5, torch.nan])
def test_parts_that_say_something_else_stay(given: Any, factor: float) -> None:
    known: dict[str, Any] = {}
    program = traced(layers(*given)).compiled(times(factor), known)
    assert list(known.values()) == [None]
    for got, result in zip(program(), layers(*given)(), strict=True):
        assert torch.equal(got, result)


@torch.no_grad()
def test_compilers_that_fail(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one part, which stays; for all, and that is told."""
    monkeypatch.setattr(programs, "_LEAST", 3)
    expected, program = layers(*given)(), traced(layers(*given))
    with pytest.raises(AssertionError, match="no compiler here"):
        program.compiled(fails)
    compiler, known = Counting(), dict[str, Any]()

    def seldom(module: fx.GraphModule, examples: Any) -> Any:
        compiler(module, examples)
        return module if len(compiler.made) > 1 else fails(module, examples)

    fewer = program.compiled(seldom, known)
    assert len(known) > 1 and list(known.values()).count(None) == 1
    for got, result in zip(fewer(), expected, strict=True):
        assert torch.equal(got, result)


@torch.no_grad()
def test_want_of_memory_says_nothing_of_a_part(given: Any) -> None:
    def full(module: fx.GraphModule, examples: Any) -> Any:
        raise torch.OutOfMemoryError("none left")

    known: dict[str, Any] = {}
    with pytest.raises(torch.OutOfMemoryError):
        traced(layers(*given)).compiled(full, known)
    traced(layers(*given)).compiled(Counting(), known)
    assert len(known) == 1 and None not in known.values()


@torch.no_grad()
def test_nothing_is_drawn(given: Any) -> None:
    """Texts are drawn by that stream."""
    program, before = traced(layers(*given)), torch.get_rng_state()
    program.compiled(Counting())
    assert torch.equal(torch.get_rng_state(), before)


def simpler(module: fx.GraphModule, examples: Any) -> fx.GraphModule:
    """A compiler that knows what something times ones is."""
    ones = torch.ops.aten.ones_like.default
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
        if getattr(node.args[1], "target", None) is ones:
            node.replace_all_uses_with(node.args[0])
    module.recompile()
    return module


@torch.no_grad()
@pytest.mark.parametrize("backend", [simpler, pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["times ones", "view", "clone"])
def test_what_shares_memory_still_does(
    kind: str, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written in place is read of both, and of no other."""
    monkeypatch.setattr(programs, "_LEAST", 0)
    x_ND, y_ND = torch.randn(4, 6), torch.randn(4, 6)

    def step() -> list[Tensor]:
        if kind == "times ones":  # which a compiler knows to be the same
            made_ND, written_ND = x_ND * torch.ones_like(x_ND), x_ND
        else:
            written_ND = x_ND + y_ND
            made_ND = written_ND.view(-1) if kind == "view" else written_ND.clone()
        written_ND.add_(1.0)
        return [made_ND, written_ND + 0.5]

    backend = torch._dynamo.lookup_backend(backend) if backend == "inductor" else backend
    begins_ND, expected = x_ND.clone(), [result.clone() for result in step()]
    program = traced(step).compiled(backend)
    x_ND.copy_(begins_ND)
    for got, result in zip(program(), expected, strict=True):
        torch.testing.assert_close(got, result)


@torch.no_grad()
def test_other_shapes_in_place() -> None:
    """Of which a later part would know nothing."""
    x_ND = torch.randn(4, 6)

    def step() -> Tensor:
        made_ND = x_ND + 1
        made_ND.t_()
        for _ in range(30):
            made_ND = made_ND * 2 - 1
        return made_ND

    (got,) = traced(step).compiled(Counting())()
    assert torch.equal(got, step())


@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_what_is_made_of_no_tensor(backend: str) -> None:
    """By defaults that may be others."""

    def step() -> Tensor:
        made_N = torch.zeros(4)
        for _ in range(30):
            made_N = made_N + 1
        return made_N

    known, compile = dict[str, Any](), torch._dynamo.lookup_backend(backend)
    assert traced(step).compiled(compile, known)()[0].dtype == torch.float32
    try:
        torch.set_default_dtype(torch.float64)
        assert traced(step).compiled(compile, known)()[0].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(known) == 2


def test_what_no_dispatcher_sees() -> None:
    numbers_N = torch.ones(3)
    for asks in (lambda: numbers_N.tolist(), lambda: torch.tensor([1.0]) + numbers_N):
        with pytest.raises(RuntimeError, match="asks the host"):
            traced(asks)


@torch.no_grad()
def test_what_it_wrote_is_known(given: tuple[Tensor, list[Tensor], Tensor]) -> None:
    program = traced(layers(*given))
    for each in (program, program.compiled(Counting())):
        assert isinstance(each, Program)
        assert set(each.written) == {given[2].untyped_storage().data_ptr()}
        assert given[0].untyped_storage().data_ptr() in each.held
