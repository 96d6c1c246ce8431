"""`medusa-heads benchmark`: it runs, and mistakes are one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import dynamic_module_utils

from medusa_heads import HeadsConfig, MedusaHeads, TargetModel
from medusa_heads.checkpoint import save_heads
from medusa_heads.cli.benchmark import main
from medusa_heads.stored_heads import SIDECAR_FILE

SMALL = ["--num-prompts", "1", "--prompt-length", "8", "--max-new-tokens", "4", "--tree", "2"]

REMOTE = """\
from transformers import LlamaConfig, LlamaForCausalLM

class RemoteConfig(LlamaConfig):
    model_type = "remote_llama"

class RemoteModel(LlamaForCausalLM):
    config_class = RemoteConfig
"""


def test_a_target_with_code_of_its_own(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tmp_path / "target"
    shutil.copytree(checkpoint / "target", folder)
    (folder / "remote.py").write_text(REMOTE)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "remote_llama",
        "auto_map": {
            "AutoConfig": "remote.RemoteConfig",
            "AutoModelForCausalLM": "remote.RemoteModel",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    target = TargetModel.from_pretrained(str(folder), trust_remote_code=True)
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
    save_heads(tmp_path / "heads", heads, target)
    command = [str(tmp_path / "heads"), "--dtypes", "float32", *SMALL]
    assert main([*command, "--trust-remote-code"]) == 0
    assert "medusa heads, tree" in capsys.readouterr().out
    assert main(command) == 2
    told = capsys.readouterr().err
    assert "contains custom code which must be executed" in told.splitlines()[-1]
    assert "Traceback" not in told


@pytest.mark.parametrize("device", ["abacus", "meta", "cuda:99"])
def test_a_device_that_is_not_there(
    checkpoint: Path, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(checkpoint / "heads"), "--device", device, *SMALL]) == 2
    told = capsys.readouterr().err
    assert f"expected a device such as cpu or cuda, got '{device}'" in told
    assert told.count("\n") == 1 and "Traceback" not in told


@pytest.mark.parametrize("target", [None, {"name_or_path": ""}])
def test_a_sidecar_that_names_no_target(
    checkpoint: Path, tmp_path: Path, target: object, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(checkpoint / "heads", tmp_path / "heads")
    sidecar = json.loads((tmp_path / "heads" / SIDECAR_FILE).read_text())
    (tmp_path / "heads" / SIDECAR_FILE).write_text(json.dumps(sidecar | {"target": target}))
    assert main([str(tmp_path / "heads"), *SMALL]) == 2
    told = capsys.readouterr().err
    said = "no 'target' part" if target is None else "does not name its target"
    assert said in told and told.count("\n") == 1
