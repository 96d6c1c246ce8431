"""One thing named where another is expected: what was found, and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from medusa_heads import HeadsConfig, MedusaHeads, TargetModel
from medusa_heads.checkpoint.checkpoint import load_heads, save_heads
from medusa_heads.checkpoint.draft_checkpoint import save_draft
from medusa_heads.contents import DRAFT_FILE, MTP_FILE, STATE_FILE, foreign_model
from medusa_heads.inference.bench.source import find_source
from medusa_heads.target.loading import load_causal_lm
from tests.conftest import TinyLlama


@pytest.fixture(scope="module")
def folder(tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, heads and a draft model for it."""
    folder = tmp_path_factory.mktemp("contents")
    target = TargetModel(tiny_llama())
    target.model.save_pretrained(folder / "target")
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
    save_heads(folder / "heads", heads, target)
    save_draft(folder / "draft", tiny_llama(), target)
    (folder / "run" / "checkpoint-2").mkdir(parents=True)
    (folder / "run" / "checkpoint-2" / STATE_FILE).write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("draft", "found a draft model: .* as --draft_model of its target"),
        (
            "target",
            "found a model without heads: train .* .medusa-heads generate --drafter auto",
        ),
        ("run", "found a run that has not ended: .* --resume_from_checkpoint last"),
        ("run/checkpoint-2", "found what training resumes from: .* its output_dir"),
        ("heads/medusa_lm_head.safetensors", "found a file: name the folder that it lies in"),
        ("none", "found none: train one"),
    ],
)
def test_no_heads_where_heads_are_expected(
    name: str, sentence: str, folder: Path, tiny_llama: TinyLlama
) -> None:
    with pytest.raises(ValueError, match=f"expected a heads checkpoint .* at .*, {sentence}"):
        load_heads(folder / name, TargetModel(tiny_llama()))


def test_heads_where_a_model_is_expected(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a causal .* found heads, which only draft"):
        load_causal_lm(str(folder / "heads"), dtype="float32", trust_remote_code=False)
    for name in ("target", "draft"):
        loaded = load_causal_lm(str(folder / name), dtype="float32", trust_remote_code=False)
        assert type(loaded) is type(AutoModelForCausalLM.from_pretrained(folder / name))


def test_a_draft_model_is_no_target_to_measure(folder: Path) -> None:
    with pytest.raises(ValueError, match="is a draft model: name its target first, and this as"):
        find_source(folder / "draft", None, heads=False)
    assert find_source(folder / "target", None, heads=False).target == str(folder / "target")


def test_what_this_package_writes_is_no_foreign_model(folder: Path, tmp_path: Path) -> None:
    """Beside it, what only another program writes is one."""
    assert foreign_model(folder / "target") == "config.json"
    for own in (folder / "heads", folder / "draft", tmp_path, tmp_path / "nowhere"):
        assert foreign_model(own) is None
    (tmp_path / "model.safetensors").touch()
    assert foreign_model(tmp_path) == "model.safetensors"
    (tmp_path / MTP_FILE).touch()
    assert foreign_model(tmp_path) is None
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert foreign_model(tmp_path) == "config.json"
    (tmp_path / DRAFT_FILE).touch()
    assert foreign_model(tmp_path) is None
    for name in ("pytorch_model-00001-of-00002.bin", "half.safetensors.index.json"):
        (tmp_path / name).touch()
        assert foreign_model(tmp_path) == name
        (tmp_path / name).unlink()


def test_architectures_that_are_no_list(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    for said in ("LlamaForCausalLM", 1):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": said}))
        load_causal_lm(str(tmp_path), dtype="auto", trust_remote_code=False)
    judge = "LlamaForSequenceClassification"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": judge}))
    with pytest.raises(ValueError, match=f"found a {judge}, which was tuned to judge texts"):
        load_causal_lm(str(tmp_path), dtype="auto", trust_remote_code=False)
