"""The model card: metadata that the hub reads, figures from the reports, and how to load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model

from medusa_heads import HeadsConfig, TargetModel
from medusa_heads.checkpoint import files
from medusa_heads.checkpoint.adapter import quiet_peft
from medusa_heads.checkpoint.checkpoint import save_heads
from medusa_heads.checkpoint.stored_heads import read_stored
from medusa_heads.decoder_shape import BlockShape
from medusa_heads.heads import frequent_tokens, new_heads
from medusa_heads.hub.card import MARK
from medusa_heads.hub.push import prepare_push
from medusa_heads.inference.bench.report import JSON_FILE as BENCHMARK_JSON
from medusa_heads.inference.bench.report import PNG_FILE as BENCHMARK_PNG
from medusa_heads.interop import WrittenFormat
from medusa_heads.interop.fits import check_fits
from medusa_heads.training.measure.report import (
    JSON_FILE,
    MARKDOWN_FILE,
    REPORT_VERSION,
    write_report,
)
from tests.conftest import TinyLlama
from tests.training.measure.test_report import by_hand

BLOCK = BlockShape(2, 2, 8, 48, mask_token_id=3)


@pytest.fixture(autouse=True)
def pictures() -> None:
    """Of reports: they are pushed, too."""


def card_of(checkpoint: Path, **options: Any) -> str:
    content = prepare_push(checkpoint, "alice/heads", **options).files["README.md"]
    assert isinstance(content, bytes)
    return content.decode()


def benchmark_of(target: TargetModel) -> dict[str, Any]:
    def method(name: str, speedup: float) -> dict[str, Any]:
        return {
            "name": name,
            "tokens_per_second": 100 * speedup,
            "speedup": speedup,
            "tokens_per_step": 2.5,
            "identical": 1.0,
        }

    return {
        "target": "/home/alice/target",
        "checkpoint": "/home/alice/run",
        "target_fingerprint": target.fingerprint(),
        "machine": {"cpu": "Abacus", "cores": 2, "torch": "2.13", "transformers": "5.23"},
        "settings": [
            {
                "name": "greedy",
                "dtype": "bfloat16",
                "prompts": 20,
                "new_tokens": 128,
                "methods": [method("transformers generate", 1.0), method("medusa heads", 1.75)],
            }
        ],
    }


def test_metadata(checkpoint: Path) -> None:
    data = ModelCard(card_of(checkpoint, license="apache-2.0")).data.to_dict()
    assert data == {
        "base_model": "alice/target",
        "base_model_relation": "adapter",
        "library_name": "medusa-heads",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["medusa-heads", "medusa", "speculative-decoding", "custom_generate"],
    }
    assert "license" not in ModelCard(card_of(checkpoint)).data.to_dict()


def test_figures_of_both_reports(checkpoint: Path, target: TargetModel, tmp_path: Path) -> None:
    card = card_of(checkpoint)
    assert "How fast" not in card
    assert "| 0 | 2 | 0.500 | 0.750 | 1.000 |" in card  # from the statistics alone
    assert "tree of 7 nodes is expected to give **3.00 tokens per step**" in card
    write_report(checkpoint, by_hand())
    measured = tmp_path / "measured"
    measured.mkdir()
    (measured / BENCHMARK_JSON).write_text(json.dumps(benchmark_of(target)))
    (measured / BENCHMARK_PNG).write_bytes(b"\x89PNG of speed")
    prepared = prepare_push(checkpoint, "alice/heads", benchmark=measured)
    card = card_of(checkpoint, benchmark=measured)
    assert "| 0 | 2 | 0.750 | 1.000 |" in card
    assert "**3.00 tokens per step** with a static tree of 5 nodes" in card
    assert "Measured on 2 cores of Abacus" in card
    assert "| bfloat16, greedy | medusa heads | 175.0 | 1.75 | 2.50 | 100% |" in card
    assert set(files.REPORT_FILES) <= set(prepared.files)
    assert all(f"]({name})" in card for name in files.PICTURES)
    assert b"/home" not in prepared.files["benchmark.json"]  # type: ignore[operator]


def test_training_writes_what_pushing_looks_for(tmp_path: Path) -> None:
    write_report(tmp_path, by_hand())
    assert {path.name for path in tmp_path.iterdir()} <= set(files.REPORT_FILES)
    assert (files.REPORT_FILE, REPORT_VERSION) == (JSON_FILE, 1) and MARKDOWN_FILE == "report.md"


def test_a_benchmark_written_over_the_training_report_is_told_from_it(
    checkpoint: Path, target: TargetModel
) -> None:
    (checkpoint / "report.json").write_text(json.dumps(benchmark_of(target)))
    prepared = prepare_push(checkpoint, "alice/heads")
    assert "benchmark.json" in prepared.files and "report.json" not in prepared.files
    assert "How fast" in card_of(checkpoint)


def test_reports_that_cannot_be_right_are_refused(
    checkpoint: Path, target: TargetModel, tmp_path: Path
) -> None:
    other = benchmark_of(target)
    other["target_fingerprint"] |= {"lm_head_sha256": "0" * 64}
    (tmp_path / "b.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match="measured on another target"):
        card_of(checkpoint, benchmark=tmp_path / "b.json")
    (tmp_path / "b.json").write_text(json.dumps(other | {"target_fingerprint": ["llama"]}))
    with pytest.raises(ValueError, match="expected a report of medusa-heads benchmark"):
        card_of(checkpoint, benchmark=tmp_path / "b.json")
    for text, sentence in (
        ('{"report_version": 99}', "report_version 99, expected 1"),
        ('{"report_version": 1}', "report beside the heads is damaged"),
        (json.dumps(by_hand() | {"training": 7}), "report beside the heads is damaged"),
        (json.dumps(by_hand() | {"accuracy": [{"top_k": ["x"]}]}), "beside the heads is damaged"),
        ("[]", "expected a JSON object"),
        ('{"x": ', "not valid JSON"),
    ):
        (checkpoint / "report.json").write_text(text)
        with pytest.raises(ValueError, match=sentence):
            card_of(checkpoint)
        with pytest.raises(ValueError, match=r"a report of medusa-heads|JSON"):
            card_of(checkpoint, benchmark=checkpoint / "report.json")


def test_a_card_that_someone_wrote_is_kept(checkpoint: Path) -> None:
    generated = card_of(checkpoint)
    (checkpoint / "README.md").write_text(generated)
    assert "license: mit" in card_of(checkpoint, license="mit")  # made anew
    edited = generated.replace(MARK + "\n", "")
    (checkpoint / "README.md").write_text(edited)
    assert prepare_push(checkpoint, "alice/heads").files["README.md"] == checkpoint / "README.md"
    with pytest.raises(ValueError, match="is kept as it is written, so license has no place"):
        card_of(checkpoint, license="mit")


@pytest.mark.parametrize(
    ("config", "vllm", "plugin", "tgi"),
    [
        ({"vocab_matrix": "own"}, True, True, True),
        ({"vocab_matrix": "shared"}, True, True, True),
        ({"vocab_matrix": "shared", "num_layers": 2}, True, True, False),
        ({"kind": "hydra"}, False, False, False),
        ({"draft_vocab_size": 12}, False, True, False),
        ({"prefix_attention": True}, False, False, False),
        ({"kind": "block"}, False, False, False),
        ({"correction_rank": 4}, False, True, False),
        ({"linear_shortcut": True}, False, True, False),
        ({"linear_shortcut": True, "draft_vocab_size": 12}, False, True, False),
        ({"features": [1, 0]}, False, False, False),
    ],
    ids=str,
)
def test_engines_that_cannot_hold_the_heads_are_not_promised(
    config: dict[str, Any], vllm: bool, plugin: bool, tgi: bool, target: TargetModel, tmp_path: Path
) -> None:
    shape = HeadsConfig(num_heads=2, **config)
    tokens = None
    if shape.draft_vocab_size is not None:
        tokens = frequent_tokens(torch.arange(24), shape.draft_vocab_size)
    save_heads(tmp_path, new_heads(target, shape, tokens), target)
    card = card_of(tmp_path, base_model="alice/target")
    as_it_is = shape.vocab_matrix == "own"
    found = '"method": "medusa", "model": "alice/heads"' in card
    exported = '"method": "medusa", "model": "heads-vllm"' in card
    assert (found, exported) == (vllm and as_it_is, vllm and not as_it_is)
    assert ("medusa-heads export alice/heads heads-vllm --to vllm" in card) == exported
    assert ('"method": "custom_class", "num_speculative_tokens": 2' in card) == plugin
    assert ("text-generation-launcher --model-id alice/heads" in card) == tgi
    assert ("vLLM and TGI cannot hold these heads" in card) == (not plugin)
    whole = tokens is not None and not shape.linear_shortcut
    assert ("--to tgi --full_vocabulary" in card) == whole
    assert 'custom_generate="alice/heads", trust_remote_code=True' in card
    assert 'MedusaModel.from_pretrained("alice/heads")' in card


def test_eagle3_heads_say_how_vllm_reads_them(target: TargetModel, tmp_path: Path) -> None:
    heads = new_heads(target, HeadsConfig(kind="eagle3", num_heads=2))
    card = card_of(save_heads(tmp_path, heads, target), base_model="alice/target")
    assert "medusa-heads export alice/heads heads-eagle3 --to eagle3" in card
    assert (
        '"method": "eagle3", "model": "heads-eagle3", "num_speculative_tokens": 2'
        in card.replace("\n", " ")
    )


@pytest.mark.parametrize("pinned", [None, "v1.0"])
@pytest.mark.parametrize("config", [{}, {"vocab_matrix": "own"}, {"kind": "eagle3"}], ids=str)
def test_engines_serve_the_revision_that_the_heads_know(
    target: TargetModel, tmp_path: Path, config: dict[str, Any], pinned: str | None
) -> None:
    heads = new_heads(target, HeadsConfig(num_heads=2, **config))
    base_model = "alice/target" + (f"@{pinned}" if pinned else "")
    card = card_of(save_heads(tmp_path, heads, target), base_model=base_model)
    serve = "vllm serve alice/target"
    pinning = f"{serve} --revision {pinned} --speculative-config"
    assert card.count(serve) == card.count(pinning if pinned else f"{serve} --spec") >= 1


@pytest.mark.parametrize(("rank", "method"), [(4, "dspark"), (None, "dflash")])
def test_blocks_say_how_vllm_reads_them(
    target: TargetModel, tmp_path: Path, rank: int | None, method: str
) -> None:
    config = HeadsConfig(kind="block", num_heads=2, features=[0], correction_rank=rank)
    card = card_of(
        save_heads(tmp_path, new_heads(target, config), target), base_model="alice/target"
    )
    assert f"medusa-heads export alice/heads heads-{method} --to {method}" in card


@pytest.mark.parametrize(
    ("config", "bias", "to", "why"),
    [
        (
            {"kind": "block", "features": [0], "correction_rank": 4, "vocab_matrix": "own"},
            False,
            "dspark",
            "in place of a whole one",
        ),
        (
            {"kind": "block", "features": [0], "decoder": BLOCK},
            False,
            "dflash",
            "drafts nothing from the last known token's query",
        ),
        ({"kind": "eagle3", "vocab_matrix": "own"}, True, "eagle3", "holds no bias"),
        ({"vocab_matrix": "own"}, True, "vllm", "matrices have biases"),
    ],
    ids=str,
)
def test_what_export_refuses_is_no_advice(
    target: TargetModel,
    tmp_path: Path,
    config: dict[str, Any],
    bias: bool,
    to: WrittenFormat,
    why: str,
) -> None:
    heads = new_heads(target, HeadsConfig(num_heads=2, **config))
    heads.set_vocab_bias(bias)
    folder = save_heads(tmp_path / "heads", heads, target)
    with pytest.raises(ValueError):
        check_fits(read_stored(folder), to)
    card = card_of(folder, base_model="alice/target")
    assert f"--to {to}\n" not in card and '"method": "medusa"' not in card
    assert "TGI cannot hold" in card and "text-generation-launcher" not in card
    assert why in card and ("MedusaProposer" in card) == (to == "vllm")
    assert ("matrix: one for each head" in card) == (to == "vllm")
    assert ("matrix: one for all heads" in card) == ("vocab_matrix" in config and to != "vllm")


def test_heads_of_an_adapter_say_so_and_take_it_along(
    tiny_llama: TinyLlama, tmp_path: Path
) -> None:
    model = tiny_llama(vocab_size=24)
    adapted: Any = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.get_base_model().config._name_or_path = "/home/alice/target"
    view = TargetModel(adapted)
    heads = new_heads(view, HeadsConfig(num_heads=1))
    with quiet_peft():
        save_heads(tmp_path / "run", heads, view, adapter=adapted)
    prepared = prepare_push(tmp_path / "run", "alice/heads", base_model="alice/target")
    assert {name for name in prepared.files if name.startswith("adapter/")} == {
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
    }
    config = prepared.files["adapter/adapter_config.json"]
    assert isinstance(config, bytes)
    assert json.loads(config)["base_model_name_or_path"] == "alice/target"
    card = prepared.files["README.md"]
    assert isinstance(card, bytes) and b"which would have to be merged first" in card
