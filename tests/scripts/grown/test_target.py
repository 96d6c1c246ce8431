"""Grown targets and heads: other shapes, the same logits and the same text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from medusa_heads import HeadsConfig, MedusaModel, TargetModel
from medusa_heads.checkpoint.checkpoint import LoadedHeads, load_heads, save_heads
from medusa_heads.heads import new_heads
from medusa_heads.trees.statistics import HeadStatistics
from scripts.grown.heads import grow_heads
from scripts.grown.llama import grow_llama
from scripts.grown.shape import SHAPES, Placement, Shape
from scripts.grown.target import main
from tests.conftest import Refused, TinyLlama

IDS_BT = torch.randint(199, (2, 24), generator=torch.Generator().manual_seed(1))
ROUNDING = 2e-5  # of fp32 sums in another order, over the spread of the logits
DEMO = Path(__file__).parents[3] / "assets" / "demo-target"


def spread_out(module: torch.nn.Module, std: float = 0.15) -> None:
    """Every parameter that starts as zeros or ones gets a value of its own."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise.to(parameter.dtype), alpha=std)


def grown_shape(model: Any, **sizes: int) -> Shape:
    return Shape.of(model.config).with_sizes(sizes)


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        pytest.param({}, {"hidden_size": 112}, id="width"),
        pytest.param({}, {"intermediate_size": 200}, id="units"),
        pytest.param({}, {"num_hidden_layers": 7}, id="layers"),
        pytest.param(
            {},
            {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3},
            id="larger groups",
        ),
        pytest.param(
            {},
            {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6},
            id="keys copied to groups of 1",
        ),
        pytest.param({}, {"head_dim": 48}, id="head_dim"),
        pytest.param({}, {"hidden_size": 68, "vocab_size": 256}, id="vocabulary"),
        pytest.param(
            {"rms_norm_eps": 1e-2}, {"hidden_size": 100, "vocab_size": 211}, id="large epsilon"
        ),
        pytest.param(
            {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
            {
                "hidden_size": 160,
                "intermediate_size": 300,
                "num_hidden_layers": 3,
                "num_attention_heads": 10,
                "num_key_value_heads": 5,
                "head_dim": 32,
                "vocab_size": 400,
            },
            id="all with biases",
        ),
    ],
)
def test_logits_stay(
    tiny_llama: TinyLlama, overrides: dict[str, Any], sizes: dict[str, int]
) -> None:
    small = tiny_llama(**overrides)
    spread_out(small)
    shape = grown_shape(small, **sizes)
    grown, _ = grow_llama(small, shape, dtype=torch.float32)
    assert Shape.of(grown.config) == shape
    with torch.no_grad():
        before, after = small(IDS_BT).logits, grown(IDS_BT).logits
    assert float((after[..., :199] - before).abs().max()) < ROUNDING * float(before.std())
    assert float(after[..., 199:].max() if shape.vocab_size > 199 else -1e9) < -1e4
    # The control: what is compared depends on every real weight's place.
    with torch.no_grad():
        for name, parameter in grown.named_parameters():
            if parameter.ndim == 2 and "lm_head" not in name:
                parameter.copy_(parameter.roll(1, dims=0))
        moved = grown(IDS_BT).logits[..., :199]
    assert float((moved - before).abs().max()) > 0.1 * float(before.std())


def test_what_nothing_reads_is_noise(tiny_llama: TinyLlama) -> None:
    small = tiny_llama()
    grown, place = grow_llama(
        small, grown_shape(small, hidden_size=128, num_hidden_layers=6), dtype=torch.float32
    )
    assert place.layers == [0, 3]
    for name, parameter in grown.named_parameters():
        zeros = float((parameter == 0).float().mean())
        writes = any(part in name for part in ("embed_tokens", "o_proj", "down_proj"))
        assert (zeros > 0.4) if writes else (zeros < 0.01), name
    made_of = grown.config.grown_from
    assert made_of["hidden_size"] == 64 and made_of["num_hidden_layers"] == 2


def test_four_times_the_width_is_exact_in_bfloat16(tiny_llama: TinyLlama) -> None:
    """The norms' weights are halved: no weight is rounded, only sums are."""
    small = tiny_llama().to(torch.bfloat16)
    grown, _ = grow_llama(small, grown_shape(small, hidden_size=256), dtype=torch.bfloat16)
    assert grown.dtype == torch.bfloat16
    for name, old in small.state_dict().items():
        new = grown.state_dict()[name]
        part = new[tuple(slice(size) for size in old.shape)]
        assert torch.equal(part, old / 2 if "norm" in name else old), name


def test_presets_hold_the_demo_target() -> None:
    config = TargetModel.from_pretrained(str(DEMO)).config
    for name, shape in SHAPES.items():
        place = Placement(Shape.of(config), shape, config.rms_norm_eps)
        assert place.epsilon > 0 and len(set(place.layers)) == 6, name


@pytest.mark.parametrize(
    "config",
    [
        HeadsConfig(num_heads=2, num_layers=2),
        HeadsConfig(num_heads=2, vocab_matrix="own"),
        HeadsConfig(num_heads=2, draft_vocab_size=50),
        HeadsConfig(num_heads=2, draft_vocab_size=50, vocab_matrix="own"),
        HeadsConfig(num_heads=2, prefix_attention=True),
        HeadsConfig(kind="hydra", num_heads=3, num_layers=2),
        HeadsConfig(kind="hydra", num_heads=2, raw_embeddings=True, vocab_matrix="own"),
        HeadsConfig(kind="hydra", num_heads=2, prefix_attention=True),
    ],
    ids=lambda config: f"{config.kind}-{config.vocab_matrix}-{config.draft_vocab_size}",
)
@pytest.mark.parametrize("vocabulary", [pytest.param(199, marks=pytest.mark.slow), 256])
def test_logits_of_heads_stay(
    tiny_llama: TinyLlama, tmp_path: Path, config: HeadsConfig, vocabulary: int
) -> None:
    small = TargetModel(tiny_llama())
    tokens = None if config.draft_vocab_size is None else torch.arange(3, 103, 2)
    heads = new_heads(small, config, tokens)
    heads.set_vocab_bias(config.vocab_matrix == "own")
    spread_out(heads)
    save_heads(tmp_path, heads, small)
    loaded = load_heads(tmp_path, small)

    shape = grown_shape(small.model, hidden_size=128, vocab_size=vocabulary)
    model, place = grow_llama(small.model, shape, dtype=torch.float32)  # type: ignore[arg-type]
    target = TargetModel(model)
    grown = grow_heads(loaded, target, place, dtype=torch.float32)
    following_BTK = IDS_BT[..., None].roll(-1, dims=1).expand(-1, -1, config.num_heads)
    with torch.no_grad():
        before = heads(heads.encode(small.hidden(IDS_BT), IDS_BT), following_BTK)
        after = grown(grown.encode(target.hidden(IDS_BT), IDS_BT), following_BTK)
    real = before.shape[-1]
    assert float((after[..., :real] - before).abs().max()) < 3 * ROUNDING * float(before.std())
    if after.shape[-1] > real:
        assert float(after[..., real:].max()) < -1e4


def test_from_the_command_line(
    tiny_llama: TinyLlama, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_llama().save_pretrained(tmp_path / "small")
    small = TargetModel.from_pretrained(str(tmp_path / "small"))
    heads = new_heads(small, HeadsConfig(num_heads=2))
    statistics = HeadStatistics.from_ranks(torch.zeros(9, 2, dtype=torch.long))
    save_heads(tmp_path / "small-heads", heads, small, statistics=statistics)
    output = tmp_path / "new" / "grown"
    sizes = ["--hidden_size", "96", "--num_hidden_layers", "3", "--vocab_size", "220"]
    argv = [str(tmp_path / "small"), str(output), *sizes, "--dtype", "float32"]
    assert main([*argv, "--heads", str(tmp_path / "small-heads")]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("logits differ by") == 2 and "M parameters" in shown.out
    assert "no tokenizer lies beside the target" in shown.err
    assert sorted(path.name for path in output.iterdir()) == ["heads", "target"]

    prompt = IDS_BT[:1]
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    expected = small.model.generate(prompt, **options)  # type: ignore[operator]
    plain: Any = AutoModelForCausalLM.from_pretrained(output / "target")
    assert plain.config.grown_from["name_or_path"] == str(tmp_path / "small")
    assert torch.equal(plain.generate(prompt, **options), expected)
    before: Any = MedusaModel.from_pretrained(tmp_path / "small-heads", tree="chain")
    after: Any = MedusaModel.from_pretrained(output / "heads", tree="chain")
    assert torch.equal(before.generate(prompt, **options), expected)
    assert torch.equal(after.generate(prompt, **options), expected)
    assert after.last_stats.steps == before.last_stats.steps
    assert after.statistics.to_dict() == statistics.to_dict()
    sidecar = json.loads((output / "heads" / "medusa_heads.json").read_text())
    assert sidecar["provenance"]["grown_from"]["hidden_size"] == 64

    assert main(argv) == 2
    assert "expected no folder, or an empty one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 32}, "hidden_size would shrink from 64 to 32"),
        ({"num_hidden_layers": 1}, "num_hidden_layers would shrink"),
        ({"vocab_size": 100}, "vocab_size would shrink"),
        ({"vocab_size": 300}, "needs a channel of its own: let hidden_size grow beyond 64"),
        ({"head_dim": 24}, "head_dim must grow to a multiple of 16"),
        ({"num_attention_heads": 6}, "64 is no multiple of 6 attention heads"),
        (
            {"hidden_size": 80, "num_attention_heads": 5},
            "5 attention heads do not share 2 key-value heads evenly",
        ),
    ],
)
def test_shapes_that_do_not_hold_the_target(
    tiny_llama: TinyLlama, sizes: dict[str, int], message: str
) -> None:
    small = tiny_llama()
    with pytest.raises(ValueError, match=message):
        grow_llama(small, grown_shape(small, **sizes), dtype=torch.float32)


def test_too_few_groups(tiny_llama: TinyLlama) -> None:
    small = tiny_llama(num_attention_heads=8, num_key_value_heads=2, head_dim=8)
    shape = grown_shape(small, hidden_size=72, num_attention_heads=9, num_key_value_heads=3)
    with pytest.raises(ValueError, match="3 key-value heads of 3 query heads each do not hold 2"):
        grow_llama(small, shape, dtype=torch.float32)


def test_what_cannot_be_grown(tiny_llama: TinyLlama, tmp_path: Path, refused: Refused) -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=8, n_layer=1, n_head=2))
    gpt2.save_pretrained(tmp_path / "gpt2")
    small = tiny_llama()
    small.save_pretrained(tmp_path / "small")
    folder, out = str(tmp_path / "small"), str(tmp_path / "out")
    for argv, message in (
        ([str(tmp_path / "gpt2"), out, "--shape", "1b"], "is of type 'gpt2'"),
        ([folder, out], "nothing would grow"),
        ([folder, out, "--shape", "2b"], "invalid choice: '2b'"),
        ([folder, out, "--hidden_size", "32"], "would shrink from 64 to 32"),
        ([str(tmp_path / "none"), out, "--shape", "1b"], "expected a causal language model"),
    ):
        assert message in refused(main, argv)
    assert not (tmp_path / "out").exists()

    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    stretched = tiny_llama(rope_parameters=yarn)
    with pytest.raises(ValueError, match="'yarn' depend on head_dim: keep it at 16"):
        grow_llama(stretched, grown_shape(stretched, head_dim=32), dtype=torch.float32)
    with pytest.raises(ValueError, match="epsilon above 0"):
        flat = tiny_llama(rms_norm_eps=0.0)
        shape = grown_shape(flat, hidden_size=80, vocab_size=300)
        grow_llama(flat, shape, dtype=torch.float32)


def test_heads_that_cannot_be_grown(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    small = TargetModel(tiny_llama())
    heads = new_heads(small, HeadsConfig(num_heads=1, prefix_attention=True))
    save_heads(tmp_path, heads, small)
    loaded = load_heads(tmp_path, small)
    shape = grown_shape(small.model, hidden_size=80)
    model, place = grow_llama(small.model, shape, dtype=torch.float32)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="64 wide a head, at a hidden size of 80 it would be"):
        grow_heads(loaded, TargetModel(model), place, dtype=torch.float32)
    joint = LoadedHeads(loaded.heads, None, replace(loaded.stored, adapter={"folder": "adapter"}))
    with pytest.raises(ValueError, match="together with an adapter"):
        grow_heads(joint, TargetModel(model), place, dtype=torch.float32)
    inducing = new_heads(small, HeadsConfig(num_heads=1, induction=True))
    save_heads(tmp_path / "induction", inducing, small)
    loaded = load_heads(tmp_path / "induction", small)
    with pytest.raises(ValueError, match="grow heads without induction"):
        grow_heads(loaded, TargetModel(model), place, dtype=torch.float32)
