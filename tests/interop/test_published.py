"""Drafters as training projects and hubs store them, built by hand: what their own code would say,
ours says, and they come back from an export as they were; what heads here are not is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from medusa_heads import TargetModel
from medusa_heads.checkpoint.checkpoint import load_heads
from medusa_heads.checkpoint.stored_heads import read_stored
from medusa_heads.interop import WrittenFormat
from medusa_heads.interop import eagle3 as eagle3_layout
from medusa_heads.interop.convert import Converted, convert_heads
from medusa_heads.interop.export import export_heads
from tests.conftest import TinyLlama
from tests.interop import test_block
from tests.interop.conftest import Decodes
from tests.interop.layers import (
    BLOCK,
    FEW,
    LAYERS,
    MASK,
    PLAIN_DFLASH,
    RANK,
    Tensors,
    block,
    eagle3,
    eagle3_config,
    written,
)
from tests.interop.layouts import D, V, assert_same_bits
from tests.interop.test_eagle3 import our_logits, their_logits
from tests.interop.test_refusals import refused

IDS_1T = torch.randint(V, (1, 12), generator=torch.Generator().manual_seed(1))
IDS = "eagle_aux_hidden_state_layer_ids"


def without(tensors: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in tensors.items() if name not in names}


def nested(**said: Any) -> dict[str, Any]:
    return without(eagle3_config(eagle_config=said), IDS)


def converted(
    folder: Path, tensors: Tensors, said: Mapping[str, Any], target: Path | None
) -> Converted:
    source = written(folder / "theirs", tensors, said)
    return convert_heads(source, folder / "ours", target=None if target is None else str(target))


def comes_back(made: Converted, folder: Path, to: WrittenFormat, target: Path) -> None:
    exported = export_heads(made.folder, folder / "out", to, target=str(target))
    again = convert_heads(exported.folder, folder / "again", target=str(target))
    before, after = read_stored(made.folder), read_stored(again.folder)
    assert_same_bits(after.tensors, before.tensors)
    assert after.config.decoder == before.config.decoder
    assert after.config.features == before.config.features


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory, tiny_llama: TinyLlama) -> Path:
    """A target of 12 layers."""
    folder = tmp_path_factory.mktemp("targets") / "deep"
    tiny_llama(num_hidden_layers=12).save_pretrained(folder)
    return folder


@torch.no_grad()
def states_of(target: Path, into: list[int]) -> Tensor:
    """What goes into a target's layers along IDS_1T, side by side; 12: what comes out of the last,
    before the norm behind it."""
    model = AutoModelForCausalLM.from_pretrained(target)
    seen: dict[int, Tensor] = {}
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda _, args, i=i: seen.update({i: args[0][0]}))
        layer.register_forward_hook(lambda _, args, out, i=i: seen.update({i + 1: out[0]}))
    model(IDS_1T)
    return torch.cat([seen[i] for i in into], dim=-1)


# In eagle_config, for a target of 12 layers; what goes into which is meant; what is said of that.
COUNTED: dict[str, tuple[list[int], list[int], str]] = {
    "by outputs": ([1, 5, 8], [2, 6, 9], "whose outputs are read"),
    "as Python lists a set": ([8, 1, 5], [2, 6, 9], "whose outputs are read"),  # ModelOpt's
    "the usual ones, by inputs": ([2, 6, 9], [2, 6, 9], "counted by what comes out, say one more"),
    "behind the last layer": ([8, 10, 12], [8, 10, 12], "whose inputs are read"),
    "others": ([3, 6, 8], [4, 7, 9], "counted by what goes in, say them too beside"),
}


@pytest.mark.parametrize("name", COUNTED)
@torch.no_grad()
def test_eagle_config_counts_layers_in_two_ways(
    tmp_path: Path, deep: Path, decodes: Decodes, name: str
) -> None:
    """One too many, and the layer reads states that it never saw; the text stays right."""
    said, into, notice = COUNTED[name]
    tensors = eagle3(3)
    made = converted(tmp_path, tensors, nested(**{IDS: said}), deep)
    assert sum(notice in each for each in made.notices) == 1
    got_TC, model = our_logits(made.folder, deep, IDS_1T)
    embedded_TD = model.get_input_embeddings()(IDS_1T[0].roll(-1))
    expected_TC = their_logits(tensors, states_of(deep, into), embedded_TD)
    torch.testing.assert_close(got_TC[:-1], expected_TC[:-1], atol=1e-4, rtol=1e-4)
    decodes(made.folder, str(deep))
    comes_back(made, tmp_path, "eagle3", deep)


def in_another_order() -> tuple[Tensors, dict[str, Any]]:
    """ModelOpt lists the tokens by how often they occur."""
    tensors, order = eagle3(2), torch.randperm(FEW, generator=torch.Generator().manual_seed(3))
    tokens = (tensors["d2t"] + torch.arange(FEW))[order]
    tensors |= {
        "d2t": tokens - torch.arange(FEW),
        "lm_head.weight": tensors["lm_head.weight"][order],
    }
    return without(tensors, "t2d"), eagle3_config()


def behind_a_prefix() -> tuple[Tensors, dict[str, Any]]:
    """NeMo's, and others' that are written as a model of transformers with an lm_head."""
    beside = ("lm_head.weight", "d2t", "t2d")
    tensors = eagle3(2, "layers.0").items()
    return {n if n in beside else f"model.{n}": t for n, t in tensors}, eagle3_config()


def of_all_tokens() -> tuple[Tensors, dict[str, Any]]:
    """SpecForge's buffers where nothing was left out of the vocabulary."""
    every = {"d2t": torch.zeros(V, dtype=torch.long), "t2d": torch.ones(V, dtype=torch.bool)}
    return eagle3(2, reduced=False) | every, eagle3_config(draft_vocab_size=V)


def with_norms() -> tuple[Tensors, dict[str, Any]]:
    norms = {f"fc_norm.{i}.weight": torch.linspace(0.5, 1.5 + i, D) for i in range(2)}
    return eagle3(2) | norms, eagle3_config()


EAGLES = {
    "in another order": in_another_order(),
    "behind a prefix": behind_a_prefix(),
    "of all tokens": of_all_tokens(),
    "norms of which nothing is said": with_norms(),
    "a target of phi3": (eagle3(2), eagle3_config(model_type="phi3")),  # SpecForge's
    "a target of qwen2": (eagle3(2), eagle3_config(model_type="qwen2")),
    "fc that nothing reads": (eagle3(2), nested(use_aux_hidden_state=False)),
}


@pytest.mark.parametrize("name", EAGLES)
@torch.no_grad()
def test_a_layer_says_what_theirs_says(
    tmp_path: Path, target: Path, decodes: Decodes, name: str
) -> None:
    stored, said = EAGLES[name]
    made = converted(tmp_path, stored, said, target)
    got_TC, model = our_logits(made.folder, target, IDS_1T)
    tensors = {n.removeprefix("model.").replace("layers.0", "midlayer"): stored[n] for n in stored}
    hidden_TX = model.hidden(IDS_1T)[0]
    features_TX = hidden_TX[:, : 2 * D]
    if name == "fc that nothing reads":
        tensors, features_TX = without(tensors, "fc.weight"), hidden_TX
    if "fc_norm.0.weight" in tensors:
        parts = zip(features_TX.chunk(2, -1), ("fc_norm.0.weight", "fc_norm.1.weight"), strict=True)
        features_TX = torch.cat([F.rms_norm(x, (D,), tensors[n], 1e-5) for x, n in parts], -1)
    embedded_TD = model.get_input_embeddings()(IDS_1T[0].roll(-1))
    theirs_TC = their_logits(tensors, features_TX, embedded_TD)
    of_tokens_TV = torch.zeros(len(theirs_TC), V)
    of_tokens_TV[:, tensors["d2t"] + torch.arange(theirs_TC.shape[1])] = theirs_TC
    tokens_C = read_stored(made.folder).tensors["draft_tokens"]
    torch.testing.assert_close(got_TC[:-1], of_tokens_TV[:-1, tokens_C], atol=1e-4, rtol=1e-4)
    decodes(made.folder)
    comes_back(made, tmp_path, "eagle3", target)


MODELOPT = {
    **LAYERS,
    "architectures": ["DFlashDraftModel"],
    "block_size": BLOCK,
    "dflash_config": {
        "mask_token_id": MASK,
        "target_layer_ids": [0, 1],
        "projector_type": "dspark",
        "shift_label": True,  # which of DSpark is always so
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "use_confidence_head": True,
    },
}


@pytest.mark.parametrize("place", ["", "logit_head.markov_head.", "model."])
@torch.no_grad()
def test_a_correction_under_other_names(
    tmp_path: Path, target: Path, decodes: Decodes, place: str
) -> None:
    """ModelOpt's and early SpecForge's."""
    tensors = block()
    prefix, place = ("model.", "") if place == "model." else ("", place)
    stored = {prefix + name.replace("markov_head.", place): tensors[name] for name in tensors}
    stored[f"{prefix}confidence_proj.weight"] = torch.zeros(1, D + RANK)
    made = converted(tmp_path, stored, MODELOPT, target)
    assert made.format == "dspark" and any("confidence head" in each for each in made.notices)
    plain = TargetModel.from_pretrained(str(target))
    heads = load_heads(made.folder, plain).heads
    assert heads.config.num_heads == BLOCK
    hidden_1TX = plain.with_features((0, 1)).hidden(IDS_1T)
    before_K = torch.tensor([IDS_1T[0, 7], 5, 9, 20])
    got_KV = heads(heads.encode(hidden_1TX, IDS_1T)[0, 6], before_K)
    embedded_VD = plain.get_input_embeddings().weight
    whole = {"lm_head.weight": plain.get_output_embeddings().weight} | tensors
    anchor_D, mask_D = embedded_VD[before_K[0]], embedded_VD[MASK]
    theirs_KV = test_block.their_logits(whole, hidden_1TX[0, :7, : 2 * D], anchor_D, mask_D)
    bias_KR = tensors["markov_head.markov_w1.weight"][before_K]
    theirs_KV = theirs_KV + bias_KR @ tensors["markov_head.markov_w2.weight"].T
    torch.testing.assert_close(got_KV, theirs_KV, atol=1e-4, rtol=1e-4)
    decodes(made.folder, str(target))
    comes_back(made, tmp_path, "dspark", target)


@pytest.mark.parametrize("layers", [1, 2])
def test_the_layers_that_a_block_reads_where_none_are_said(
    tmp_path: Path, deep: Path, decodes: Decodes, layers: int
) -> None:
    """By its authors' code as many of the target's layers as the block has, from 1 to the third
    last."""
    tensors = block(corrected=False, layers=layers)
    tensors["fc.weight"] = tensors["fc.weight"][:, : layers * D].contiguous()
    said = without(PLAIN_DFLASH, "dflash_config") | {
        "num_hidden_layers": layers,
        "num_target_layers": 12,
        "dflash_config": {"mask_token_id": MASK},
    }
    made = converted(tmp_path, tensors, said, deep)
    assert made.stored.config.features == ((6,) if layers == 1 else (1, 9))
    assert any("which layers it reads is not said" in each for each in made.notices)
    decodes(made.folder, str(deep))
    comes_back(made, tmp_path, "dflash", deep)


def test_a_vocabulary_matrix_that_is_the_embeddings(tmp_path: Path, tiny_llama: TinyLlama) -> None:
    tensors = without(eagle3(2, reduced=False), "lm_head.weight")
    said = eagle3_config(tie_word_embeddings=True, draft_vocab_size=V)
    for tied in (True, False):
        folder = tmp_path / f"tied {tied}"
        tiny_llama(tie_word_embeddings=tied).save_pretrained(folder)
        source = written(tmp_path / "theirs", tensors, said)
        if tied:
            convert_heads(source, tmp_path / "ours", target=str(folder))
        else:
            message = refused(source, tmp_path, target=str(folder))
            assert "the target's lm_head is none (tie_word_embeddings)" in message


def test_norms_under_earlier_names(tmp_path: Path, deep: Path) -> None:
    """SGLang's of three features, which `use_aux_norm` or `fc_norm` tell of."""
    norms = {f"fc_norm.{i}.weight": torch.linspace(0.5, 1.5 + i, D) for i in range(3)}
    theirs = ("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight")
    said = nested(**{IDS: [1, 5, 8]}) | {"use_aux_norm": True}
    earlier = dict(zip(theirs, norms.values(), strict=True))
    made = converted(tmp_path / "1", eagle3(3) | earlier, said, deep)
    plain = converted(tmp_path / "2", eagle3(3) | norms, said | {"fc_norm": True}, deep)
    assert made.stored.config == plain.stored.config
    assert_same_bits(read_stored(made.folder).tensors, read_stored(plain.folder).tensors)


# Of a target's kind and features: what stands in eagle_config, and what is said of SGLang.
AS_SGLANG_READS: list[tuple[str, list[int], list[int], str | None]] = [
    ("llama", [1, 5, 8], [1, 5, 8], None),
    ("llama", [0, 5, 8], [0, 5, 8], None),
    ("gpt_oss", [7, 9, 11], [7, 9, 11], None),
    ("deepseek_v3", [1, 5, 8], [1, 5, 8], None),
    ("deepseek_v3", [3, 5, 8], [4, 6, 9], None),
    ("deepseek_v3", [0, 5, 8], [0, 5, 8], "no output of layer 0"),
    ("llama", [5], [5], "leaves out fc.weight of a single feature"),
]


@pytest.mark.parametrize(("kind", "features", "said", "amiss"), AS_SGLANG_READS, ids=str)
def test_layers_are_counted_as_sglang_counts_them(
    tmp_path: Path, kind: str, features: list[int], said: list[int], amiss: str | None
) -> None:
    tensors = eagle3(len(features))
    made = converted(tmp_path, tensors, eagle3_config(**{IDS: [n + 1 for n in features]}), None)
    stored = replace(made.stored, target={**made.stored.target, "model_type": kind})
    _, config = eagle3_layout.written(stored, None)
    assert config["eagle_config"][IDS] == said and config[IDS] == [n + 1 for n in features]
    why = eagle3_layout.misread_by_sglang(stored)
    assert why is None if amiss is None else why is not None and amiss in why
