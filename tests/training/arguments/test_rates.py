"""Default learning rates by width, and runs whose rate is too high."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset

from medusa_heads.config import HeadsConfig
from medusa_heads.heads import new_heads
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments import batch, rates
from medusa_heads.training.arguments.draft import (
    DraftArguments,
    DraftOptimisationArguments,
    draft_training_arguments,
)
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.arguments.rates import (
    PREFIX_SHARE,
    RunArguments,
    fit_rate,
    rate_shares,
)
from medusa_heads.training.arguments.training import OptimisationArguments, to_training_arguments
from medusa_heads.training.measure.fresh_heads import FreshHeads
from medusa_heads.training.runs.draft import DraftTrainer, train_draft
from medusa_heads.training.runs.heads import train_heads
from medusa_heads.training.runs.heads_trainer import HeadsTrainer
from medusa_heads.training.runs.pruned_target import begin_draft
from medusa_heads.training.runs.resumable import last_checkpoint
from medusa_heads.training.runs.trainer import TaughtTrainer
from tests.pairs import with_slow
from tests.training.joint_cases import SMALL
from tests.training.loss_cases import random_heads

Rows = Callable[..., Dataset]


def arguments(folder: Path, steps: int = 2, rate: float | None = None, **more: Any) -> RunArguments:
    given = OptimisationArguments(
        output_dir=str(folder),
        max_steps=steps,
        learning_rate=rate,
        per_device_train_batch_size=4,
        training_args={"use_cpu": True, "disable_tqdm": True},
        **more,
    )
    return to_training_arguments(given, "shared")


@pytest.mark.parametrize(("given", "rate"), [(None, 2.5e-3), (4e-3, 4e-3)])
def test_a_wide_target_gets_a_lower_rate_unless_one_is_given(
    target: TargetModel,
    make_rows: Rows,
    tmp_path: Path,
    given: float | None,
    rate: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rates, "TUNED_WIDTH", 8)  # the target is twice as wide
    monkeypatch.setattr(batch, "TUNED_LEARNT", batch.LEAST_LEARNT)  # and a step's tokens suffice
    args = arguments(tmp_path, rate=given)
    train_heads(
        target,
        make_rows(12),
        config=HeadsConfig(num_heads=1),
        output_dir=tmp_path / "run",
        training_args=args,
    )
    story = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert story["training_arguments"]["learning_rate"] == pytest.approx(rate)
    assert args.learning_rate == (given or 5e-3)  # the caller's own stay as they are


@pytest.mark.parametrize("given", [None, 4e-3])
def test_parts_that_read_more_get_a_lower_rate_unless_one_is_given(
    target: TargetModel, make_rows: Rows, tmp_path: Path, given: float | None
) -> None:
    config = HeadsConfig(
        kind="hydra",
        num_heads=2,
        num_layers=2,
        prefix_attention=True,
        correction_rank=4,
        features=[0, 1],
    )
    heads = new_heads(target, config)
    args = arguments(tmp_path, rate=given)
    trainer = HeadsTrainer(heads, target, args, make_rows(4), make_rows(2))
    found = {
        id(parameter): group["lr"]
        for group in trainer.create_optimizer().param_groups
        for parameter in group["params"]
    }
    by_name = {name: found[id(parameter)] for name, parameter in heads.named_parameters()}
    shares = {"0.0.linear.weight": 1 / 2, "1.0.res_connection.bias": 1 / 3}
    shares |= {
        "fusion.linear.weight": 1 / 2,
        "0.1.linear.weight": 1,
        "prefix.down.weight": 0.2,
        "correction.after.weight": 1,
    }
    for name, share in shares.items():
        assert by_name[name] == pytest.approx(5e-3 * share if given is None else given)


def test_the_rate_of_a_correction_does_not_fall_with_the_width() -> None:
    for width, share in ((96, 1.0), (768, 2.0)):
        heads = random_heads(1, hidden=width, correction_rank=2)
        assert rate_shares(heads)["correction.before.weight"] == share
        assert rate_shares(heads)["0.0.linear.weight"] == 1.0
        shares = rate_shares(random_heads(1, hidden=width, kind="block", correction_rank=2))
        assert shares["correction.before.weight"] == share
        assert shares["prefix.hidden_norm.weight"] == PREFIX_SHARE
        assert shares["prefix.layers.0.mlp.up_proj.weight"] == pytest.approx(PREFIX_SHARE)


def test_rates_of_an_eagle3_layer_follow_what_its_matrices_read(target: TargetModel) -> None:
    shares = rate_shares(new_heads(target, HeadsConfig(kind="eagle3", vocab_matrix="own")))
    expected = {"midlayer.self_attn.q_proj.weight": 0.1, "midlayer.self_attn.o_proj.weight": 0.2}
    expected |= {"midlayer.mlp.down_proj.weight": 0.1, "norm.weight": 0.2}
    assert {name: shares[f"decoder.{name}"] for name in expected} == expected
    assert shares["lm_head.weight"] == 1.0


def test_only_a_default_rate_of_a_built_draft_model_is_fitted(tmp_path: Path) -> None:
    for given, rate, fitted in ((False, None, 5e-4), (True, None, 1e-4), (False, 2e-3, 2e-3)):
        chosen = DraftOptimisationArguments(output_dir=str(tmp_path), learning_rate=rate)
        args = draft_training_arguments(chosen, given=given)
        fit_rate(args, 768)
        assert args.learning_rate == pytest.approx(fitted)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize("draft_vocab_size", [None, 20])
def test_fresh_heads_are_what_heads_begin_as(
    target: TargetModel, kind: Any, draft_vocab_size: int | None
) -> None:
    own = kind == "medusa"
    config = HeadsConfig(
        kind=kind,
        num_heads=2,
        vocab_matrix="own" if own else "shared",
        prefix_attention=True,
        correction_rank=4,
        features=[0],
        draft_vocab_size=draft_vocab_size,
    )
    tokens = None if draft_vocab_size is None else torch.arange(1, 41, 2)
    heads = new_heads(target, config, tokens)
    fresh = FreshHeads.like(heads, target)
    hidden_BTX, ids_BT = torch.randn(1, 5, 32), torch.randint(0, 61, (1, 5))
    tokens_BTK = torch.randint(0, 61, (1, 5, 2))
    read = heads.encode(hidden_BTX, ids_BT)
    expected_BTKV = heads(read, tokens_BTK)
    torch.testing.assert_close(fresh(fresh.fuse(hidden_BTX), tokens_BTK), expected_BTKV)
    assert not list(fresh.parameters())


def test_a_run_that_makes_heads_worse_stops_with_a_sentence(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    rows = make_rows(16)
    with pytest.raises(ValueError, match=r"worse than fresh ones: by step 30 .* rate 50 is too hi"):
        train_heads(
            target,
            rows,
            eval_dataset=rows,
            config=HeadsConfig(num_heads=2),
            output_dir=tmp_path / "run",
            training_args=arguments(tmp_path, steps=40, rate=50.0),
        )


@pytest.mark.parametrize(
    ("rate", "of_adapter", "sentence"),
    [
        (50.0, 1e-3, r"worse than fresh ones: .* or lora_learning_rate"),
        (
            *(1e-3, 1e20),  # two matrices of such weights multiply to infinity
            r"loss is not finite (in|by) step \d+: .* with a learning_rate below 0\.001 or a "
            r"lora_learning_rate below 1e\+20, or with",
        ),
    ],
    ids=["heads", "adapter"],
)
def test_a_joint_run_that_makes_heads_worse_stops_too(
    rate: float,
    of_adapter: float,
    sentence: str,
    target: TargetModel,
    make_rows: Rows,
    tmp_path: Path,
) -> None:
    rows = make_rows(16)
    with pytest.raises(ValueError, match=sentence):
        train_heads(
            target,
            rows,
            eval_dataset=rows,
            config=HeadsConfig(num_heads=2),
            output_dir=tmp_path / "run",
            training_args=arguments(tmp_path, steps=60, rate=rate),
            joint=replace(SMALL, learning_rate=of_adapter),
        )


def draft_arguments(folder: Path, steps: int = 40, rate: float | None = None) -> RunArguments:
    chosen = DraftOptimisationArguments(
        output_dir=str(folder),
        max_steps=steps,
        learning_rate=rate,
        per_device_train_batch_size=4,
        training_args={"use_cpu": True, "disable_tqdm": True},
    )
    return draft_training_arguments(chosen, given=False)


@pytest.mark.parametrize(
    ("rate", "divergence"),
    [(5.0, "forward_kl"), pytest.param(None, "cross_entropy", marks=pytest.mark.slow)],
)
def test_a_run_that_makes_a_draft_model_worse_stops_with_a_sentence(
    rate: float | None, divergence: Any, target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    rows = make_rows(16)
    sentence = r"the draft model worse than it was: by step 30 .* rate 5 is too high"
    with pytest.raises(ValueError, match=sentence) if rate else nullcontext():
        train_draft(
            target,
            rows,
            eval_dataset=rows,
            draft=DraftArguments(divergence=divergence),
            output_dir=tmp_path,
            training_args=draft_arguments(tmp_path, rate=rate),
        )


def test_a_resumed_run_knows_what_its_draft_model_began_as(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    beginnings: list[torch.Tensor | None] = []
    for steps in (2, 4):
        trainer = DraftTrainer(
            begin_draft(target, num_layers=1),
            target,
            draft_arguments(tmp_path, steps),
            make_rows(16),
            make_rows(4),
            objective=LossConfig({"forward_kl": 1.0}),
        )
        checkpoint = last_checkpoint(tmp_path)
        assert (checkpoint is not None) == (steps == 4)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        beginnings.append(trainer.beginning)
    first, again = beginnings
    assert first is not None and again is not None and torch.equal(first, again)


@pytest.mark.parametrize("parts", with_slow([{}], [{"prefix_attention": True}]), ids=str)
def test_checkpoints_from_before_parts_had_rates_of_their_own(
    parts: dict[str, Any],
    target: TargetModel,
    make_rows: Rows,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where all parts have one rate they go on, bit for bit; else a sentence refuses them."""

    def go(folder: str, resume: str | None = None) -> dict[str, Any]:
        each = {"save_steps": 3, "save_total_limit": None, "load_best_model_at_end": False}
        return train_heads(
            target,
            make_rows(24),
            eval_dataset=make_rows(4),
            config=HeadsConfig(num_heads=2, **parts),
            output_dir=tmp_path / folder,
            training_args=arguments(tmp_path, steps=6, **each),
            resume_from_checkpoint=resume,
        ).state_dict()

    with monkeypatch.context() as earlier:
        earlier.setattr(HeadsTrainer, "create_optimizer", TaughtTrainer.create_optimizer)
        whole = go("whole")
    last = str(tmp_path / "whole" / "checkpoint-3")
    if parts:
        with pytest.raises(ValueError, match="cannot be resumed: its parts had other learning ra"):
            go("resumed", last)
    else:
        resumed = go("resumed", last)
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)
