"""DFlash's and DSpark's checkpoints: what theirs say, ours say; ours are written as theirs are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel

from medusa_heads import HeadsConfig, TargetModel, new_heads
from medusa_heads.checkpoint.checkpoint import load_heads, save_heads
from medusa_heads.checkpoint.stored_heads import read_stored
from medusa_heads.interop import WrittenFormat
from medusa_heads.interop.convert import convert_heads
from medusa_heads.interop.export import export_heads
from tests.interop.conftest import Decodes
from tests.interop.layers import (
    BLOCK,
    FEW,
    LAYERS,
    MASK,
    PLAIN_DFLASH,
    PLAIN_DSPARK,
    RANK,
    WIDTH,
    Tensors,
    block,
    speculators,
    written,
)
from tests.interop.layouts import D, V, assert_same_bits


def their_logits(
    of: Tensors, features_TX: Tensor, anchor_D: Tensor, mask_D: Tensor, *, layers: int = 2
) -> Tensor:
    """What all queries of a block say behind a text, written out after the authors' model."""

    def norm(name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), of[f"{name}.weight"], 1e-5)

    def heads(name: str, x: Tensor) -> Tensor:
        return (x @ of[f"{name}.weight"].T).view(len(x), -1, WIDTH).transpose(0, 1)

    def turned(x_HTX: Tensor, start: int) -> Tensor:
        steps = torch.arange(0, WIDTH, 2) / WIDTH
        angles = (start + torch.arange(x_HTX.shape[1]))[:, None] * 5000.0**-steps
        cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
        first, second = x_HTX.chunk(2, -1)
        return x_HTX * cos + torch.cat([-second, first], -1) * sin

    context_TD = norm("hidden_norm", features_TX @ of["fc.weight"].T)
    x_QD = torch.stack([anchor_D] + [mask_D] * (BLOCK - 1))
    for layer in (f"layers.{i}" for i in range(layers)):
        own_QD = norm(f"{layer}.input_layernorm", x_QD)
        both = torch.cat([context_TD, own_QD])
        query = norm(f"{layer}.self_attn.q_norm", heads(f"{layer}.self_attn.q_proj", own_QD))
        keys = norm(f"{layer}.self_attn.k_norm", heads(f"{layer}.self_attn.k_proj", both))
        mixed = F.scaled_dot_product_attention(
            turned(query, len(context_TD))[None],
            turned(keys, 0)[None].repeat_interleave(2, 1),
            heads(f"{layer}.self_attn.v_proj", both)[None].repeat_interleave(2, 1),
        )[0]
        x_QD = x_QD + mixed.transpose(0, 1).flatten(1) @ of[f"{layer}.self_attn.o_proj.weight"].T
        inner = norm(f"{layer}.post_attention_layernorm", x_QD)
        gate, up = (inner @ of[f"{layer}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x_QD = x_QD + (F.silu(gate) * up) @ of[f"{layer}.mlp.down_proj.weight"].T
    return norm("norm", x_QD) @ of["lm_head.weight"].T


THEIRS: dict[str, tuple[dict[str, Any], bool, bool, bool]] = {
    # config.json, corrected, a reduced vocabulary, drafts from the anchor's query
    "dspark": (speculators("dspark", anchor=True), True, False, True),
    "dspark, reduced": (speculators("dspark", anchor=True), True, True, True),
    "dspark, filling in": (speculators("dspark", anchor=False), True, False, False),
    "dspark of its authors": (PLAIN_DSPARK, True, False, True),
    "dflash": (speculators("dflash", anchor=False), False, True, False),
    "dflash of its authors": (PLAIN_DFLASH, False, False, False),
}


@pytest.mark.parametrize("name", THEIRS)
@torch.no_grad()
def test_a_block_says_what_theirs_says(
    tmp_path: Path, target: Path, decodes: Decodes, name: str
) -> None:
    said, corrected, reduced, anchor = THEIRS[name]
    tensors = block(reduced=reduced, corrected=corrected)
    source = written(tmp_path / "theirs", tensors, said)
    made = convert_heads(source, tmp_path / "ours", target=str(target))
    assert made.format == ("dspark" if corrected else "dflash")
    plain = TargetModel.from_pretrained(str(target))
    heads = load_heads(made.folder, plain).heads
    model = plain.with_features(heads.config.features)
    assert heads.config.num_heads == BLOCK - (not anchor) and heads.config.features == (0, 1)

    ids_1T = torch.arange(3, 12)[None]
    hidden_1TX = model.hidden(ids_1T)
    before_K = torch.tensor([ids_1T[0, 7], 5, 9, 20])[: heads.config.num_heads]
    got_KV = heads(heads.encode(hidden_1TX, ids_1T)[0, 6], before_K)
    embedded_VD = plain.get_input_embeddings().weight
    whole = {"lm_head.weight": plain.get_output_embeddings().weight} | tensors
    features_TX = hidden_1TX[0, :7, : 2 * D]
    theirs = their_logits(whole, features_TX, embedded_VD[before_K[0]], embedded_VD[MASK])
    theirs = theirs[-heads.config.num_heads :]
    if corrected:
        bias_KR = tensors["markov_head.markov_w1.weight"][before_K]
        theirs = theirs + bias_KR @ tensors["markov_head.markov_w2.weight"].T
    torch.testing.assert_close(got_KV, theirs, atol=1e-4, rtol=1e-4)
    decodes(made.folder, str(target))


WAYS: dict[str, tuple[WrittenFormat, dict[str, Any]]] = {
    "dspark": ("dspark", {"correction_rank": 4, "num_layers": 2}),
    "dspark, reduced": ("dspark", {"correction_rank": 4, "draft_vocab_size": FEW}),
    "dspark, own": (
        "dspark",
        {"correction_rank": 4, "draft_vocab_size": FEW, "vocab_matrix": "own"},
    ),
    "dflash": ("dflash", {}),
}


def saved(folder: Path, target: Path, *, noise: float = 0.0, **config: Any) -> Path:
    model = TargetModel.from_pretrained(str(target))
    size = config.get("draft_vocab_size")
    tokens = None if size is None else torch.arange(2, 2 + size)
    said: dict[str, Any] = {"kind": "block", "num_heads": 3, "features": [0, 1]} | config
    heads = new_heads(model, HeadsConfig(**said), tokens)
    torch.manual_seed(0)
    for weight in heads.parameters():
        weight.data += noise * torch.randn_like(weight)
    save_heads(folder, heads, model)
    return folder


@pytest.mark.parametrize("name", WAYS)
def test_what_is_written_comes_back(tmp_path: Path, target: Path, name: str) -> None:
    to, config = WAYS[name]
    folder = saved(tmp_path / "heads", target, **config)
    exported = export_heads(folder, tmp_path / "out", to, target=str(target))
    assert f'"method": "{to}"' in exported.notices[-1]
    again = convert_heads(exported.folder, tmp_path / "again", target=str(target))
    before, after = read_stored(folder), read_stored(again.folder)
    reduced = config.get("draft_vocab_size") is not None
    tensors = dict(after.tensors)
    if reduced and config.get("vocab_matrix") != "own":  # a copy of rows became an own matrix
        del tensors["lm_head.weight"]
    assert_same_bits(tensors, before.tensors)
    assert after.config.decoder == before.config.decoder
    assert ("lm_head.weight" in load_file(exported.folder / "model.safetensors")) == reduced


@torch.no_grad()
def test_transformers_drafts_with_an_assistant_what_the_heads_say(
    tmp_path: Path, target: Path
) -> None:
    assistant_class = getattr(transformers, "MuseGlimmerAssistantModel", None)
    if assistant_class is None:
        pytest.skip("this transformers has no block assistant")
    folder = saved(tmp_path / "heads", target, noise=0.2, num_layers=2, features=[0])
    exported = export_heads(folder, tmp_path / "out", "transformers", target=str(target))
    assert f"AutoModel.from_pretrained('{tmp_path}/out')" in exported.notices[-1]
    again = convert_heads(exported.folder, tmp_path / "again", target=str(target))
    before, after = read_stored(folder), read_stored(again.folder)
    assert_same_bits(after.tensors, before.tensors)
    assert after.config.decoder == before.config.decoder

    assistant, info = AutoModel.from_pretrained(exported.folder, output_loading_info=True)
    assert isinstance(assistant, assistant_class)
    assert not any(info[wrong] for wrong in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    said = list[Tensor]()
    assistant.register_forward_hook(lambda *a: said.append(a[-1].last_hidden_state[0, 1:]))
    plain = TargetModel.from_pretrained(str(target))
    model: Any = plain.model
    start_1T = torch.arange(3, 12)[None]
    asked: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    ids_1T = model.generate(start_1T, **asked)
    asked |= {"assistant_model": assistant, "speculation_type": "dflash"}
    assert torch.equal(model.generate(start_1T, **asked), ids_1T)

    heads = load_heads(folder, plain).heads
    hidden_1TX, embed = plain.with_features([0]).hidden(ids_1T), model.get_output_embeddings()
    encoded_TX, at = heads.encode(hidden_1TX, ids_1T)[0], start_1T.shape[1] - 1
    for found_KD in said:
        logits_KV = heads(encoded_TX[at], ids_1T[0, at + 1].expand(heads.config.num_heads))
        theirs_KV = embed(found_KD)
        torch.testing.assert_close(logits_KV[: len(theirs_KV)], theirs_KV, atol=1e-4, rtol=1e-4)
        drafted_K, text_K = theirs_KV.argmax(-1), ids_1T[0, at + 2 :][: len(theirs_KV)]
        at += 1 + int((drafted_K[: len(text_K)] == text_K).cumprod(0).sum())
    assert at >= ids_1T.shape[1] - 3 and len(said) > 2  # the last token alone is not drafted


@pytest.mark.parametrize(
    ("to", "config", "message"),
    [
        ("transformers", {"correction_rank": 4}, "have a correction by the token before"),
        ("transformers", {"features": None}, "train with features"),
        ("transformers", {}, r"read the target's last layer \(1\) before the final norm"),
        ("transformers", {"draft_vocab_size": FEW}, "give --full_vocabulary"),
        ("transformers", {"kind": "medusa", "features": None}, "holds no medusa heads: train kind"),
        ("dspark", {}, "have no correction by the token before: give --to dflash"),
        ("dflash", {"correction_rank": 4}, "have a correction by the token before"),
        ("dflash", {"features": None}, "train with features"),
        ("eagle3", {}, "holds no block heads: give --to dflash$"),
        ("vllm", {"correction_rank": 4}, "holds no block heads: give --to dspark$"),
        ("dflash", {"vocab_matrix": "own"}, "in place of a whole one"),
        ("dflash", {"kind": "medusa", "features": None}, "holds no medusa heads: train kind"),
        ("dspark", {"correction_rank": 4, "draft_vocab_size": FEW}, "a correction .* has no rows"),
    ],
)
def test_what_cannot_be_written_is_said(
    tmp_path: Path, target: Path, to: WrittenFormat, config: dict[str, Any], message: str
) -> None:
    folder = saved(tmp_path / "heads", target, **config)
    whole = "draft_vocab_size" in config and to != "transformers"
    with pytest.raises(ValueError, match=message):
        export_heads(folder, tmp_path / "out", to, target=str(target), full_vocabulary=whole)


@pytest.mark.parametrize(
    ("said", "tensors", "message"),
    [
        ({"sample_from_anchor": 3}, {}, "sample_from_anchor must be true or false"),
        ({"mask_token_id": None}, {}, "mask_token_id must be one of the target's"),
        ({"mask_token_id": V}, {}, "mask_token_id must be one of the target's"),
        ({"aux_hidden_state_layer_ids": None}, {}, "does not say which layers it reads"),
        (
            {"aux_hidden_state_layer_ids": [2, 1]},
            {},
            "numbers of the target's layers in ascending order",
        ),
        ({"aux_hidden_state_layer_ids": [1]}, {}, "fc.weight reads 2 layers"),
        ({"markov_head_type": "rnn"}, {}, r"a correction with a state"),
        ({"target_hidden_size": 128}, {}, "heads here are as wide as their target"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, {}, "layers with a window"),
        ({"layer_types": 3}, {}, "layers with a window"),
        ({"layer_types": [[1]]}, {}, "layers with a window"),
        ({"model_type": "muse_glimmer_assistant"}, {}, "layers with a window"),
        ({"model_type": "muse_glimmer_assistant", "layer_types": ["full_attention"]}, {}, "norm"),
        ({"transformer_layer_config": LAYERS | {"vocab_size": "9"}}, {}, "target's vocab_size"),
        ({"dflash_config": {"attention_sink_bias": True}}, {}, "attention sinks"),
        ({"dflash_config": 3}, {}, "dflash_config must be an object"),
        ({"block_size": 1000}, {}, "block_size must be an integer from 1 to 64, got 1000"),
        ({"block_size": "4"}, {}, "block_size must be an integer from 1 to 64, got '4'"),
        ({"block_size": 1, "sample_from_anchor": False}, {}, "an integer from 2 to 65, got 1"),
        ({"markov_rank": 9}, {}, "says markov_rank: 9, and the tensors say 6"),
        ({"speculators_model_type": "dflash"}, {}, "'dspark', and its config.json is of 'dflash'"),
        ({"aux_hidden_state_layer_ids": [1, 4]}, {}, "layer 3, and .* has the layers 0 to 1"),
        ({"transformer_layer_config": LAYERS | {"num_hidden_layers": 3}}, {}, "the tensors say 2"),
        ({}, {"lm_head.weight": torch.zeros(FEW, D)}, "lacks d2t, which says what 30"),
        ({}, {"fc.weight": None}, "lacks fc.weight"),
        ({}, {"layers.0.self_attn.q_proj.weight": None}, "lacks one of its layers"),
        ({}, {"layers.1.mlp.up_proj.weight": None}, "lacks layers.1.mlp.up_proj.weight"),
        ({}, {"layers.1.extra.weight": torch.zeros(2)}, "is no tensor of a block's layers"),
        ({}, {"d2t": torch.zeros(3, dtype=torch.long)}, "lacks lm_head.weight of its reduced"),
        ({}, {"markov_head.markov_w1.weight": None}, "lacks markov_head.markov_w1.weight"),
        ({}, {"markov_head.markov_w2.weight": torch.zeros(5, RANK)}, "markov_w2.weight has shape"),
        ({}, {"norm.weight": torch.full((D,), torch.nan)}, "holds NaN"),
        ({}, {"midlayer.hidden_norm.weight": torch.zeros(D)}, "heads in several layouts"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_said(
    tmp_path: Path, target: Path, said: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    stored = {name: t for name, t in (block() | tensors).items() if t is not None}
    source = written(tmp_path / "theirs", stored, speculators("dspark", anchor=True, **said))
    with pytest.raises(ValueError, match=message):
        convert_heads(source, tmp_path / "ours", target=str(target))


def test_a_mask_of_its_own_is_said(tmp_path: Path) -> None:
    source = written(tmp_path / "theirs", block(corrected=False), PLAIN_DFLASH)
    torch.save(torch.zeros(D), source / "mask_embedding.pt")
    with pytest.raises(ValueError, match="an embedding of its own for masks"):
        convert_heads(source, tmp_path / "ours")


def test_confidences_are_left_out(tmp_path: Path) -> None:
    tensors = block() | {"confidence_head.proj.weight": torch.zeros(1, D + RANK)}
    source = written(tmp_path / "theirs", tensors, speculators("dspark", anchor=True))
    made = convert_heads(source, tmp_path / "ours")
    assert any("confidence head is left out" in notice for notice in made.notices)


def test_a_block_of_an_earlier_version_is_said(tmp_path: Path, target: Path) -> None:
    folder = saved(tmp_path / "heads", target)
    sidecar = json.loads((folder / "medusa_heads.json").read_text())
    del sidecar["heads"]["decoder"]
    (folder / "medusa_heads.json").write_text(json.dumps(sidecar))
    with pytest.raises(ValueError, match="as an earlier version made them"):
        read_stored(folder)
