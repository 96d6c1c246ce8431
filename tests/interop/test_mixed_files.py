"""Files of two checkpoints in one folder, and files that are no heads: what they are is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from medusa_heads import HeadsConfig, TargetModel, new_heads
from medusa_heads.checkpoint.checkpoint import load_heads, save_heads
from medusa_heads.interop.convert import convert_heads
from medusa_heads.interop.export import export_heads
from tests.interop.layers import (
    FEW,
    PLAIN_DFLASH,
    PLAIN_DSPARK,
    WIDTH,
    Tensors,
    block,
    eagle3,
    eagle3_config,
    speculators,
    written,
)
from tests.interop.layouts import D, native_tensors
from tests.interop.test_refusals import refused

EAGLE3, DSPARK, DFLASH = eagle3(2), block(), block(corrected=False)
OF_DSPARK, OF_DFLASH = speculators("dspark", anchor=True), speculators("dflash", anchor=False)
MIXED: dict[str, tuple[dict[str, Tensor], dict[str, Any], str]] = {
    "eagle3, dspark's config": (EAGLE3, OF_DSPARK, "its config.json is of 'dspark'"),
    "eagle3, dflash's config": (EAGLE3, OF_DFLASH, "its config.json is of 'dflash'"),
    "eagle3, a block's layers": (EAGLE3, PLAIN_DFLASH, "holds a layer of 'qwen3'"),
    "dspark, eagle3's config": (DSPARK, eagle3_config(), "its config.json is of 'eagle3'"),
    "dspark, dflash's config": (DSPARK, OF_DFLASH, "its config.json is of 'dflash'"),
    "dflash, eagle3's config": (DFLASH, eagle3_config(), "its config.json is of 'eagle3'"),
    "dflash, dspark's config": (DFLASH, PLAIN_DSPARK, "markov_rank: 6, and the tensors say 0"),
    "medusa, eagle3's config": (native_tensors(2), eagle3_config(), "its config.json is of"),
    "two layers of eagle3": (EAGLE3 | eagle3(2, "layers.0"), eagle3_config(), "is no tensor of EA"),
    "a block and eagle3": (DFLASH | EAGLE3, OF_DFLASH, "heads in several layouts"),
    "half a block": (
        {name: tensor for name, tensor in DSPARK.items() if "layers.1" not in name},
        OF_DSPARK,
        "num_hidden_layers: 2, and the tensors say 1",
    ),
    "no configuration": (EAGLE3, {}, "does not say which layers it reads"),
    "a whole model": (
        {"model.layers.0.self_attn.q_proj.weight": torch.zeros(D, D)},
        {"model_type": "llama"},
        "holds no heads but a whole model",
    ),
    "an adapter": (
        {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(2, D)},
        {},
        "holds no heads but a LoRA adapter",
    ),
    "modules": ({"mtp.fc.weight": torch.zeros(D, D)}, {}, "but multi-token-prediction modules"),
    "another's": ({"encoder.weight": torch.zeros(D, D)}, {}, "no heads of a known layout"),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_lies_there_is_said(tmp_path: Path, target: Path, name: str) -> None:
    tensors, said, message = MIXED[name]
    source = written(tmp_path / "theirs", tensors, said)
    assert message in refused(source, tmp_path, target=str(target))


@pytest.mark.parametrize("layout", ["eagle3", "dspark", "dflash", "hydra"])
def test_a_layout_that_it_is_not_in(tmp_path: Path, layout: str) -> None:
    tensors, said = (EAGLE3, eagle3_config()) if layout != "eagle3" else (DSPARK, OF_DSPARK)
    source = written(tmp_path / "theirs", tensors, said)
    message = refused(source, tmp_path, source_format=layout)
    assert f"is not in the layout '{layout}': it looks like" in message


FILES: dict[str, tuple[bytes, str]] = {
    "gguf": (b"GGUF\3\0\0\0" + bytes(99), "it is a GGUF file, for llama.cpp"),
    "git-lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "run git lfs pull"),
    "a page": (b"<!doctype html><html>", "it is a page of the web"),
    "nothing": (b"", "header too small"),
    "cut": (b"\x3c\0\0\0\0\0\0\0{}", "invalid header length|incomplete|deserializing"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_another_kind(tmp_path: Path, target: Path, name: str) -> None:
    content, message = FILES[name]
    source = written(tmp_path / "theirs", EAGLE3, eagle3_config())
    model = TargetModel.from_pretrained(str(target))
    native = save_heads(tmp_path / "ours", new_heads(model, HeadsConfig(num_heads=1)), model)
    (source / "model.safetensors").write_bytes(content)
    (native / "medusa_lm_head.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=f"cannot be read .*({message})"):
        convert_heads(source, tmp_path / "out")
    with pytest.raises(ValueError, match=f"cannot be read .*({message})"):
        load_heads(native, model)


def test_pickles_by_their_own_name_alone(tmp_path: Path, target: Path) -> None:
    source = written(tmp_path / "theirs", EAGLE3, eagle3_config())
    (source / "model.safetensors").unlink()
    torch.save(EAGLE3, source / "model.safetensors")
    assert "it is a file of torch.save under another's name" in refused(source, tmp_path)
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    made = convert_heads(source, tmp_path / "ours", target=str(target))
    assert made.format == "eagle3" and made.stored.config.draft_vocab_size == FEW


def test_folders_without_heads(tmp_path: Path, target: Path) -> None:
    model = TargetModel.from_pretrained(str(target))
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model-q4.gguf").write_bytes(b"GGUF")
    assert "model-q4.gguf is for llama.cpp" in refused(tmp_path / "gguf", tmp_path)
    (tmp_path / "heads.gguf").write_text("")
    assert "none of .safetensors, .pt, .bin" in refused(tmp_path / "heads.gguf", tmp_path)
    (tmp_path / "lora").mkdir()
    save_file({"a.lora_A.weight": torch.zeros(2, D)}, tmp_path / "lora/adapter_model.safetensors")
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    assert "a LoRA adapter: peft" in refused(tmp_path / "lora", tmp_path)
    for said in (eagle3_config(), OF_DSPARK, PLAIN_DFLASH, {"medusa_num_heads": 2}):
        written(tmp_path / "foreign", EAGLE3, said)
        with pytest.raises(ValueError, match="found heads of another project: read them with"):
            load_heads(tmp_path / "foreign", model)
    with pytest.raises(ValueError, match="found a LoRA adapter: merge it into its target"):
        load_heads(tmp_path / "lora", model)


KINDS: dict[str, dict[str, Any]] = {
    "features": {"features": [0, 1]},
    "correction": {"correction_rank": 4},
    "eagle3": {"kind": "eagle3", "features": [0, 1]},
    "dspark": {"kind": "block", "features": [0, 1], "correction_rank": 4},
}


@pytest.mark.parametrize("kind", KINDS)
def test_own_files_of_two_checkpoints(tmp_path: Path, target: Path, kind: str) -> None:
    """The same shapes with other weights, another kind's weights, and layers there are not."""
    model = TargetModel.from_pretrained(str(target))
    folders = []
    for number in range(2):
        heads = new_heads(model, HeadsConfig(num_heads=2, **KINDS[kind]))
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter.add_(number)
        folders.append(save_heads(tmp_path / f"{number}", heads, model))
    other = next(name for name in KINDS if name != kind)
    strange = new_heads(model, HeadsConfig(num_heads=2, **KINDS[other]))
    folders.append(save_heads(tmp_path / "strange", strange, model))
    weights = "medusa_lm_head.safetensors"
    kept = (folders[0] / weights).read_bytes()
    for folder, message in (
        (folders[1], "its checksum differs"),
        (folders[2], "does not hold the"),
    ):
        (folders[0] / weights).write_bytes((folder / weights).read_bytes())
        with pytest.raises(ValueError, match=message):
            load_heads(folders[0], model)
    (folders[0] / weights).write_bytes(kept)
    if "features" in KINDS[kind]:
        path = folders[0] / "medusa_heads.json"
        said = json.loads(path.read_text())
        said["heads"]["features"] = [1, 7]
        path.write_text(json.dumps(said))
        with pytest.raises(ValueError, match=r"asks for layer 7, and .* has the layers 0 to 1"):
            load_heads(folders[0], model)
        if kind == "eagle3":
            with pytest.raises(ValueError, match="asks for layer 7"):
                export_heads(folders[0], tmp_path / "out", "eagle3", target=str(target))


def without(tensors: Tensors, *names: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def nested(**said: Any) -> dict[str, Any]:
    """Three layers, and what else eagle_config says."""
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 5, 8]}
    return eagle3_config(eagle_aux_hidden_state_layer_ids=None, eagle_config=ids | said)


LAYER = "layers.0.self_attn"
OF_EAGLE1 = {
    name: torch.ones(2, 2)
    for name in ("embed_tokens.weight", "fc.bias", "fc.weight", f"{LAYER}.q_proj.weight")
}
LATENT = without(eagle3(2, "layers.0"), f"{LAYER}.q_proj.weight") | {
    f"{LAYER}.kv_a_proj_with_mqa.weight": torch.ones(2, 2)
}
TWO = eagle3(2, "layers.0") | {"layers.1.input_layernorm.weight": torch.ones(D)}
Q_NORM = {f"{LAYER}.q_norm.weight": torch.ones(WIDTH)}
FP8 = {"midlayer.self_attn.q_proj.weight_scale": torch.ones(1)}
HEADS = {"parallel_draft_heads.0.medusa_layers.0.linear.weight": torch.ones(D, D)}
NEXT = {f"model.layers.0.{n}.weight": torch.ones(2) for n in ("enorm", "hnorm", "eh_proj")}
OTHERS: dict[str, tuple[Tensors, dict[str, Any], str]] = {
    "EAGLE-1": (OF_EAGLE1, {"model_type": "llama"}, "no heads but a layer of EAGLE-1 or EAGLE-2"),
    "of vLLM": (
        {"fc.weight": torch.ones(2), "model.layers.0.mlp.up_proj.weight": torch.ones(2)},
        {"model_type": "eagle"},
        "no heads but a layer of EAGLE-1 or EAGLE-2",
    ),
    "speculators' eagle": (
        {"fusion_fc.weight": torch.ones(2, 2), "transformer.mlp.up_proj.weight": torch.ones(2, 2)},
        {"speculators_model_type": "eagle"},
        "no heads but a layer of EAGLE-1 or EAGLE-2",
    ),
    "NextN": (NEXT, {}, "no heads but multi-token-prediction modules"),
    "MiMo": (
        {"model.mtp_layers.0.input_proj.weight": torch.ones(2)},
        {},
        "no heads but multi-token-prediction modules",
    ),
    "latent attention": (LATENT, eagle3_config(), "a layer with latent attention (MLA): heads"),
    "two layers": (TWO, eagle3_config(num_hidden_layers=2), "holds 2 layers: heads here hold one"),
    "norms of queries": (eagle3(2, "layers.0") | Q_NORM, eagle3_config(), "of queries and keys"),
    "P-EAGLE": (
        eagle3(2, "layers.0") | {"mask_hidden": torch.ones(1, 1, 2 * D)},
        eagle3_config(),
        "a layer that drafts all tokens at once (P-EAGLE): heads",
    ),
    "heads behind a layer": (eagle3(2) | HEADS, eagle3_config(), "with Medusa heads behind it"),
    "fp8": (eagle3(2) | FP8, eagle3_config(), "q_proj.weight_scale): convert one that is not"),
    "4 bits": (
        without(eagle3(2), "midlayer.self_attn.q_proj.weight")
        | {"midlayer.self_attn.q_proj.weight_packed": torch.ones(2)},
        eagle3_config(),
        "is quantised (midlayer.self_attn.q_proj.weight_packed)",
    ),
    "a block in fp8": (
        block() | {"layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1)},
        speculators("dspark", anchor=True),
        "is quantised (layers.0.mlp.up_proj.weight_scale_inv)",
    ),
    "mtp_layernorm": (eagle3(3), nested(use_mtp_layernorm=True), "use_mtp_"),
    "no last norm": (eagle3(3), nested(use_last_layernorm=False), "use_last_l"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_heads_here_are_not_is_named(tmp_path: Path, name: str) -> None:
    tensors, said, message = OTHERS[name]
    source = written(tmp_path / "theirs", tensors, said)
    assert message in refused(source, tmp_path)
