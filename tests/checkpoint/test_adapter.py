"""An adapter beside heads is a plain LoRA adapter, whatever its files ask for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from medusa_heads.checkpoint.adapter import adapter_digest, load_adapter, quiet_peft, save_adapter
from tests.conftest import TinyLlama


def adapted(tiny_llama: TinyLlama, **config: Any) -> PeftModel:
    settings: dict[str, Any] = {"r": 2, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    with quiet_peft():
        model: PeftModel = get_peft_model(tiny_llama(), LoraConfig(**(settings | config)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(0.1)
    return model


@pytest.fixture(scope="module")
def saved(tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_adapter(folder, adapted(tiny_llama), "user/target", torch.float32)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "adapter")


def change(folder: Path, **values: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def refusal(folder: Path, model: Any) -> str:
    with pytest.raises(ValueError) as raised:
        load_adapter(model, folder)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"target_modules": r".*\.(q|v)_proj"},
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "use_rslora": True},
        {"rank_pattern": {"q_proj": 5}, "alpha_pattern": {"layers.0.mlp.up_proj": 3}},
        {"exclude_modules": ["down_proj"], "init_lora_weights": "gaussian", "lora_dropout": 0.1},
    ],
    ids=str,
)
def test_plain_adapters_come_back(
    tiny_llama: TinyLlama, tmp_path: Path, config: dict[str, Any]
) -> None:
    model = adapted(tiny_llama, **config)
    save_adapter(tmp_path, model, "user/target", torch.float32)
    ours = load_adapter(tiny_llama(), tmp_path)
    assert adapter_digest(ours) == adapter_digest(model)
    # peft reads the folder, too.
    with quiet_peft():
        theirs = PeftModel.from_pretrained(tiny_llama(), str(tmp_path))
    assert adapter_digest(theirs) == adapter_digest(model)


def test_what_older_versions_wrote_is_read(tiny_llama: TinyLlama, folder: Path) -> None:
    """peft's own file: every key there is, at its default."""
    model = adapted(tiny_llama)
    with quiet_peft():
        model.save_pretrained(str(folder))
    assert len(json.loads((folder / "adapter_config.json").read_text())) > 30
    assert adapter_digest(load_adapter(tiny_llama(), folder)) == adapter_digest(model)


def test_no_code_is_run_that_a_configuration_names(
    tiny_llama: TinyLlama, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "evil_module.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    change(folder, megatron_config={"a": 1}, megatron_core="evil_module")
    assert "asks for 'megatron_config'" in refusal(folder, tiny_llama())
    change(folder, megatron_config=None)
    assert "sets 'megatron_core' to 'evil_module'" in refusal(folder, tiny_llama())
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("auto_mapping", {"base_model_class": "X", "parent_library": "os"}),
        ("peft_type", "XLORA"),
        ("peft_type", ["LORA"]),
        ("bias", "all"),
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("init_lora_weights", "pissa"),
        ("loftq_config", {"loftq_bits": 4}),
        ("layer_replication", [[0, 2], [0, 2]]),
        ("trainable_token_indices", [1]),
        ("target_parameters", ["mlp.experts"]),
        ("target_modules", "(a+)+$"),
        ("target_modules", ["(a+)+$"]),
        ("target_modules", [["q_proj"]]),
        ("rank_pattern", {"(a+)+$": 2}),
        ("exclude_modules", ".*"),
        ("r", True),
        ("r", "2"),
        ("r", -1),
        ("r", 2.5),
        ("lora_alpha", float("nan")),
        ("lora_dropout", 2),
        ("a_key_of_tomorrow", "os.system"),
        ("тайна", 1),  # of another alphabet
    ],
    ids=str,
)
def test_all_else_is_refused_by_name(
    tiny_llama: TinyLlama, folder: Path, name: str, value: Any
) -> None:
    change(folder, **{name: value})
    assert repr(name) in refusal(folder, tiny_llama())


def test_a_rank_without_matrices_takes_no_memory(tiny_llama: TinyLlama, folder: Path) -> None:
    for values in ({"r": 10**8}, {"r": 2, "rank_pattern": {"q_proj": 10**8}}):
        change(folder, **values)
        assert "rank 100000000 is asked for" in refusal(folder, tiny_llama())


def test_a_configuration_without_a_rank_is_damaged(tiny_llama: TinyLlama, folder: Path) -> None:
    change(folder, r=None)
    assert "does not say 'r': it is damaged" in refusal(folder, tiny_llama())
    (folder / "adapter_config.json").write_text("[]")
    assert "expected a JSON object" in refusal(folder, tiny_llama())


def test_other_weights_than_the_adapters_are_refused(tiny_llama: TinyLlama, folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file) | {"base_model.model.lm_head.weight": torch.zeros(199, 64)}, file)
    assert "lm_head.weight is no matrix of a plain LoRA adapter" in refusal(folder, tiny_llama())


def test_what_could_not_be_loaded_is_not_saved(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="asks for 'use_dora'"):
        save_adapter(tmp_path, adapted(tiny_llama, use_dora=True), "t", torch.float32)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_numbers_come_back_in_short_dtypes(
    tiny_llama: TinyLlama, tmp_path: Path, dtype: torch.dtype
) -> None:
    """As heads look for their adapter by its digest, none would be loaded with another."""
    model = adapted(tiny_llama)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn_like(parameter) * 1e-5)
    save_adapter(tmp_path, model, "user/target", dtype)
    for loaded in (torch.float16, torch.bfloat16, torch.float32):
        again = load_adapter(tiny_llama().to(loaded), tmp_path)
        assert adapter_digest(again) == adapter_digest(model)
