"""Whole models, taken out of ones that have heads in them: what lies beside their weights; and
targets that an engine reads otherwise."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from medusa_heads import HeadsConfig, TargetModel, new_heads
from medusa_heads.checkpoint.checkpoint import save_heads
from medusa_heads.interop import WrittenFormat
from medusa_heads.interop.convert import convert_heads
from medusa_heads.interop.export import export_heads
from scripts.prove.seeing.models import build
from tests.interop import layers, layouts
from tests.interop.layouts import D, V, native_tensors

CODE = {
    "configuration_my.py": "from transformers import LlamaConfig\n"
    "class MyConfig(LlamaConfig):\n    model_type = 'my_llama'\n",
    "layers_my.py": "from .sizes_my import SIZE\n",
    "sizes_my.py": "SIZE = 1\n",
    "modeling_my.py": "from transformers import LlamaForCausalLM\n"
    "from .configuration_my import MyConfig\nfrom .layers_my import SIZE\n"
    "class MyLM(LlamaForCausalLM):\n    config_class = MyConfig\n",
    "tokenization_my.py": "",
}
MINE = {
    "model_type": "my_llama",
    "auto_map": {
        "AutoConfig": "configuration_my.MyConfig",
        "AutoModelForCausalLM": "modeling_my.MyLM",
        "AutoModel": "someone/else--modeling_other.Other",
    },
}
TOKENIZER = {"auto_map": {"AutoTokenizer": ["tokenization_my.MyTokenizer", None]}}


@pytest.fixture
def merged(tmp_path: Path, target: Path) -> Path:
    """A whole model with heads in it, and code of its own."""
    prefix, said = "medusa_head.", {"medusa_num_heads": 2, "medusa_num_layers": 1}
    source = layouts.whole_model(tmp_path / "whole", target, native_tensors(2), prefix, said)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | MINE))
    (source / "tokenizer_config.json").write_text(json.dumps(TOKENIZER))
    for name, text in CODE.items():
        (source / name).write_text(text)
    (source / "unnamed.py").write_text("")
    return source


def test_code_of_its_own_goes_with_a_model(merged: Path, tmp_path: Path) -> None:
    convert_heads(merged, tmp_path / "out", extract_target=True, trust_remote_code=True)
    alone = tmp_path / "out" / "target"
    assert {path.name for path in alone.glob("*.py")} == set(CODE)
    loaded = AutoModelForCausalLM.from_pretrained(alone, trust_remote_code=True)
    assert type(loaded).__name__ == "MyLM"
    whole = export_heads(
        tmp_path / "out", tmp_path / "one", "modelopt", target=str(alone), trust_remote_code=True
    )
    assert {path.name for path in whole.folder.glob("*.py")} == set(CODE)


@pytest.mark.parametrize("prefix", ["medusa_head.", "medusa_heads."])
def test_heads_in_a_target_do_not_stay_beside_others(
    tmp_path: Path, target: Path, prefix: str
) -> None:
    """Heads that are converted without --extract_target name the model that they lay in."""
    said: dict[str, dict[str, object]] = {
        "medusa_head.": {"medusa_num_heads": 3, "medusa_num_layers": 1},
        "medusa_heads.": {"medusa": {"num_medusa_heads": 3, "num_medusa_layers": 1}},
    }
    whole, two = tmp_path / "whole", native_tensors(2)
    layouts.whole_model(whole, target, native_tensors(3), prefix, said[prefix])
    heads = layouts.fasterdecoding_pt(tmp_path / "two", two, base_model_name_or_path=str(whole))
    ours = convert_heads(heads, tmp_path / "ours", target=str(whole)).folder
    export_heads(ours, tmp_path / "one", "modelopt")
    files = (tmp_path / "one").glob("*.safetensors")
    names = {name for file in files for name in load_file(file)}
    assert {name for name in names if "medusa" in name} == {f"medusa_heads.{name}" for name in two}
    assert "medusa_num_heads" not in json.loads((tmp_path / "one" / "config.json").read_text())
    again = convert_heads(tmp_path / "one", tmp_path / "again")
    layouts.assert_same_bits(again.stored.tensors, two)


def test_vocabularies_and_processors_of_all_kinds_go_with_a_model(
    merged: Path, tmp_path: Path
) -> None:
    known = ("vocab.txt", "tekken.json", "spiece.model", "qwen.tiktoken", "processor_config.json")
    for name in (*known, "training_args.bin"):
        (merged / name).write_text(name)
    convert_heads(merged, tmp_path / "out", extract_target=True, trust_remote_code=True)
    alone = tmp_path / "out" / "target"
    assert [(alone / name).read_text() for name in known] == list(known)
    assert not (alone / "training_args.bin").exists()


def test_code_from_outside_the_folder_is_not_copied(merged: Path, tmp_path: Path) -> None:
    (tmp_path / "private.py").write_text("")
    (merged / "sizes_my.py").unlink()
    (merged / "sizes_my.py").symlink_to(tmp_path / "private.py")
    with pytest.raises(ValueError, match="leads out of the checkpoint folder"):
        convert_heads(merged, tmp_path / "out", extract_target=True, trust_remote_code=True)
    assert not (tmp_path / "out").exists()


def test_modules_that_are_no_names_are_left_out(merged: Path, tmp_path: Path) -> None:
    """A stranger's `auto_map`, and what a stranger's code says to import, may be a path."""
    (merged / "below").mkdir()
    for name in ("below/other.py", "below/another.py"):
        (merged / name).write_text("")
    config = json.loads((merged / "config.json").read_text())
    config["auto_map"]["AutoModel"] = "below/other.Other"
    (merged / "config.json").write_text(json.dumps(config))
    with (merged / "modeling_my.py").open("a") as code:
        code.write("'''\nfrom .below/another import Another\n'''\n")
    convert_heads(merged, tmp_path / "out", extract_target=True, trust_remote_code=True)
    copied = (tmp_path / "out" / "target").rglob("*.py")
    assert {path.name for path in copied} == set(CODE)


def test_an_assistant_for_scaled_embeddings_is_refused(tmp_path: Path) -> None:
    """transformers hands an assistant what the target's module makes of a token, and heads read
    what lies in it."""
    config = Gemma3TextConfig(
        vocab_size=99, hidden_size=64, intermediate_size=32, num_hidden_layers=3, head_dim=8
    )
    Gemma3ForCausalLM(config).save_pretrained(tmp_path / "gemma")
    model = TargetModel.from_pretrained(str(tmp_path / "gemma"))
    block = HeadsConfig(kind="block", num_heads=2, features=[0, 1])
    save_heads(tmp_path / "heads", new_heads(model, block), model)
    gemma = str(tmp_path / "gemma")
    with pytest.raises(ValueError, match=r"\(Gemma3ForCausalLM\) scales its token embeddings"):
        export_heads(tmp_path / "heads", tmp_path / "out", "transformers", target=gemma)
    export_heads(tmp_path / "heads", tmp_path / "out", "dflash", target=gemma)


def test_blocks_that_read_a_target_s_embeddings_scaled(tmp_path: Path) -> None:
    """Their authors' code asks the target's module, speculators' reads what lies in it."""
    gemma = Gemma3TextConfig(
        vocab_size=V, hidden_size=D, intermediate_size=32, num_hidden_layers=3, head_dim=8
    )
    Gemma3ForCausalLM(gemma).save_pretrained(tmp_path / "gemma")
    target, tensors = str(tmp_path / "gemma"), layers.block(corrected=False)
    source = layers.written(tmp_path / "authors", tensors, layers.PLAIN_DFLASH)
    message = "scales its token embeddings .* its authors' code scaled: train heads for this target"
    with pytest.raises(ValueError, match=message):
        convert_heads(source, tmp_path / "refused", target=target)
    said = layers.speculators("dflash", anchor=False)
    source = layers.written(tmp_path / "speculators", tensors, said)
    convert_heads(source, tmp_path / "ours", target=target)


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_vl"])
def test_targets_that_read_images(kind: str, tmp_path: Path) -> None:
    """transformers knows most of them as no causal LM, and calls their embeddings otherwise than
    their files do."""
    model, target = build(kind), str(tmp_path / "target")
    model.save_pretrained(target)
    config = HeadsConfig(kind="eagle3", num_heads=2, features=[0, 1])
    loaded = TargetModel.from_pretrained(target)
    save_heads(tmp_path / "heads", new_heads(loaded, config), loaded)
    export_heads(tmp_path / "heads", tmp_path / "out", "eagle3-speculators")
    copied = load_file(tmp_path / "out" / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(copied, model.get_input_embeddings().weight)
    again = convert_heads(tmp_path / "out", tmp_path / "again", target=target)
    assert again.stored.target["lm_head_sha256"] == loaded.fingerprint()["lm_head_sha256"]


def test_a_target_that_lies_above_the_heads(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a relative path, which was relative to where training ran, no hub is asked."""
    shutil.copytree(target, tmp_path / "project" / "models" / "mine")
    monkeypatch.chdir(tmp_path / "project")
    loaded = TargetModel.from_pretrained("models/mine")
    save_heads("runs/heads", new_heads(loaded, HeadsConfig(num_heads=1)), loaded)
    monkeypatch.chdir(tmp_path)
    export_heads("project/runs/heads", "out", "vllm")
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["base_model_name_or_path"] == str(tmp_path / "project" / "models" / "mine")


@pytest.mark.parametrize("to", ["eagle3", "eagle3-speculators"])
def test_a_factor_behind_the_logits_goes_along(
    target: Path, tmp_path: Path, to: WrittenFormat
) -> None:
    """As of heads for Granite; vLLM multiplies by it what an eagle3 layer says."""
    model = TargetModel.from_pretrained(str(target))
    config = HeadsConfig(kind="eagle3", num_heads=2, features=[0, 1], logit_scale=0.25)
    save_heads(tmp_path / "heads", new_heads(model, config), model)
    export_heads(tmp_path / "heads", tmp_path / "out", to)
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said.get("transformer_layer_config", said)["logit_scale"] == 0.25
    again = convert_heads(tmp_path / "out", tmp_path / "again", target=str(target))
    assert again.stored.config.logit_scale == 0.25


def test_a_model_that_writes_no_text(tmp_path: Path) -> None:
    """transformers names all of hundreds that do."""
    source = layers.written(tmp_path / "source", *layers.PUBLISHED["eagle3"])
    (tmp_path / "clip").mkdir()
    (tmp_path / "clip" / "config.json").write_text('{"model_type": "clip"}')
    save_file({str(i): torch.zeros(1) for i in range(12)}, tmp_path / "clip" / "model.safetensors")
    with pytest.raises(ValueError, match=r"language model at .* Unrecognized") as raised:
        convert_heads(source, tmp_path / "out", target=str(tmp_path / "clip"))
    assert "GPT2Config" not in str(raised.value)
