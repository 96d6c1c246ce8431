"""EAGLE-3's checkpoints: what a published layer says, ours says; ours is written as theirs are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from medusa_heads import HeadsConfig, TargetModel, new_heads
from medusa_heads.checkpoint.checkpoint import load_heads, save_heads
from medusa_heads.checkpoint.stored_heads import read_stored
from medusa_heads.decoder_shape import DecoderShape
from medusa_heads.heads import Eagle3Heads
from medusa_heads.interop.convert import convert_heads
from medusa_heads.interop.export import export_heads
from tests.heads import written_out
from tests.interop.conftest import Decodes
from tests.interop.layers import (
    FEW,
    GROUPS,
    HEADS,
    WIDE,
    WIDTH,
    Tensors,
    eagle3,
    eagle3_config,
    speculators_eagle3,
    written,
)
from tests.interop.layouts import D, V, assert_same_bits
from tests.pairs import alternately, with_slow

SHAPE = DecoderShape(
    HEADS, GROUPS, WIDTH, WIDE, 1e-5, rope_parameters={"rope_type": "default", "rope_theta": 5e3}
)


def their_logits(
    tensors: Tensors, features_TX: Tensor, embedded_TD: Tensor, *, before: bool = False
) -> Tensor:
    """What the first step says along a text."""
    shape = replace(SHAPE, norm_before_residual=before)
    hidden_TD = features_TX @ tensors["fc.weight"].T if "fc.weight" in tensors else features_TX
    x_TD = written_out.layer(tensors, shape, hidden_TD, embedded_TD)
    return F.rms_norm(x_TD, (D,), tensors["norm.weight"], 1e-5) @ tensors["lm_head.weight"].T


def our_logits(folder: Path, target: Path, ids_1T: Tensor) -> tuple[Tensor, TargetModel]:
    plain = TargetModel.from_pretrained(str(target))
    heads = load_heads(folder, plain).heads
    assert isinstance(heads, Eagle3Heads)
    model = plain.with_features(heads.config.features)
    encoded = heads.encode(model.hidden(ids_1T), ids_1T)
    return heads.project(0, heads.features(encoded)[0, :, 0]), model


@pytest.mark.parametrize(
    ("of", "before"), alternately(["authors", "speculators", "last hidden state"], [False, True])
)
@torch.no_grad()
def test_a_layer_says_what_theirs_says(
    tmp_path: Path, target: Path, decodes: Decodes, of: str, before: bool
) -> None:
    changed: dict[str, Any] = {"norm_before_residual": before}
    tensors = eagle3(0 if of == "last hidden state" else 2)
    stored = tensors
    if of == "last hidden state":
        changed["eagle_config"] = {"use_aux_hidden_state": False}
    if of == "speculators":
        model = TargetModel.from_pretrained(str(target))
        copied_VD = model.get_input_embeddings().weight.detach().clone()
        stored = eagle3(2, "layers.0") | {"embed_tokens.weight": copied_VD}
        changed |= speculators_eagle3(steps=3)
        if before:  # which is what is meant where nothing is said
            del changed["norm_before_residual"]
    source = written(tmp_path / "theirs", stored, eagle3_config(**changed))
    converted = convert_heads(source, tmp_path / "ours", target=str(target))
    assert converted.format == "eagle3"
    assert converted.stored.config.num_heads == (3 if of == "speculators" else 5)
    ids_1T = torch.randint(V, (1, 12), generator=torch.Generator().manual_seed(1))
    got_TC, model = our_logits(converted.folder, target, ids_1T)
    hidden_TX = model.hidden(ids_1T)[0]
    features_TX = hidden_TX if of == "last hidden state" else hidden_TX[:, : 2 * D]
    embedded_TD = model.get_input_embeddings()(ids_1T[0].roll(-1))
    expected_TC = their_logits(tensors, features_TX, embedded_TD, before=before)
    torch.testing.assert_close(got_TC[:-1], expected_TC[:-1], atol=1e-4, rtol=1e-4)
    wrong_TC = their_logits(tensors, features_TX, embedded_TD, before=not before)
    assert not torch.allclose(got_TC[:-1], wrong_TC[:-1], atol=1e-2)
    decodes(converted.folder)


SAID: dict[str, dict[str, Any]] = {
    "authors": {"norm_output": True},
    "nested": {"eagle_config": {"norm_output": True}},
    "TensorRT-LLM": {"eagle_config": {"return_hidden_post_norm": True}},
    "speculators": speculators_eagle3(steps=5) | {"norm_output": True},
    "not at all": {},
}


@pytest.mark.parametrize("of", with_slow(list(SAID)[2:], list(SAID)[:2]))
@torch.no_grad()
def test_steps_go_on_from_where_theirs_do(
    tmp_path: Path, target: Path, decodes: Decodes, of: str
) -> None:
    """Chains of EAGLE-3.1, whose steps read what stands behind the norm; then there and back."""
    layer = "layers.0" if of == "speculators" else "midlayer"
    source = written(tmp_path / "theirs", eagle3(2, layer), eagle3_config(**SAID[of]))
    made = convert_heads(source, tmp_path / "ours", target=str(target))
    plain = TargetModel.from_pretrained(str(target))
    heads = load_heads(made.folder, plain).heads
    shape = heads.config.decoder
    assert isinstance(shape, DecoderShape) and shape.norm_output == (of != "not at all")
    model = plain.with_features(heads.config.features)
    ids_1T = torch.randint(V, (1, 12), generator=torch.Generator().manual_seed(1))
    hidden_1TX = model.hidden(ids_1T)
    encoded_KD = heads.features(heads.encode(hidden_1TX, ids_1T)[0, 6])
    tensors, embedded_TD = eagle3(2), model.get_input_embeddings()(ids_1T[0, 1:])
    fused_TD = hidden_1TX[0, :7, : 2 * D] @ tensors["fc.weight"].T
    usual = replace(SHAPE, norm_before_residual=shape.norm_before_residual)
    behind, instead = (
        written_out.chain(tensors, usual, fused_TD, embedded_TD, 5, norm_output=each)
        for each in (shape.norm_output, not shape.norm_output)
    )
    torch.testing.assert_close(encoded_KD, behind, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(encoded_KD[1:], instead[1:], atol=1e-2)
    decodes(made.folder)
    for to in ("eagle3", "eagle3-speculators"):
        export_heads(made.folder, tmp_path / to, to, target=str(target))
        said = json.loads((tmp_path / to / "config.json").read_text())
        assert said["norm_output"] is shape.norm_output
        again = convert_heads(tmp_path / to, tmp_path / f"from {to}", target=str(target))
        assert read_stored(again.folder).config == made.stored.config
        assert_same_bits(read_stored(again.folder).tensors, made.stored.tensors)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"vocab_matrix": "own", "features": [0, 1]},
        {"draft_vocab_size": 20, "features": [1]},
    ],
    ids=str,
)
def test_there_and_back(tmp_path: Path, target: Path, config: dict[str, Any]) -> None:
    model = TargetModel.from_pretrained(str(target))
    few = torch.randperm(V)[:20] if "draft_vocab_size" in config else None
    heads = new_heads(model, HeadsConfig(kind="eagle3", num_heads=3, **config), few)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter))
    native = save_heads(tmp_path / "native", heads, model)
    exported = export_heads(native, tmp_path / "out", "eagle3")
    place = f'{{"method": "eagle3", "model": "{tmp_path}/out", "num_speculative_tokens": 3}}'
    assert exported.notices[-1].endswith(f"--speculative-config '{place}'")
    said = json.loads((exported.folder / "config.json").read_text())
    layers = config.get("features")
    assert said["eagle_config"]["use_aux_hidden_state"] == bool(layers)
    # What goes into layer i + 1 is what comes out of layer i.
    ids = said.get("eagle_aux_hidden_state_layer_ids")
    assert ids == (layers and [layer + 1 for layer in layers])
    theirs = load_file(exported.folder / "model.safetensors")
    assert all(tensor.dtype == torch.long for name, tensor in theirs.items() if name == "d2t")
    again = convert_heads(exported.folder, tmp_path / "again", target=str(target))
    expected = read_stored(native).tensors
    if config.get("vocab_matrix") != "own":
        matrix_VD = model.get_output_embeddings().weight.detach()
        expected |= {"lm_head.weight": matrix_VD if few is None else matrix_VD[few.sort().values]}
        if few is not None:
            assert theirs["t2d"].nonzero()[:, 0].tolist() == few.sort().values.tolist()
    assert_same_bits(read_stored(again.folder).tensors, expected)
    assert again.stored.config.features == heads.config.features
    ids_1T = torch.arange(12)[None]
    wide = model.with_features(layers)
    with torch.no_grad():
        got_TV, _ = our_logits(again.folder, target, ids_1T)
        features = heads.features(heads.encode(wide.hidden(ids_1T), ids_1T))
        torch.testing.assert_close(got_TV, heads.project(0, features[0, :, 0]))


ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"model_type": "qwen3"}, {}, "holds a layer of 'qwen3': heads here hold Llama's"),
        ({"hidden_act": "gelu"}, {}, "is not of silu"),
        ({"target_hidden_size": 128}, {}, "says target_hidden_size: 128 and its tensors are 64"),
        ({"norm_output": "yes"}, {}, "norm_output must be true or false, got 'yes'"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 8}, {}, "a layer with a window"),
        ({"use_sliding_window": True, "sliding_window": 8}, {}, "a layer with a window"),
        ({"eagle_aux_hidden_state_layer_ids": None}, {}, "does not say which layers it reads"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2]}, {}, r"order, counted from 1, got \[0, 2\]"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1]}, {}, "in ascending order, counted from 1"),
        ({"eagle_aux_hidden_state_layer_ids": [1]}, {}, r"says .*\[1\], and fc.weight reads 2 lay"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 9]}, {}, "layer 8, and .* has the layers 0 to 1"),
        ({"num_hidden_layers": "2"}, {}, "says num_hidden_layers: '2', and the tensors say 1"),
        ({"draft_vocab_size": 9}, {}, "says draft_vocab_size: 9, and the tensors say 30"),
        ({"vocab_size": 150}, {}, "for a vocabulary of 150, and the target's has 199 tokens"),
        ({"vocab_size": True}, {}, r"does not say its target's vocab_size \(it says True\)"),
        ({"speculators_model_type": "peagle"}, {}, "and its config.json is of 'peagle'"),
        (
            {"architectures": ["DFlashDraftModel"]},
            {},
            "'eagle3', and its config.json is of 'dflash'",
        ),
        ({"rope_theta": 0}, {}, "rope_theta must be a positive number, got 0"),
        (
            {"rope_scaling": ROPE | {"low_freq_factor": "x"}},
            {},
            "low_freq_factor must be a positive number, got 'x'",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, {}, "must have original_max_position"),
        ({"rope_scaling": ROPE | {"partial_rotary_factor": 0.5}}, {}, "turn a part of each head"),
        ({"partial_rotary_factor": 0.5}, {}, "turn a part of each head"),
        ({"rope_parameters": {"full_attention": ROPE}}, {}, "of 'full_attention' alone"),
        ({"eagle_config": 3}, {}, "eagle_config must be an object, got 3"),
        ({"rope_scaling": {"type": "dynamic"}}, {}, "must name a rope_type among"),
        ({"num_attention_heads": None}, {}, "num_attention_heads must be an integer"),
        ({"num_attention_heads": 8}, {}, "q_proj.weight has shape|k_proj.weight has shape"),
        ({}, {"midlayer.mlp.down_proj.weight": None}, "lacks midlayer.mlp.down_proj.weight"),
        ({}, {"midlayer.extra.weight": torch.zeros(2)}, "extra.weight is no tensor of EAGLE-3's"),
        ({}, {"d2t": torch.zeros(3, dtype=torch.long)}, "d2t must say of 30 tokens"),
        ({}, {"d2t": torch.full((FEW,), V)}, "d2t must say of 30 tokens"),
        ({}, {"lm_head.weight": None}, "lacks lm_head.weight"),
        ({}, {"midlayer.hidden_norm.weight": None}, "lacks midlayer.hidden_norm.weight"),
        ({}, {"layers.0.hidden_norm.weight": torch.zeros(D)}, "layers.0.hidden_norm.weight is no"),
        ({}, {"midlayer.self_attn.q_proj.weight": torch.zeros(())}, r"shape \[\], not a matrix"),
        (
            {},
            {"fc.weight": torch.zeros(D, 2 * D, dtype=torch.long)},
            "stored as int64, expected one",
        ),
        ({}, {"d2t": None}, "lacks d2t, which says what 30 of the target's 199 tokens"),
        ({}, {"d2t": torch.full((FEW,), 2**63 - 1)}, "d2t must say of 30 tokens"),
        ({}, {"d2t": torch.arange(FEW)}, "t2d does not mark the tokens that d2t says"),
        ({}, {"t2d": torch.zeros(V, dtype=torch.bool)}, "t2d does not mark the tokens"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_said(
    tmp_path: Path, target: Path, config: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    stored = {name: t for name, t in (eagle3(2) | tensors).items() if t is not None}
    source = written(tmp_path / "theirs", stored, eagle3_config(**config))
    with pytest.raises(ValueError, match=message):
        convert_heads(source, tmp_path / "ours", target=str(target))


def test_other_layouts_and_kinds_are_told_apart(tmp_path: Path, target: Path) -> None:
    model = TargetModel.from_pretrained(str(target))
    for kind, to, message in (
        ("eagle3", "vllm", "vLLM holds no eagle3 heads: give --to eagle3$"),
        ("medusa", "eagle3", "holds no medusa heads: train kind 'eagle3' for it"),
    ):
        native = tmp_path / kind
        save_heads(native, new_heads(model, HeadsConfig(kind=kind, num_heads=2)), model)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=message):
            export_heads(native, tmp_path / "out", to)  # type: ignore[arg-type]


@pytest.mark.parametrize("before", [False, True])
def test_what_sglang_would_not_read_is_said(tmp_path: Path, target: Path, before: bool) -> None:
    source = written(tmp_path / "theirs", eagle3(2), eagle3_config(norm_before_residual=before))
    convert_heads(source, tmp_path / "ours", target=str(target))
    exported = export_heads(tmp_path / "ours", tmp_path / "out", "eagle3", target=str(target))
    assert any("SGLang" in notice for notice in exported.notices) == before


def test_speculators_layer_comes_back(tmp_path: Path, target: Path) -> None:
    source = written(tmp_path / "theirs", eagle3(2), eagle3_config())
    made = convert_heads(source, tmp_path / "ours", target=str(target))
    to: Any = "eagle3-speculators"
    exported = export_heads(made.folder, tmp_path / "out", to, target=str(target))
    there = load_file(exported.folder / "model.safetensors")
    embeddings = TargetModel.from_pretrained(str(target)).get_input_embeddings()
    assert "layers.0.self_attn.q_proj.weight" in there
    assert torch.equal(there["embed_tokens.weight"], embeddings.weight)
    again = convert_heads(exported.folder, tmp_path / "again", target=str(target))
    before, after = read_stored(made.folder), read_stored(again.folder)
    assert_same_bits(after.tensors, before.tensors)
    assert after.config == before.config
