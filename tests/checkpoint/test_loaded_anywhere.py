"""Heads are loaded the same in whatever a program has set before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload

from medusa_heads import HeadsConfig, attach, new_heads
from medusa_heads.checkpoint.checkpoint import load_heads, save_heads
from medusa_heads.target.target import TargetModel
from tests.conftest import TinyLlama
from tests.pairs import with_slow


@pytest.fixture
def target(tiny_llama: TinyLlama) -> TargetModel:
    return TargetModel(tiny_llama())


@pytest.mark.parametrize("kind", ["medusa", "hydra", "block", "eagle3"])
def test_loading_draws_no_number_of_a_seed(target: TargetModel, tmp_path: Path, kind: Any) -> None:
    save_heads(tmp_path, new_heads(target, HeadsConfig(kind=kind, num_heads=2)), target)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    load_heads(tmp_path, target)
    assert torch.equal(torch.rand(3), expected)


def test_loading_goes_by_no_default_device(target: TargetModel, tmp_path: Path) -> None:
    save_heads(tmp_path, new_heads(target, HeadsConfig(num_heads=2)), target)
    with torch.device("meta"):
        heads = load_heads(tmp_path, target).heads
    assert {parameter.device.type for parameter in heads.parameters()} == {"cpu"}


@pytest.mark.parametrize("kind", with_slow(["medusa", "eagle3"], ["hydra", "block"]))
def test_a_program_that_is_all_in_inference_mode(
    tiny_llama: TinyLlama, tmp_path: Path, kind: Any
) -> None:
    target = TargetModel(tiny_llama())
    save_heads(tmp_path, new_heads(target, HeadsConfig(kind=kind, num_heads=2)), target)
    ids_1T = torch.arange(8)[None]
    model: Any = target.model
    expected_1T = model.generate(ids_1T, max_new_tokens=12, do_sample=False)
    with torch.inference_mode():
        medusa = attach(tiny_llama(), tmp_path, tree="static:3")
        for _ in range(2):
            got_1T: Any = medusa.generate(ids_1T, max_new_tokens=12, do_sample=False)
            assert torch.equal(got_1T, expected_1T)


def test_a_target_whose_lm_head_is_elsewhere_is_refused(
    tiny_llama: TinyLlama, target: TargetModel, tmp_path: Path
) -> None:
    save_heads(tmp_path, new_heads(target, HeadsConfig(num_heads=2)), target)
    model = tiny_llama()
    cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="keeps the target's lm_head elsewhere"):
        attach(model, tmp_path)
