"""Whoever made a checkpoint names its target: code that comes with that is run only for users who
have named it themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from medusa_heads import DraftedModel, HeadsConfig, MedusaHeads, MedusaModel, TargetModel
from medusa_heads.checkpoint.checkpoint import save_heads
from medusa_heads.checkpoint.draft_checkpoint import save_draft
from medusa_heads.cli.main import main
from medusa_heads.interop.export import export_heads
from tests.conftest import Refused, TinyLlama

CODE = """
import pathlib
from transformers import LlamaConfig, LlamaForCausalLM

pathlib.Path({ran!r}).touch()


class TheirConfig(LlamaConfig):
    pass


class Theirs(LlamaForCausalLM):
    config_class = TheirConfig
"""
SENTENCE = "which the checkpoint's author has named, and not you: pass target="


class Found:
    """A checkpoint of heads, a draft model's, their target, and the file that its code writes."""

    def __init__(self, folder: Path) -> None:
        self.heads, self.draft = folder / "heads", folder / "draft"
        self.target, self.ran = folder / "target", folder / "code-ran"


@pytest.fixture
def found(tiny_llama: TinyLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Found:
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    found = Found(tmp_path)
    tiny_llama().save_pretrained(found.target)
    plain = TargetModel.from_pretrained(str(found.target))
    save_heads(found.heads, MedusaHeads.from_target(plain, HeadsConfig(num_heads=1)), plain)
    save_draft(found.draft, plain.model, plain)
    (found.target / "theirs.py").write_text(CODE.format(ran=str(found.ran)))
    config = json.loads((found.target / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "theirs.TheirConfig",
        "AutoModelForCausalLM": "theirs.Theirs",
    }
    (found.target / "config.json").write_text(json.dumps(config))
    return found


def test_in_python(found: Found, tmp_path: Path) -> None:
    trusting: dict[str, Any] = {"trust_remote_code": True}
    for load in (
        lambda **options: MedusaModel.from_pretrained(found.heads, **options),
        lambda **options: DraftedModel.from_pretrained(found.draft, **options),
        lambda **options: export_heads(found.heads, tmp_path / "out", "tgi", **options),
    ):
        with pytest.raises(ValueError, match=SENTENCE) as raised:
            load(**trusting)
        assert repr(str(found.target)) in str(raised.value)
    assert not found.ran.exists()
    model = MedusaModel.from_pretrained(
        found.heads, target=str(found.target), tree="chain", **trusting
    )
    assert type(model.target.model).__name__ == "Theirs" and found.ran.exists()


def test_on_the_command_line(found: Found, tmp_path: Path, refused: Refused) -> None:
    heads, draft, out = str(found.heads), str(found.draft), str(tmp_path / "out")
    for command in (
        ["generate", heads, "--prompt", "x"],
        ["generate", draft, "--prompt", "x"],
        ["chat", heads],
        ["tune", heads],
        ["benchmark", heads],
        ["calibrate", heads, "--dataset", "stdlib"],
        ["export", heads, out, "--to", "vllm"],
    ):
        assert SENTENCE in refused(main, [*command, "--trust_remote_code"])
    assert not found.ran.exists()


def test_the_revision_is_named_with_the_target(found: Found) -> None:
    file = found.heads / "medusa_heads.json"
    sidecar = json.loads(file.read_text())
    sidecar["target"] |= {"name_or_path": "user/target", "revision": "abc"}
    file.write_text(json.dumps(sidecar))
    with pytest.raises(ValueError, match="pass target='user/target@abc'"):
        MedusaModel.from_pretrained(found.heads, trust_remote_code=True)
