"""Where and in which dtype a target is loaded: by the user's word, else by what this machine is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from medusa_heads import HeadsConfig, MedusaHeads, MedusaModel
from medusa_heads.checkpoint.checkpoint import save_heads
from medusa_heads.machine import choice
from medusa_heads.machine.choice import Choice, choose
from medusa_heads.machine.products import Shape, Use
from medusa_heads.target.loading import stored_form
from medusa_heads.target.target import TargetModel
from tests.conftest import TinyLlama
from tests.measured import keep_products

SHAPE = Shape(hidden=64, intermediate=128, vocab=199, layers=2)
BF16 = torch.bfloat16


@pytest.fixture
def stored(tiny_llama: TinyLlama, tmp_path: Path) -> str:
    """A target stored in bf16."""
    tiny_llama().to(BF16).save_pretrained(tmp_path / "target")
    return str(tmp_path / "target")


def measured(bf16: float, float32: float) -> None:
    keep_products(SHAPE, {"float32 1": float32, "bfloat16 1": bf16})


def test_a_target_is_loaded_in_what_is_faster(stored: str, cache: Path) -> None:
    measured(bf16=1.0, float32=0.2)
    slow = TargetModel.from_pretrained(stored, device="cpu")
    assert slow.dtype == torch.float32 and slow.model.config.dtype == torch.float32
    exact = TargetModel.from_pretrained(stored, device="cpu", use=None)
    assert exact.dtype == BF16
    for upcast, given in zip(slow.model.parameters(), exact.model.parameters(), strict=True):
        assert torch.equal(upcast, given.float())  # which holds it exactly
    measured(bf16=0.2, float32=1.0)
    assert TargetModel.from_pretrained(stored, device="cpu").dtype == BF16


def test_the_users_word_beats_the_measurement(stored: str, cache: Path) -> None:
    measured(bf16=1.0, float32=0.2)
    told: list[Choice] = []
    for dtype in ("bfloat16", torch.bfloat16):
        target = TargetModel.from_pretrained(
            stored, dtype=dtype, device="cpu", on_choice=told.append
        )
        assert target.dtype == BF16
    assert [choice.reason for choice in told] == ["bfloat16 as asked"] * 2


def test_heads_follow_their_target(stored: str, cache: Path, tmp_path: Path) -> None:
    measured(bf16=1.0, float32=0.2)
    target = TargetModel.from_pretrained(stored, device="cpu")
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
    save_heads(tmp_path / "heads", heads, target)
    model = MedusaModel.from_pretrained(tmp_path / "heads", device="cpu", tree="none")
    assert model.target.dtype == next(model.heads.parameters()).dtype == torch.float32
    # A model in memory stays what it is.
    kept = TargetModel.from_pretrained(stored, dtype=BF16, device="cpu")
    assert MedusaModel.from_pretrained(tmp_path / "heads", target=kept, tree="none").target is kept
    assert kept.dtype == BF16


def test_a_placement_of_the_users_own_is_left_alone(stored: str, cache: Path) -> None:
    told: list[Choice] = []
    target = TargetModel.from_pretrained(stored, device_map="cpu", on_choice=told.append)
    assert target.dtype == BF16 and not told


def test_weights_without_a_stated_dtype_are_taken_for_float32(stored: str, cache: Path) -> None:
    file = Path(stored) / "config.json"
    config = json.loads(file.read_text())
    del config["dtype"]
    file.write_text(json.dumps(config))
    assert TargetModel.from_pretrained(stored, device="cpu").dtype == torch.float32


@pytest.mark.parametrize("use", [None, "tree"])
def test_a_device_that_is_not_here_is_one_sentence(use: Use | None, stored: str) -> None:
    with pytest.raises(ValueError, match="the device 'cuda:99' cannot be used here"):
        TargetModel.from_pretrained(stored, device="cuda:99", use=use)


def test_a_dtype_that_the_device_lacks_is_one_sentence(
    stored: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "computes_in", lambda device, dtype: dtype != BF16)
    with pytest.raises(ValueError, match="cpu does not compute in bfloat16: give another dtype"):
        TargetModel.from_pretrained(stored, dtype="bfloat16", device="cpu")


def test_nothing_is_measured_for_what_was_asked(stored: str, cache: Path) -> None:
    TargetModel.from_pretrained(stored, dtype="float32", device="cpu")
    TargetModel.from_pretrained(stored, device="cpu", use=None)
    choose("tree", stored=torch.float32, device="cpu", count_threads=False)
    assert not cache.exists()


def test_quantised_weights_have_sizes_and_no_dtype(stored: str, tmp_path: Path) -> None:
    config = json.loads((Path(stored) / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert stored_form(str(tmp_path)) == (None, SHAPE)
    assert stored_form(str(tmp_path / "none")) is None
