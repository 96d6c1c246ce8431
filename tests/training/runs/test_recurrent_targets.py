"""Heads for targets with a recurrent state: learnt, cached, measured, and decoded with."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from medusa_heads.checkpoint.checkpoint import load_heads
from medusa_heads.config import HeadsConfig
from medusa_heads.heads import MedusaHeads
from medusa_heads.inference.models.medusa import MedusaModel
from medusa_heads.inference.regeneration.regenerate import regenerate
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.training import OptimisationArguments, to_training_arguments
from medusa_heads.training.hidden.states import HiddenStates
from medusa_heads.training.measure.calibration import measure_heads
from medusa_heads.training.runs import setup
from medusa_heads.training.runs.heads import train_heads
from tests.inference.recurrent import KINDS, prompt, short_target, tiny_target, written
from tests.training.cache_runs import Runs, same
from tests.training.joint_cases import SMALL, arguments

Rows = Callable[..., Dataset]

pytestmark = pytest.mark.filterwarnings("ignore:.*verifies a chain of drafts, not a tree")


def own_target(kind: str) -> TargetModel:
    """A copy of `short_target`, which a test may change."""
    target = TargetModel(copy.deepcopy(short_target(kind).model))
    target.freeze()
    return target


def given(ids: list[int]) -> dict[str, Tensor]:
    ids_1T = torch.tensor([ids])
    return {"input_ids": ids_1T, "attention_mask": torch.ones_like(ids_1T)}


def own_text(target: TargetModel, folder: Path) -> Dataset:
    """What the target says to prompts of many lengths, greedily, in padded batches."""
    prompts = [prompt(n, seed=n)["input_ids"][0].tolist() for n in range(5, 25, 2)]
    return regenerate(
        target,
        Dataset.from_dict({"input_ids": prompts}),
        max_new_tokens=16,
        batch_size=8,
        greedy_share=1.0,
        cache_dir=folder / "texts",
        progress=False,
    )


# One for each layer that keeps a state; that texts of every kind are packed apart, test_pack says.
QUICK = ("qwen3_5_text",)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.slow]) for kind in KINDS],
)
def test_heads_learn_from_packed_text_of_the_target_and_decode_exactly(
    kind: str, tmp_path: Path
) -> None:
    short = kind != "nemotron_h"  # whose first two layers attend to nothing
    target, config = (short_target if short else tiny_target)(kind), HeadsConfig(num_heads=2)
    before, text = target.weights_digest(), own_text(target, tmp_path)
    for row in text.select(range(0, 10, 3)):  # padding before a prompt does not change its answer
        ids = row["input_ids"][: row["labels"].count(-100)]
        assert row["input_ids"] == written(target.model, given(ids), max_new_tokens=16)[0].tolist()
    args = OptimisationArguments(
        output_dir=str(tmp_path),
        max_steps=16,
        eval_steps=16,
        per_device_train_batch_size=4,
        learning_rate=2e-2,
        training_args={"use_cpu": True, "disable_tqdm": True},
    )
    train_heads(
        target,
        text,
        eval_dataset=text,
        config=config,
        output_dir=tmp_path / "run",
        training_args=to_training_arguments(args, "shared"),
        packing=True,
        max_length=96,
    )
    assert target.weights_digest() == before
    loaded = load_heads(tmp_path / "run", target)
    fresh, _ = measure_heads(MedusaHeads.from_target(target, config), HiddenStates(target), text)
    assert loaded.statistics is not None
    assert loaded.statistics.top_k_accuracy(1)[0] > fresh.top_k_accuracy(1)[0] + 0.1
    model = MedusaModel(target, loaded.heads, statistics=loaded.statistics, tree=2)
    inputs = given(text[0]["input_ids"][:5])
    got = written(model, inputs, max_new_tokens=16)
    assert torch.equal(got, written(target.model, inputs, max_new_tokens=16))
    assert model.last_stats.tokens_per_step > 1.2


@pytest.mark.parametrize("kind", ["qwen3_5_text", pytest.param("lfm2", marks=pytest.mark.slow)])
def test_a_run_from_the_cache_is_bitwise_the_run_without(
    kind: str, texts: tuple[Dataset, Dataset], tmp_path: Path
) -> None:
    runs = Runs(own_target(kind), texts, tmp_path)
    expected = runs("off")
    assert same(runs("auto"), expected) and runs.forwards > 0
    assert same(runs("read"), expected) and runs.forwards < 4  # the checks alone run the target


@pytest.mark.parametrize(
    "kind", ["granitemoehybrid", pytest.param("qwen3_5_text", marks=pytest.mark.slow)]
)
def test_joint_training_reaches_recurrent_layers_and_decodes_exactly(
    kind: str, make_rows: Rows, tmp_path: Path
) -> None:
    target = own_target(kind)
    target.model.save_pretrained(tmp_path / "target")
    target.model.config._name_or_path = str(tmp_path / "target")
    before = target.weights_digest()
    train_heads(
        target,
        make_rows(24),
        eval_dataset=make_rows(6, seed=7),
        config=HeadsConfig(num_heads=2),
        output_dir=tmp_path / "run",
        training_args=arguments(tmp_path, max_steps=12, eval_steps=6),
        joint=replace(SMALL, kl_weight=0.0),
        packing=True,
        max_length=64,
    )
    assert target.weights_digest() == before
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["eval_target_loss"] < metrics["eval_target_loss_before"]
    model = MedusaModel.from_pretrained(tmp_path / "run", tree=2, dtype="float32")
    learnt = [
        name
        for name, weight in model.target.model.named_parameters()
        if ".lora_B." in name and weight.abs().max() > 0
    ]
    assert any("linear_attn" in name or "mamba" in name for name in learnt)
    inputs: Any = given(list(range(3, 20)))
    got = written(model, inputs, max_new_tokens=24)
    assert torch.equal(got, written(model.target.model, inputs, max_new_tokens=24))


def test_processes_that_share_a_target_do_not_pack_for_it(
    make_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "is_sharded", lambda target: True)
    with pytest.raises(ValueError, match="leave packing, or what spreads it"):
        train_heads(
            tiny_target("lfm2"),
            make_rows(8),
            output_dir=tmp_path,
            training_args=arguments(tmp_path),
            packing=True,
            max_length=64,
        )
