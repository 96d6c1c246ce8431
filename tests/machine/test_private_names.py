"""Where torch has a name no more that it never promised, what was built on it is left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from medusa_heads.machine import devices, kernels
from medusa_heads.machine.graphs import NotingBackend


class _Without:
    """Operators of which one is not there; those of torch come back by themselves."""

    def __init__(self, operators: Any, missing: str) -> None:
        self._operators, self._missing = operators, missing

    def __getattr__(self, name: str) -> Any:
        if name == self._missing:
            raise AttributeError(name)
        return getattr(self._operators, name)


@pytest.mark.parametrize("name", ["_reorder_linear_weight", "_linear_pointwise"])
def test_matrices_are_not_packed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", _Without(torch.ops.mkldnn, name))
    assert not kernels.has_packed_products(torch.float32)


def test_nothing_is_multiplied_in_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_int_mm")
    assert not kernels.has_int8_products()


def test_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a RuntimeError, with which decoding goes on without CUDA graphs, before one begins."""
    monkeypatch.delattr(torch._C, "_cuda_clearCublasWorkspaces", raising=False)
    with pytest.raises(RuntimeError, match="cuBLAS"), devices._own_workspaces():
        raise AssertionError("it began")


def test_a_broken_graph_is_followed_by_a_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Graph:
        def capture_begin(self, **_: Any) -> None:
            told.append("begun")

        def capture_end(self) -> None:
            told.append("ended")

    monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool", raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    devices._repair(torch.device("cpu"), None)
    assert told == ["begun", "ended"]


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_inductor_is_asked_by_name(mode: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def compile_fx(module: torch.fx.GraphModule, _: Any, config_patches: dict[str, Any]) -> Any:
        told.append(config_patches)
        return module.forward

    monkeypatch.delattr(torch, "_TorchCompileInductorWrapper")
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    backend, x = NotingBackend("inductor", mode), torch.ones(3)
    graph = backend(torch.fx.symbolic_trace(torch.nn.Tanh()), [x])
    assert torch.equal(graph(x), x.tanh())
    assert told == [{"triton.cudagraphs": True} if mode else {}]
    backend.reset()
