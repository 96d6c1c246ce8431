"""Heads and adapter that were trained together come back together."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from medusa_heads.checkpoint.adapter import adapter_digest
from medusa_heads.checkpoint.checkpoint import load_heads
from medusa_heads.checkpoint.stored_heads import read_sidecar
from medusa_heads.config import HeadsConfig
from medusa_heads.inference.models.medusa import MedusaModel
from medusa_heads.target.target import TargetModel
from medusa_heads.training.runs.heads import train_heads
from tests.training.joint_cases import SMALL, Rows, arguments


@pytest.fixture
def target_folder(target: TargetModel, tmp_path: Path) -> Path:
    target.model.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def trained(
    target_folder: Path, make_rows: Rows, tmp_path: Path, request: pytest.FixtureRequest
) -> Path:
    """A folder with heads, medusa's unless a test says otherwise, and adapter, as train_heads
    leaves it: trained once for all tests."""
    config: dict[str, Any] = getattr(request, "param", {})
    if before := _trained.get(str(config)):
        return shutil.copytree(before, tmp_path / "run")
    target = TargetModel.from_pretrained(str(target_folder))
    digest = target.weights_digest()
    train_heads(
        target,
        make_rows(24),
        eval_dataset=make_rows(6, seed=9),
        config=HeadsConfig(num_heads=3, **config),
        output_dir=tmp_path / "run",
        training_args=arguments(tmp_path, max_steps=12),
        joint=SMALL,
    )
    assert target.weights_digest() == digest
    assert not any(".lora_" in name for name, _ in target.model.named_parameters())
    _trained[str(config)] = shutil.copytree(tmp_path / "run", tmp_path / "kept")
    return tmp_path / "run"


_trained: dict[str, Path] = {}


@pytest.mark.parametrize(
    "trained",
    [{}, pytest.param({"kind": "eagle3", "features": (0, 1)}, marks=pytest.mark.slow)],
    indirect=True,
)
def test_heads_and_adapter_come_back_in_one_call(
    trained: Path, target_folder: Path, make_rows: Rows
) -> None:
    assert {p.name for p in (trained / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    sidecar = read_sidecar(trained)
    assert sidecar["adapter"]["folder"] == "adapter"
    assert sidecar["provenance"]["joint"]["lora_r"] == 4
    metrics = json.loads((trained / "metrics.json").read_text())
    assert metrics["eval_target_kl"] > 0

    prompt = torch.tensor([make_rows(1, length=10, seed=2)["input_ids"][0]])
    base: Any = TargetModel.from_pretrained(str(target_folder)).model
    plain = base.generate(prompt, max_new_tokens=16, do_sample=False)
    tuned: Any = PeftModel.from_pretrained(base, str(trained / "adapter"))
    expected = tuned.generate(input_ids=prompt, max_new_tokens=16, do_sample=False)
    assert not torch.equal(plain, expected)  # else nothing below would be shown
    for merge in (False, True):
        model = MedusaModel.from_pretrained(trained, merge_adapter=merge, tree=8)
        got: Any = model.generate(prompt, max_new_tokens=16, do_sample=False)
        assert torch.equal(got, expected)
        carries = any(".lora_" in name for name, _ in model.target.model.named_parameters())
        assert carries == (not merge)
    in_memory = MedusaModel.from_pretrained(trained, target=tuned, tree=8)
    got = in_memory.generate(prompt, max_new_tokens=16, do_sample=False)
    assert torch.equal(got, expected)
    # The digest is of the adapter, not of the dtype it is loaded in.
    rounded = MedusaModel.from_pretrained(trained, dtype=torch.bfloat16)
    assert adapter_digest(rounded.target.model) == sidecar["adapter"]["sha256"]


def test_heads_are_refused_without_their_adapter(trained: Path, target_folder: Path) -> None:
    bare = TargetModel.from_pretrained(str(target_folder))
    with pytest.raises(ValueError, match="this target carries no adapter: apply"):
        load_heads(trained, bare)
    with pytest.raises(ValueError, match="this target carries no adapter: apply"):
        MedusaModel.from_pretrained(trained, target=bare)
    other = get_peft_model(bare.model, LoraConfig(r=4, target_modules="all-linear"))
    with pytest.raises(ValueError, match="this target carries another adapter"):
        MedusaModel.from_pretrained(trained, target=other)
    with pytest.raises(ValueError, match="there is none: leave it out"):
        tuned = PeftModel.from_pretrained(
            TargetModel.from_pretrained(str(target_folder)).model, str(trained / "adapter")
        )
        MedusaModel.from_pretrained(trained, target=tuned, merge_adapter=True)
    (trained / "adapter" / "adapter_model.safetensors").write_bytes(b"broken")
    with pytest.raises(ValueError, match="cannot be applied"):
        MedusaModel.from_pretrained(trained)
    shutil.rmtree(trained / "adapter")
    with pytest.raises(ValueError, match="copy the whole checkpoint folder"):
        MedusaModel.from_pretrained(trained)


def test_a_targets_folder_may_be_a_path(
    target_folder: Path, make_rows: Rows, tmp_path: Path
) -> None:
    train_heads(
        target_folder,
        make_rows(4),
        eval_dataset=make_rows(2, seed=9),
        config=HeadsConfig(num_heads=1),
        output_dir=tmp_path / "run",
        training_args=arguments(tmp_path, max_steps=1),
    )
    assert MedusaModel.from_pretrained(tmp_path / "run").target.name_or_path == str(target_folder)
