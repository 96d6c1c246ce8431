"""Texts beyond the length that a target's positions are usual for."""

from __future__ import annotations

from copy import deepcopy
from inspect import getsource, signature
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)
from transformers.masking_utils import create_chunked_causal_mask

from medusa_heads import HeadsConfig, MedusaHeads, MedusaModel
from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.inference.models.training_free import TrainingFreeModel
from medusa_heads.target.positions import PositionRule, position_rule
from scripts.prove.tiny_models import random_weights
from tests.conftest import DEVICE, TinyLlama
from tests.inference.planted import PlantedDrafter

# Of all ways to attend to queries that are scaled, each is quick once.
from tests.pairs import with_slow

QUICKLY = [("sdpa", False, 1), ("eager", "capture", 1), ("sdpa", True, 3)]
LIMIT = 40  # beyond what a target is tried with
FLOOR = 48  # slots that Llama 4 scales alike: more than targets are tried with
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
SIZES: dict[str, Any] = {
    **{"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
    **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
}
TWO_RULES: dict[str, Any] = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": LIMIT},
    **{"short_factor": [1.0] * 8, "long_factor": [8.0] * 8},
}


# Where they do not say how much to read, generate() goes on with a single token of the text.
READS_AGAIN = "next_sequence_length" in getsource(Phi3ForCausalLM.prepare_inputs_for_generation)
FORGETS = pytest.mark.skipif(not READS_AGAIN, reason="this transformers forgets Phi-3's texts")
PHI3 = pytest.param("phi3", marks=FORGETS)
CHUNKED = pytest.mark.skipif(
    "block_sequence_ids" not in signature(create_chunked_causal_mask).parameters,
    reason="transformers before 5.20 makes no static cache's masks of chunks",
)


def tiny(kind: str) -> Any:
    model: Any
    if kind == "phi3":
        lengths: Any = {"max_position_embeddings": 96, "original_max_position_embeddings": LIMIT}
        model = Phi3ForCausalLM(Phi3Config(**SIZES, **lengths, rope_parameters=TWO_RULES))
    elif kind == "longrope":
        config = LlamaConfig(**SIZES, max_position_embeddings=96, rope_parameters=TWO_RULES)
        model = LlamaForCausalLM(config)
    elif kind == "dynamic":
        rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
        config = LlamaConfig(**SIZES, max_position_embeddings=LIMIT, rope_parameters=rope)
        model = LlamaForCausalLM(config)
    elif kind == "llama4":
        scales: Any = {"floor_scale": FLOOR, "attn_scale": 0.5, "no_rope_layers": [1, 0]}
        experts: Any = {"intermediate_size_mlp": 64, "num_local_experts": 2, "head_dim": 16}
        model = Llama4ForCausalLM(Llama4TextConfig(**SIZES, **scales, **experts))
    else:
        small: Any = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": LIMIT}
        small |= {"vocab_size": 97, "bos_token_id": None, "eos_token_id": None, "rotary_dim": 8}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **small))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        random_weights(model, (0.15, 0.15))
    return model.eval().to(DEVICE)


def prompt(length: int) -> Tensor:
    return torch.arange(1, length + 1, device=DEVICE)[None]


def written(model: Any, ids_BT: Tensor, **options: Any) -> Tensor:
    if hasattr(model, "model") and hasattr(model.model, "rotary_emb"):
        model(ids_BT[:, :2])  # of a text before, rules for longer ones may be left
    text_BT: Tensor = model.generate(ids_BT, **{**GREEDY, **options})
    return text_BT


def drafted(model: Any, ids_BT: Tensor, expected: Tensor, **options: Any) -> tuple[Any, float]:
    """By planted drafts; the text, and tokens a step."""
    own = {name: options.pop(name) for name in ("compile", "compile_backend") if name in options}
    free = TrainingFreeModel(model, "recycling", **{"compile": False, **own})
    rows = [row[ids_BT.shape[1] :] for row in expected.tolist()]
    free.drafter = PlantedDrafter(rows, 97, share=0.9)
    if hasattr(model, "model") and hasattr(model.model, "rotary_emb"):
        model(ids_BT[:, :2])
    text_BT = free.generate(ids_BT, **{**GREEDY, **options})
    return text_BT, free.last_stats.tokens_per_step


@pytest.mark.parametrize("kind", with_slow([PHI3, "dynamic"], ["longrope"]))
@pytest.mark.parametrize("length", with_slow([5, LIMIT, LIMIT + 1], [LIMIT - 1, LIMIT + 6]))
def test_texts_that_reach_and_cross_the_limit(kind: str, length: int) -> None:
    model, ids, new = tiny(kind), prompt(length), max(LIMIT - length, 0) + 24
    expected = written(model, ids, max_new_tokens=new)
    got, tokens_per_step = drafted(model, ids, expected, max_new_tokens=new)
    assert torch.equal(got, expected)
    assert tokens_per_step > 1.4 or kind == "dynamic"  # beyond it that is read token by token
    below = LIMIT - length
    if below > 8:
        got, tokens_per_step = drafted(model, ids, expected, max_new_tokens=below)
        assert torch.equal(got, expected[:, :LIMIT]) and tokens_per_step > 1.4


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's steps are recorded")
@pytest.mark.parametrize("kind", with_slow([PHI3, "dynamic"], ["longrope"]))
def test_with_scripts(kind: str) -> None:
    model, ids = tiny(kind), prompt(9)
    expected = written(model, ids, max_new_tokens=40)
    got, _ = drafted(model, ids, expected, max_new_tokens=40, compile="capture")
    assert torch.equal(got, expected)


@FORGETS
def test_drawn_texts_are_the_same_whatever_is_drafted() -> None:
    model, ids, texts = tiny("phi3"), prompt(9), list[Any]()
    options: dict[str, Any] = {"do_sample": True, "pad_token_id": 0, "max_new_tokens": 50}
    for drafter in ("suffix", "recycling:5"):
        torch.manual_seed(4)
        texts.append(TrainingFreeModel(model, drafter).generate(ids, **options))
    assert torch.equal(*texts)
    torch.manual_seed(4)
    expected = model.generate(ids, **options)
    torch.manual_seed(4)
    stream: Any = TrainingFreeModel(model, "suffix", rng="transformers")
    assert torch.equal(stream.generate(ids, **options), expected)


@FORGETS
def test_padding_moves_positions_and_not_slots() -> None:
    model = tiny("phi3")
    ids, mask = torch.cat([prompt(3) * 0, prompt(9)], dim=1), torch.ones(1, 12, dtype=torch.long)
    mask[:, :3] = 0
    expected = written(model, ids, attention_mask=mask, max_new_tokens=40)
    got, _ = drafted(model, ids, expected, attention_mask=mask, max_new_tokens=40)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", ["phi3", "dynamic"])
def test_batches_are_refused_by_name(kind: str) -> None:
    model, ids = tiny(kind), prompt(9).repeat(2, 1)
    free: Any = TrainingFreeModel(model, "suffix")
    expected = model.generate(ids, **GREEDY, max_new_tokens=LIMIT - 9)
    assert torch.equal(free.generate(ids, **GREEDY, max_new_tokens=LIMIT - 9), expected)
    sentence = f"texts of more than {LIMIT} tokens turn their positions in another way, for all"
    with pytest.raises(UnsupportedArchitecture, match=sentence):
        free.generate(ids, **GREEDY, max_new_tokens=LIMIT - 8)
    batch = free.running_batch(2)
    with pytest.raises(UnsupportedArchitecture, match=sentence):
        batch.add(prompt(LIMIT + 2), **GREEDY, max_new_tokens=3)
    assert not batch.rows


@pytest.mark.parametrize("kind", with_slow([PHI3, "dynamic"], ["longrope"]))
@pytest.mark.parametrize("length", with_slow([9], [LIMIT]))
def test_a_running_batch_of_one_row_crosses_the_limit(kind: str, length: int) -> None:
    model, ids = tiny(kind), prompt(length)
    batch = TrainingFreeModel(model, "recycling", compile=False).running_batch(1)
    expected = written(model, ids, max_new_tokens=40)
    model(ids[:, :2])
    row = batch.add(ids, **GREEDY, max_new_tokens=40)
    while batch.rows:
        assert not batch.step()
    assert row.tokens == expected[0, length:].tolist()


def test_batches_of_long_texts_alone() -> None:
    model, ids = tiny("longrope"), torch.stack([prompt(LIMIT + 2)[0], prompt(LIMIT + 2)[0] + 9])
    expected = written(model, ids, max_new_tokens=20)
    got, tokens_per_step = drafted(model, ids, expected, max_new_tokens=20)
    assert torch.equal(got, expected) and tokens_per_step > 1.4


@pytest.mark.parametrize("kind", with_slow(["gpt2", "gptj"], ["codegen"]))
@pytest.mark.parametrize("rows", [1, 2])
def test_drafts_end_where_a_table_of_positions_does(kind: str, rows: int) -> None:
    """The text may have been allowed to be longer, and end before."""
    model, new = tiny(kind), 7
    many = torch.cat([prompt(LIMIT - new) + row for row in range(40)])
    full = written(model, many, max_new_tokens=new + 1)
    # Of these the last token but one, which takes the last position, is no other.
    lasts = [row for row in full.tolist() if row[-2] not in row[-new - 1 : -2]]
    full = torch.tensor([row for row in lasts if row[-2] not in lasts[0][-new - 1 : -2]][:rows])
    ids, options = full[:, : LIMIT - new], dict[str, Any](max_new_tokens=60)
    options["eos_token_id"] = full[:, -2].tolist()
    expected = written(model, ids, **options)
    got, _ = drafted(model, ids, full, **options)
    assert len(ids) == rows and torch.equal(got, expected)
    model.generation_config.eos_token_id = None
    with pytest.raises((IndexError, RuntimeError)):  # as of generate(), by its version
        drafted(model, ids, full, max_new_tokens=60)


def test_what_is_known_of_models(tiny_llama: TinyLlama) -> None:
    assert position_rule(tiny_llama()) is None
    assert position_rule(tiny("phi3")) == PositionRule(LIMIT, "one", reads_again=True)
    assert position_rule(tiny("longrope")) == PositionRule(LIMIT, "one")
    assert position_rule(tiny("dynamic")) == PositionRule(LIMIT, "each")
    assert position_rule(tiny("gpt2")) == PositionRule(LIMIT, "none")


def test_a_draft_beyond_the_limit_is_no_longer_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the rule is for: without it the text is another one."""
    model, ids = tiny("longrope"), prompt(9)
    expected = written(model, ids, max_new_tokens=60)
    monkeypatch.setattr("medusa_heads.inference.engine.beginning.position_rule", lambda _: None)
    assert not torch.equal(drafted(model, ids, expected, max_new_tokens=60)[0], expected)


def test_drafts_never_look_beyond_the_context() -> None:
    """Learned positions end with the context: a tree near its end must not ask for more."""
    config = GPT2Config(
        vocab_size=24, n_embd=32, n_layer=2, n_head=2, n_positions=64, eos_token_id=None
    )
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(config).eval()
    model.generation_config.pad_token_id = 0
    heads = MedusaHeads.from_target(model, HeadsConfig(num_heads=3))
    near_end = MedusaModel(model, heads, tree="cartesian:2,2,2")
    ids = torch.randint(1, 24, (2, 50), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    for rows in (1, 2):
        inputs: Any = {"attention_mask": mask[:rows], "max_new_tokens": 14, "do_sample": False}
        got: Any = near_end.generate(ids[:rows] * mask[:rows], **inputs)
        assert torch.equal(got, model.generate(ids[:rows] * mask[:rows], **inputs))


def three_rows(length: int) -> dict[str, Tensor]:
    ids_BT = torch.randint(1, 97, (3, length), generator=torch.Generator().manual_seed(1))
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[1, :5] = mask_BT[2, :9] = 0
    return {"input_ids": (ids_BT * mask_BT).to(DEVICE), "attention_mask": mask_BT.to(DEVICE)}


@pytest.mark.parametrize(
    ("attention", "compiled", "rows"),
    [
        pytest.param(
            *each, marks=[CHUNKED] * bool(each[1]) + [pytest.mark.slow] * (each not in QUICKLY)
        )
        for each in product(("sdpa", "eager"), (False, "capture", True), (1, 3))
    ],
)
def test_queries_are_scaled_by_slots_of_the_text(attention: str, compiled: Any, rows: int) -> None:
    model = tiny("llama4")
    model.set_attn_implementation(attention)
    inputs: dict[str, Any] = three_rows(20) if rows > 1 else {"input_ids": prompt(9)}
    ids, options = inputs.pop("input_ids"), {**inputs, "max_new_tokens": 70}
    expected = written(model, ids, **options)
    backend = {"compile_backend": "eager"} if compiled is True else {}
    got, tokens_per_step = drafted(model, ids, expected, compile=compiled, **backend, **options)
    assert torch.equal(got, expected)
    assert tokens_per_step > 2
    assert torch.equal(written(model, ids, **options), expected)


def test_queries_scaled_by_the_length_of_the_cache_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the model scales them itself: of the floor as it is usual, a short text shows nothing."""
    model: Any = tiny("llama4")
    for layer in model.model.layers:
        layer.self_attn.floor_scale = 8192
    TrainingFreeModel(model, "recycling")
    monkeypatch.setattr("medusa_heads.target.target.text_slots", lambda mask: {})
    with pytest.warns(UserWarning, match="verifies a chain of drafts, not a tree: its logits"):
        TrainingFreeModel(deepcopy(model), "suffix")
    monkeypatch.setattr("medusa_heads.inference.engine.probe._SCALED_ALIKE", 8192)
    TrainingFreeModel(deepcopy(model), "recycling")  # which a long text would show to be wrong


def test_queries_of_a_dispatched_model_are_scaled_by_slots() -> None:
    """accelerate has put hooks around each forward by then."""
    accelerate: Any = pytest.importorskip("accelerate")
    model, ids = tiny("llama4"), prompt(9)
    expected = written(model, ids, max_new_tokens=60)
    accelerate.dispatch_model(model, {"": DEVICE}, force_hooks=True)
    assert torch.equal(drafted(model, ids, expected, max_new_tokens=60)[0], expected)
