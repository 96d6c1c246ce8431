"""The eagle3 layer: what each step reads and sees, fresh heads, and what the state dict holds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from medusa_heads.config import HeadsConfig
from medusa_heads.decoder_shape import DecoderShape
from medusa_heads.heads import Eagle3Heads, new_heads
from medusa_heads.heads.chains import Chains
from medusa_heads.heads.decoder import RotaryLayers
from medusa_heads.target.target import TargetModel
from tests.conftest import DEVICE, TinyLlama
from tests.inference.rereading import random_heads

GROUPED = DecoderShape(
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    norm_before_residual=False,
    attention_bias=True,
)
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
NORMED = replace(DecoderShape.of_width(64), norm_output=True)
SHAPES = {"usual": None, "grouped": GROUPED, "norm_output": NORMED}


def eagle3(model: Any, **config: Any) -> Eagle3Heads:
    """Heads of three steps whose every weight matters."""
    heads = random_heads(model, kind="eagle3", **config)
    assert isinstance(heads, Eagle3Heads)
    return heads


def text(batch: int = 1, length: int = 10) -> tuple[Tensor, Tensor]:
    """Hidden states and tokens."""
    generator = torch.Generator().manual_seed(5)
    ids_BT = torch.randint(199, (batch, length), generator=generator)
    return torch.randn(batch, length, 64, generator=generator), ids_BT


@pytest.mark.parametrize("vocab_matrix", ["shared", "own"])
def test_fresh_heads_rank_tokens_as_the_target_does(
    tiny_llama: TinyLlama, vocab_matrix: Any
) -> None:
    target = TargetModel(tiny_llama())
    heads = new_heads(target, HeadsConfig(kind="eagle3", num_heads=3, vocab_matrix=vocab_matrix))
    assert isinstance(heads, Eagle3Heads)
    ids_BT = torch.arange(24).view(2, 12)
    hidden_BTD = target.hidden(ids_BT)
    encoded_BTE = heads.encode(hidden_BTD, ids_BT)
    tokens_BTK = torch.zeros(2, 12, 3, dtype=torch.long)
    expected_BTV = target.model(ids_BT).logits
    logits_BTKV = heads(encoded_BTE, tokens_BTK)
    best_BTK = logits_BTKV.argmax(-1)
    assert torch.equal(best_BTK, expected_BTV.argmax(-1)[:, :, None].expand_as(best_BTK))
    heads.scale_to(hidden_BTD)
    scaled_BTV = heads(heads.encode(hidden_BTD, ids_BT), tokens_BTK)[:, :, 2]
    assert (scaled_BTV - expected_BTV).abs().mean() < 0.1 * expected_BTV.abs().mean()


@pytest.mark.parametrize("shape", SHAPES)
def test_each_step_reads_what_was_put_out_before_it(tiny_llama: TinyLlama, shape: str) -> None:
    """Every position's chain for itself, on a text that ends there."""
    heads = eagle3(tiny_llama(), decoder=SHAPES[shape])
    hidden_BTD, ids_BT = text()
    encoded_BTKD = heads.features(heads.encode(hidden_BTD, ids_BT))
    for end in (1, 4, 7):
        cache = DynamicCache()
        prefix = Chains(ids_BT[:, : end + 1], None)
        begun = prefix.following(0)[:, :end], prefix.positions_BT[:, :end]
        out_BTD = heads.read(hidden_BTD[:, :end], *begun, prefix.visible(0)[:, :end, :end], cache)
        out_B1D = out_BTD[:, -1:]
        said_BD = heads.decoder.normed(out_B1D)[:, 0]
        torch.testing.assert_close(said_BD, encoded_BTKD[:, end - 1, 0])
        for step in (1, 2):
            position_BT = torch.full((1, 1), end - 1 + step)
            sees = torch.ones(1, 1, end + step, dtype=torch.bool)
            out_B1D = heads.read(out_B1D, ids_BT[:, [end + step]], position_BT, sees, cache)
            said_BD = heads.decoder.normed(out_B1D)[:, 0]
            torch.testing.assert_close(said_BD, encoded_BTKD[:, end - 1, step])


def test_a_step_that_reads_the_texts_features_differs(tiny_llama: TinyLlama) -> None:
    """The negative control of the test before: a chain that is never given its own output."""
    heads = eagle3(tiny_llama())
    hidden_BTD, ids_BT = text()
    encoded_BTKD = heads.features(heads.encode(hidden_BTD, ids_BT))
    cache, chains = DynamicCache(), Chains(ids_BT, None)
    for step in range(3):
        read = (chains.following(step), chains.positions_BT + step, chains.visible(step), cache)
        out_BTD = heads.decoder.norm(heads.read(hidden_BTD, *read))
        differs = not torch.allclose(out_BTD[:, 2:6], encoded_BTKD[:, 2:6, step], atol=1e-3)
        assert differs == (step > 0)


def test_what_a_step_sees(tiny_llama: TinyLlama) -> None:
    heads = eagle3(tiny_llama())
    hidden_BTD, ids_BT = text()
    encoded_BTKD = heads.features(heads.encode(hidden_BTD, ids_BT))
    other_BTD = hidden_BTD.clone()
    other_BTD[0, 4] += 1.0
    differs_TK = (heads.features(heads.encode(other_BTD, ids_BT)) != encoded_BTKD).any(-1)[0]
    # A hidden state is seen from its position on, and so is a token from one before, less a step.
    assert differs_TK.tolist() == [[t >= 4] * 3 for t in range(10)]
    other_BT = ids_BT.clone()
    other_BT[0, 6] = (other_BT[0, 6] + 1) % 199
    differs_TK = (heads.features(heads.encode(hidden_BTD, other_BT)) != encoded_BTKD).any(-1)[0]
    assert differs_TK.tolist() == [[t + 1 + i >= 6 for i in range(3)] for t in range(10)]


def test_packed_documents_do_not_see_each_other(tiny_llama: TinyLlama) -> None:
    heads = eagle3(tiny_llama())
    hidden_BTD, ids_BT = text()
    position_ids_BT = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    packed_BTKD = heads.features(heads.encode(hidden_BTD, ids_BT, position_ids_BT))
    for part in (slice(0, 4), slice(4, 10)):
        alone_BTKD = heads.features(heads.encode(hidden_BTD[:, part], ids_BT[:, part]))
        for step in range(3):  # behind a document's last token none follows
            got_BTD, expected_BTD = packed_BTKD[:, part, step], alone_BTKD[:, :, step]
            torch.testing.assert_close(got_BTD[:, : -1 - step], expected_BTD[:, : -1 - step])


@pytest.mark.parametrize(("packed", "shape"), [(False, None), (True, None), (True, NORMED)])
def test_drafts_behind_places_of_a_text_are_those_of_its_chains(
    tiny_llama: TinyLlama, packed: bool, shape: DecoderShape | None
) -> None:
    heads = eagle3(tiny_llama(), vocab_matrix="own", draft_vocab_size=20, decoder=shape)
    hidden_BTD, ids_BT = text(batch=2)
    position_ids_BT = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2]] * 2) if packed else None
    places_R = torch.tensor([2, 4, 13])
    after = heads.after_text(hidden_BTD, ids_BT, position_ids_BT, places_R)
    encoded_BTE = heads.encode(hidden_BTD, ids_BT, position_ids_BT)
    tokens_RK = torch.stack([ids_BT.flatten()[places_R + i] for i in (1, 2, 3)], dim=1)
    expected_RKV = heads(encoded_BTE.flatten(0, 1)[places_R], tokens_RK)
    # The true path stands among others.
    other_RFJ = torch.randint(199, (3, 3, 3), generator=torch.Generator().manual_seed(1))
    other_RFJ[:, :, 0] = tokens_RK[:, None, 0]
    above_RF = torch.zeros(3, 1, dtype=torch.long)
    got = after(0, tokens_RK[:, None, :1], above_RF)[0][:, 0]
    torch.testing.assert_close(got, expected_RKV[:, 0])
    for head in (1, 2):
        paths_RFJ = other_RFJ[..., : head + 1].clone()
        paths_RFJ[:, head] = tokens_RK[:, : head + 1]
        above_RF = torch.tensor([[0, 0, 0], [2, 1, 1]])[head - 1].expand(3, -1)
        got = after(head, paths_RFJ, above_RF)[0][:, head]
        torch.testing.assert_close(got, expected_RKV[:, head], atol=1e-5, rtol=1e-5)


def test_state_dict_has_the_names_of_eagle3s_checkpoints(tiny_llama: TinyLlama) -> None:
    heads = eagle3(tiny_llama(), vocab_matrix="own", draft_vocab_size=20, decoder=GROUPED)
    layer = "decoder.midlayer"
    assert {name: list(tensor.shape) for name, tensor in heads.state_dict().items()} == {
        "draft_tokens": [20],
        "lm_head.weight": [20, 64],
        "decoder.norm.weight": [64],
        f"{layer}.hidden_norm.weight": [64],
        f"{layer}.input_layernorm.weight": [64],
        f"{layer}.post_attention_layernorm.weight": [64],
        f"{layer}.self_attn.q_proj.weight": [32, 128],
        f"{layer}.self_attn.q_proj.bias": [32],
        f"{layer}.self_attn.k_proj.weight": [16, 128],
        f"{layer}.self_attn.k_proj.bias": [16],
        f"{layer}.self_attn.v_proj.weight": [16, 128],
        f"{layer}.self_attn.v_proj.bias": [16],
        f"{layer}.self_attn.o_proj.weight": [64, 32],
        f"{layer}.self_attn.o_proj.bias": [64],
        f"{layer}.mlp.gate_proj.weight": [48, 64],
        f"{layer}.mlp.up_proj.weight": [48, 64],
        f"{layer}.mlp.down_proj.weight": [64, 48],
    }


@pytest.mark.parametrize("feature_norm", ["each", "all", "none"])
def test_features_are_made_one_state(tiny_llama: TinyLlama, feature_norm: Any) -> None:
    target = TargetModel(tiny_llama(num_layers=3)).with_features([0, 2])
    shape = replace(DecoderShape.of_width(64), feature_norm=feature_norm)
    config = HeadsConfig(kind="eagle3", num_heads=2, features=[0, 2], decoder=shape)
    ids_BT = torch.arange(24).view(2, 12)
    hidden_BTX = target.hidden(ids_BT)
    fresh = Eagle3Heads.from_target(target, config)
    highest_BTD = hidden_BTX[..., 64:128]
    unit_BTD = torch.nn.functional.rms_norm(highest_BTD, (64,), eps=1e-6)
    if feature_norm != "all":
        expected_BTD = highest_BTD if feature_norm == "none" else unit_BTD
        torch.testing.assert_close(fresh.fuse(hidden_BTX), expected_BTD)
    heads = eagle3(target, features=[0, 2], decoder=shape)
    other_BTX = hidden_BTX.clone()
    other_BTX[..., 128:] += 1.0  # what the lm_head reads, which these heads do not
    assert torch.equal(heads.encode(other_BTX, ids_BT), heads.encode(hidden_BTX, ids_BT))
    other_BTX[:, :, :64] += torch.randn(64)
    assert not torch.allclose(heads.encode(other_BTX, ids_BT), heads.encode(hidden_BTX, ids_BT))


def test_positions_keep_their_precision_in_bf16(tiny_llama: TinyLlama) -> None:
    heads = eagle3(tiny_llama())
    before = heads.decoder.midlayer._rotary[0].inv_freq.clone()
    heads.to(torch.bfloat16)
    after = heads.decoder.midlayer._rotary[0].inv_freq
    assert after.dtype == torch.float32 and torch.equal(before, after)


@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_positions_follow_the_weights_to_their_device(
    tiny_llama: TinyLlama, kind: Literal["eagle3", "block"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And to no other precision: what a step would have to fetch cannot be recorded."""
    heads: Any = new_heads(tiny_llama(), HeadsConfig(num_heads=2, kind=kind))
    (layers,) = (layers for layers in heads.modules() if isinstance(layers, RotaryLayers))
    moved: list[Any] = []
    monkeypatch.setattr(layers._rotary[0], "to", lambda *where: moved.append(where))
    heads.to(DEVICE, torch.bfloat16)
    assert moved == [(next(layers.parameters()).device,)]
    heads.to("meta")  # whose weights come later, and the frequencies with no file
    assert len(moved) == 1 and not layers._rotary[0].inv_freq.is_meta


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"prefix_attention": True}, "leave prefix_attention out"),
        ({"correction_rank": 4}, "leave correction_rank out"),
        ({"num_layers": 2}, "one layer, read at most 64 times: set num_layers 1"),
        ({"num_heads": 65}, "one layer, read at most 64 times"),
        ({"features": [3, 1]}, r"from the lowest layer on, got \[3, 1\]"),
        ({"kind": "hydra", "decoder": GROUPED}, "hydra heads have no decoder layer"),
    ],
)
def test_what_does_not_go_together_is_refused(config: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        HeadsConfig(**{"kind": "eagle3", **config})


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"num_attention_heads": 2.0}, "num_attention_heads must be an integer"),
        ({"num_key_value_heads": 3}, "must be a multiple of its 3 key-value heads"),
        ({"head_dim": 7}, "head_dim 7 even"),
        ({"rms_norm_eps": 2}, "rms_norm_eps must be between 0 and 1, got 2"),
        ({"feature_norm": "some"}, "feature_norm must be one of"),
        ({"attention_bias": 1}, "attention_bias must be true or false, got 1"),
        ({"norm_output": "yes"}, "norm_output must be true or false, got 'yes'"),
        ({"rope_parameters": {"rope_type": "magic"}}, "must name a rope_type among"),
        ({"rope_parameters": 3}, "must name a rope_type among"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, "rope_theta must be"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor must be a positive"),
        ({"rope_parameters": YARN | {"attention_factor": "1.0"}}, "attention_factor must be a p"),
        ({"rope_parameters": YARN | {"attention_factor": math.nan}}, "factor must be .*, got nan"),
        ({"rope_parameters": YARN | {"low_freq_factor": math.nan}}, "low_freq_factor must be a p"),
        ({"rope_parameters": YARN | {"high_freq_factor": math.inf}}, "high_freq_factor must be a"),
        ({"rope_parameters": YARN | {"high_freq_factor": -1}}, "high_freq_factor must be a positi"),
        ({"rope_parameters": YARN | {"beta_fast": True}}, "beta_fast must be a positive number"),
        ({"rope_parameters": YARN | {"mscale": -1.0}}, "mscale must be a positive number"),
        ({"rope_parameters": YARN | {"unheard_of": math.nan}}, "unheard_of must be a positive nu"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2}},
            "must have original_max_position",
        ),
        ({"colour": "red"}, r"unknown keys \['colour'\] of the decoder"),
    ],
)
def test_shapes_that_are_none(changed: dict[str, Any], expected: str) -> None:
    config = HeadsConfig(kind="eagle3", decoder=GROUPED).to_dict()
    assert HeadsConfig.from_dict(config).decoder == GROUPED
    config["decoder"] |= changed
    with pytest.raises(ValueError, match=expected):
        HeadsConfig.from_dict(config)
    with pytest.raises(ValueError, match="decoder must be an object, got 7"):
        HeadsConfig.from_dict(config | {"decoder": 7})
    config["decoder"] = {"num_attention_heads": 2}
    with pytest.raises(ValueError, match=r"lacks \['num_key_value_heads', 'head_dim'"):
        HeadsConfig.from_dict(config)


def test_numbers_of_positions_that_are_not_said() -> None:
    unsaid = {"attention_factor": None, "mscale": 0, "mscale_all_dim": 0.0, "truncate": False}
    shape = replace(GROUPED, rope_parameters=YARN | unsaid)
    assert shape.rope_parameters == YARN | unsaid


def test_a_rule_of_positions_that_lacks_something(tiny_llama: TinyLlama) -> None:
    shape = replace(GROUPED, rope_parameters={"rope_type": "linear", "rope_theta": 1e4})
    with pytest.raises(ValueError, match="say no positions"):
        eagle3(tiny_llama(), decoder=shape)
