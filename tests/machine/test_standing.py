"""What recordings depend on."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TemperatureLogitsWarper

from medusa_heads.machine.recording import standing
from medusa_heads.trees.tree import TreeShape


def test_what_stands() -> None:
    module = nn.Linear(3, 2)
    shape = TreeShape.from_choices([(0,), (0, 1)])
    things: dict[str, Any] = {"a": [1, 2.5, None], "b": torch.zeros(2), "c": (shape, module)}
    warper = TemperatureLogitsWarper(0.7)
    known = standing(things, warper)
    assert standing(things, warper) == known
    things["b"].fill_(1.0)  # the content may change
    with torch.no_grad():
        module.weight *= 2.0
    assert standing(things, warper) == known
    things["d"] = things["b"]
    del things["d"]
    things["itself"] = things  # as graphs of objects may be
    assert standing(things, warper) != known
    del things["itself"]
    assert standing(things, warper) == known


@pytest.mark.parametrize("change", ["number", "tensor", "view", "weight", "data", "length", "deep"])
def test_what_makes_a_difference(change: str) -> None:
    module = nn.Linear(3, 2)
    warper = TemperatureLogitsWarper(0.7)
    things: dict[str, Any] = {"a": [1, 2.5], "b": torch.zeros(2, 2), "c": (module,)}
    known = standing(things, warper)
    if change == "number":
        things["a"][1] = 2.0
    elif change == "tensor":
        things["b"] = torch.zeros(2, 2)
    elif change == "view":
        things["b"] = things["b"].T
    elif change == "weight":
        module.weight = nn.Parameter(module.weight.detach().clone())
    elif change == "data":
        module.weight.data = module.weight.data.clone()
    elif change == "length":
        things["a"].append(None)
    else:
        warper.temperature = 0.8
    assert standing(things, warper) != known


@pytest.mark.parametrize("word", ["tf32", "older", "bf16", "fp16"])
def test_how_torch_multiplies(word: str) -> None:
    """Whoever has said so: transformers does it in words of torch that make older ones raise."""
    backends: Any = torch.backends
    matmul, on_cpu = backends.cuda.matmul, backends.mkldnn.matmul
    known = standing()
    try:
        if word == "tf32":
            backends.fp32_precision = "tf32"
        elif word == "older":
            torch.set_float32_matmul_precision("high")
        elif word == "bf16":
            on_cpu.fp32_precision = "bf16"
        else:
            matmul.allow_fp16_reduced_precision_reduction = False
        assert standing() != known
    finally:
        backends.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = on_cpu.fp32_precision = "none"
        matmul.allow_fp16_reduced_precision_reduction = True
    assert standing() == known


def test_a_word_that_stands_elsewhere_too() -> None:
    """Members of an Enum are one object wherever they stand."""

    class Mode(str, Enum):
        ONE, OTHER = "one", "other"

    modules = [nn.Identity() for _ in range(3)]
    modes: list[Any] = [Mode.ONE, Mode.OTHER, Mode.ONE]
    for module, mode in zip(modules, modes, strict=True):
        module.mode = mode
    known = standing(modules, {Mode.ONE: 1})
    assert standing(modules, {Mode.OTHER: 1}) != known
    modules[2].mode = modes[1]
    assert standing(modules, {Mode.ONE: 1}) != known


def test_of_attributes_the_order_is_none() -> None:
    one, other = Things(), Things()
    one.first, one.second = 1, 2
    other.second, other.first = 2, 1
    assert standing(one) == standing(other)


@dataclass
class Things:
    first: int = 0
    second: int = 0
    rest: list[int] = field(default_factory=list)


Things.__module__ = "medusa_heads.some"
