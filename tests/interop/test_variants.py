"""What published checkpoints of decoder layers say in other ways, or leave out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from medusa_heads import TargetModel
from medusa_heads.checkpoint.stored_heads import read_stored
from medusa_heads.interop import WrittenFormat
from medusa_heads.interop.convert import convert_heads
from medusa_heads.interop.export import export_heads
from tests.conftest import TinyLlama
from tests.interop.layers import (
    FEW,
    HEADS,
    MASK,
    PLAIN_DFLASH,
    PLAIN_DSPARK,
    WIDTH,
    block,
    eagle3,
    eagle3_config,
    written,
)
from tests.interop.layouts import D, V, assert_same_bits
from tests.interop.test_eagle3 import our_logits, their_logits

NESTED = {"mask_token_id": MASK, "target_layer_ids": [0, 1]}
IDS_1T = torch.randint(V, (1, 12), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_norms_may_be_said_in_eagle_config(tmp_path: Path, target: Path) -> None:
    """NVIDIA's files say there that what is fused is normalised before, all side by side."""
    tensors = eagle3(2)
    tensors["input_norm.weight"] = torch.linspace(0.5, 1.5, 2 * D)
    said = eagle3_config(eagle_config={"norm_before_fc": True, "use_aux_hidden_state": True})
    made = convert_heads(written(tmp_path / "t", tensors, said), tmp_path / "o", target=str(target))
    got_TC, model = our_logits(made.folder, target, IDS_1T)
    features_TX = model.hidden(IDS_1T)[0, :, : 2 * D]
    features_TX = torch.nn.functional.rms_norm(
        features_TX, (2 * D,), tensors["input_norm.weight"], 1e-5
    )
    embedded_TD = model.get_input_embeddings()(IDS_1T[0].roll(-1))
    expected_TC = their_logits(tensors, features_TX, embedded_TD)
    torch.testing.assert_close(got_TC[:-1], expected_TC[:-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("eagle_config", [None, {"use_aux_hidden_state": True}])
def test_the_layers_that_are_usual_are_read_where_none_are_said(
    tmp_path: Path, tiny_llama: TinyLlama, eagle_config: dict[str, Any] | None
) -> None:
    """The authors' own files name none."""
    tiny_llama(num_hidden_layers=12).save_pretrained(tmp_path / "deep")
    said = eagle3_config(eagle_aux_hidden_state_layer_ids=None, eagle_config=eagle_config)
    source = written(tmp_path / "theirs", eagle3(3), said)
    made = convert_heads(source, tmp_path / "ours", target=str(tmp_path / "deep"))
    assert made.stored.config.features == (1, 5, 8)
    assert any("is usual for a target of 12 layers" in notice for notice in made.notices)
    with pytest.raises(ValueError, match="does not say which layers it reads: give the target"):
        convert_heads(source, tmp_path / "unknown")


@pytest.mark.parametrize("said", [[1, 5, 8], [2, 6, 9]], ids=str)
def test_the_usual_layers_by_what_comes_out_are_doubted(
    tmp_path: Path, tiny_llama: TinyLlama, said: list[int]
) -> None:
    """Some are copied so out of eagle_config, where that is how they are counted."""
    tiny_llama(num_hidden_layers=12).save_pretrained(tmp_path / "deep")
    config = eagle3_config(eagle_aux_hidden_state_layer_ids=said)
    source = written(tmp_path / "theirs", eagle3(3), config)
    made = convert_heads(source, tmp_path / "ours", target=str(tmp_path / "deep"))
    assert made.stored.config.features == tuple(layer - 1 for layer in said)
    doubted = [
        notice for notice in made.notices if "are the usual ones by what comes out" in notice
    ]
    assert len(doubted) == (said == [1, 5, 8])


def test_token_embeddings_of_its_own_are_refused(tmp_path: Path, target: Path) -> None:
    """They may have been trained with the layer, which then drafts badly from the target's."""
    embeddings = TargetModel.from_pretrained(str(target)).get_input_embeddings()
    copied_VD = embeddings.weight.detach().clone()
    source = written(
        tmp_path / "theirs",
        eagle3(2, "layers.0") | {"embed_tokens.weight": copied_VD.bfloat16()},
        eagle3_config(),
    )
    convert_heads(source, tmp_path / "ours", target=str(target))
    unseen = convert_heads(source, tmp_path / "unseen")
    assert any("--target would tell" in notice for notice in unseen.notices)
    trained = written(
        tmp_path / "trained",
        eagle3(2, "layers.0") | {"embed_tokens.weight": copied_VD + 0.1 * torch.randn(V, D)},
        eagle3_config(),
    )
    with pytest.raises(ValueError, match="other token embeddings than the target for 199 of 199"):
        convert_heads(trained, tmp_path / "refused", target=str(target))
    assert not (tmp_path / "refused").exists()


def test_offsets_may_be_narrow(tmp_path: Path, target: Path) -> None:
    tensors = eagle3(2)
    plain = convert_heads(
        written(tmp_path / "wide", tensors, eagle3_config()), tmp_path / "1", target=str(target)
    )
    narrow = tensors | {"d2t": tensors["d2t"].int(), "t2d": tensors["t2d"].to(torch.uint8)}
    made = convert_heads(
        written(tmp_path / "narrow", narrow, eagle3_config()), tmp_path / "2", target=str(target)
    )
    assert_same_bits(read_stored(made.folder).tensors, read_stored(plain.folder).tensors)


@torch.no_grad()
def test_the_target_s_vocabulary_matrix_is_read_where_there_is_none(
    tmp_path: Path, target: Path
) -> None:
    tensors = eagle3(2, reduced=False)
    del tensors["lm_head.weight"]
    source = written(tmp_path / "theirs", tensors, eagle3_config(draft_vocab_size=V))
    made = convert_heads(source, tmp_path / "ours", target=str(target))
    assert made.stored.config.vocab_matrix == "shared"
    got_TV, model = our_logits(made.folder, target, IDS_1T)
    tensors["lm_head.weight"] = model.get_output_embeddings().weight
    features_TX = model.hidden(IDS_1T)[0, :, : 2 * D]
    embedded_TD = model.get_input_embeddings()(IDS_1T[0].roll(-1))
    expected_TV = their_logits(tensors, features_TX, embedded_TD)
    torch.testing.assert_close(got_TV[:-1], expected_TV[:-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "said", [{"type": "mrope"}, {"rope_type": "default", "mrope_interleaved": True}], ids=str
)
def test_positions_of_images_are_those_of_text(
    tmp_path: Path, target: Path, said: dict[str, Any]
) -> None:
    """Drafters of multimodal targets say so; of text alone their three positions are one."""
    rope = said | {"mrope_section": [2, 3, 3]}
    source = written(tmp_path / "theirs", eagle3(2), eagle3_config(rope_scaling=rope))
    made = convert_heads(source, tmp_path / "ours", target=str(target))
    assert made.stored.config.decoder is not None
    assert made.stored.config.decoder.rope_parameters == {
        "rope_type": "default",
        "rope_theta": 5000.0,
    }
    assert made.stored.config.draft_vocab_size == FEW


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "a window"),
        ({"architectures": ["DSparkDraftModel"]}, "'dflash', and its config.json is of 'dspark'"),
        ({"shift_label": True}, "targets that lie a token further on"),
        ({"causal": True}, "that see only what stands before them"),
        ({"is_causal": True}, "that see only what stands before them"),
        (
            {"dflash_config": {**NESTED, "is_causal": True}},
            "that see only what stands before them",
        ),
        (
            {"dflash_config": {**NESTED, "input_embedding_scale": 62.0}},
            r"scaled embeddings \(input_embedding_scale\)",
        ),
        ({"input_embedding_scale": 0.5}, r"scaled embeddings \(input_embedding_scale\)"),
    ],
    ids=str,
)
def test_blocks_that_draft_another_way_are_refused(
    tmp_path: Path, target: Path, said: dict[str, Any], message: str
) -> None:
    """Their tensors are those of a DFlash block."""
    source = written(tmp_path / "theirs", block(corrected=False), PLAIN_DFLASH | said)
    with pytest.raises(ValueError, match=message):
        convert_heads(source, tmp_path / "ours", target=str(target))


def test_windows_that_no_layer_has_are_no_windows(tmp_path: Path, target: Path) -> None:
    said = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    source = written(tmp_path / "theirs", block(corrected=False), PLAIN_DFLASH | said)
    convert_heads(source, tmp_path / "ours", target=str(target))


@pytest.mark.parametrize("said", [{"output_multiplier": 0.1}, {"final_logit_softcapping": 30.0}])
def test_logits_are_scaled_only_where_nothing_is_added_to_them(
    tmp_path: Path, target: Path, said: dict[str, Any]
) -> None:
    source = written(tmp_path / "plain", block(corrected=False), PLAIN_DFLASH | said)
    convert_heads(source, tmp_path / "1", target=str(target))
    source = written(tmp_path / "corrected", block(), PLAIN_DSPARK | said)
    with pytest.raises(ValueError, match=rf"(scaled|capped) logits \({next(iter(said))}\)"):
        convert_heads(source, tmp_path / "2", target=str(target))


def test_embeddings_and_logits_may_be_said_to_be_as_they_are(tmp_path: Path, target: Path) -> None:
    said = {"input_embedding_scale": 1.0, "output_multiplier": 1, "final_logit_softcapping": None}
    source = written(tmp_path / "theirs", block(), PLAIN_DSPARK | said | {"is_causal": False})
    convert_heads(source, tmp_path / "ours", target=str(target))


def test_the_authors_files_may_count_the_target_s_layers(tmp_path: Path, target: Path) -> None:
    """Their code reads no number: there is one layer. Other layouts' files hold their own."""
    said = eagle3_config(num_hidden_layers=40)
    source = written(tmp_path / "authors", eagle3(2), said)
    made = convert_heads(source, tmp_path / "1", target=str(target))
    assert "says num_hidden_layers: 40, the weights hold 1: taken" in " ".join(made.notices)
    source = written(tmp_path / "speculators", eagle3(2, "layers.0"), said)
    with pytest.raises(ValueError, match="says num_hidden_layers: 40, and the tensors say 1"):
        convert_heads(source, tmp_path / "2", target=str(target))


def test_null_is_what_is_not_said(tmp_path: Path, target: Path) -> None:
    keys = ("num_key_value_heads", "attention_bias", "rms_norm_eps", "hidden_act", "model_type")
    tensors = eagle3(2)
    for name in ("k_proj", "v_proj"):
        tensors[f"midlayer.self_attn.{name}.weight"] = torch.ones(HEADS * WIDTH, 2 * D)
    unsaid = {key: value for key, value in eagle3_config().items() if key not in keys}
    null = unsaid | dict.fromkeys(keys) | {"eagle_config": {"use_aux_hidden_state": None}}
    configs = []
    for number, said in enumerate((unsaid, null)):
        source = written(tmp_path / f"theirs {number}", tensors, said)
        made = convert_heads(source, tmp_path / f"ours {number}", target=str(target))
        configs.append(made.stored.config)
    assert configs[0] == configs[1] and configs[0].decoder is not None
    assert configs[0].decoder.num_key_value_heads == HEADS


def test_the_length_of_before_may_stand_beside_the_positions(tmp_path: Path, target: Path) -> None:
    said = eagle3_config(
        rope_scaling={"type": "yarn", "factor": 4.0},
        original_max_position_embeddings=512,
        max_position_embeddings=2048,
    )
    made = convert_heads(
        written(tmp_path / "theirs", eagle3(2), said), tmp_path / "ours", target=str(target)
    )
    assert made.stored.config.decoder is not None
    rope = made.stored.config.decoder.rope_parameters
    assert rope["original_max_position_embeddings"] == 512


def test_scaled_positions_go_before_plain_ones(tmp_path: Path, target: Path) -> None:
    """As transformers and with it vLLM read what is said in an earlier and in a later way."""
    said = eagle3_config(
        rope_theta=None,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
        rope_scaling={"type": "linear", "factor": 4.0},
    )
    source = written(tmp_path / "theirs", eagle3(2), said)
    made = convert_heads(source, tmp_path / "ours", target=str(target))
    assert made.stored.config.decoder is not None
    rope = made.stored.config.decoder.rope_parameters
    assert rope == {"rope_type": "linear", "factor": 4.0, "rope_theta": 700.0}


SCALED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("to", ["eagle3", "eagle3-speculators", "dflash", "transformers"])
def test_scaled_positions_are_written_in_both_ways(
    tmp_path: Path, target: Path, to: WrittenFormat
) -> None:
    """Engines on a transformers before 5 read no rope_parameters, and would draft by others."""
    said: dict[str, Any] = {"rope_scaling": SCALED}
    if to.startswith("eagle3"):
        source = written(tmp_path / "theirs", eagle3(2), eagle3_config(**said))
    else:
        said |= {"dflash_config": NESTED | {"target_layer_ids": [0]}}
        tensors = block(corrected=False)
        tensors["fc.weight"] = tensors["fc.weight"][:, :D].contiguous()
        source = written(tmp_path / "theirs", tensors, PLAIN_DFLASH | said)
    made = convert_heads(source, tmp_path / "ours", target=str(target))
    exported = export_heads(made.folder, tmp_path / "out", to, target=str(target))
    config = json.loads((exported.folder / "config.json").read_text())
    layers = config.get("transformer_layer_config", config)
    assert layers["rope_scaling"] == SCALED and layers["rope_theta"] == 5000.0
    assert layers["rope_parameters"] == SCALED | {"rope_theta": 5000.0}
    if to == "transformers":
        if not hasattr(transformers, "MuseGlimmerAssistantModel"):
            pytest.skip("this transformers has no block assistant")
        read = transformers.AutoConfig.from_pretrained(exported.folder)
        assert read.rope_parameters == SCALED | {"rope_theta": 5000.0}
    again = convert_heads(exported.folder, tmp_path / "again", target=str(target))
    assert again.stored.config.decoder == made.stored.config.decoder
