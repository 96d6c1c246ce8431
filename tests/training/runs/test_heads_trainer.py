"""The Trainer around the heads: what it optimises, saves, measures and resumes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import TrainingArguments

from medusa_heads.config import HeadsConfig
from medusa_heads.heads import MedusaHeads
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.data.columns import collate
from medusa_heads.training.loss.rows import head_labels
from medusa_heads.training.runs.heads_trainer import HeadsTrainer
from tests.pairs import alternately
from tests.training.packing import packed_rows

Rows = Callable[..., Dataset]


def arguments(folder: Path, **changed: Any) -> TrainingArguments:
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "remove_unused_columns": False,
        "label_names": ["labels"],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 0,
        "data_seed": 0,
    }
    return TrainingArguments(**{**values, **changed})


def fresh(target: TargetModel, **config: Any) -> MedusaHeads:
    return MedusaHeads.from_target(target, HeadsConfig(**{"num_heads": 3, **config}))


@pytest.mark.parametrize("name", HeadsTrainer.unread)
def test_no_argument_is_dropped(name: str, target: TargetModel, tmp_path: Path) -> None:
    given: dict[str, Any] = {"train_dataset": None, name: print}
    with pytest.raises(ValueError, match=f"{name} has no place in this training"):
        HeadsTrainer(fresh(target), target, arguments(tmp_path), **given)


def test_the_loss_is_that_of_the_written_out_formula(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    heads = fresh(target)
    trainer = HeadsTrainer(
        heads, target, arguments(tmp_path), make_rows(4), objective=LossConfig(decay=0.5)
    )
    batch = collate([*make_rows(2, length=12), *make_rows(1, length=9, seed=5)])
    loss = trainer.compute_loss(trainer.model_wrapped, batch)

    hidden_BTD = target.model.model(batch["input_ids"]).last_hidden_state
    log_probs_BTKV = heads(hidden_BTD).log_softmax(-1)
    expected = 0.0
    labels = batch["labels"].tolist()
    for b, row in enumerate(labels):
        for t in range(len(row)):
            for i in range(3):
                ahead = t + 2 + i
                if ahead < len(row) and row[t + 1] != -100 and row[ahead] != -100:
                    expected -= 0.5**i * log_probs_BTKV[b, t, i, row[ahead]].item()
    generated = sum(token != -100 for row in labels for token in row)
    assert loss.item() == pytest.approx(expected / generated, rel=1e-5)


def test_gradient_accumulation_equals_one_large_batch(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    # Rows of different lengths: averaging the averages of micro-batches would give another result.
    rows = Dataset.from_list([*make_rows(4, length=8), *make_rows(4, length=30, seed=1)])
    weights, losses = [], []
    for size, accumulated in ((8, 1), (2, 4)):
        heads = fresh(target)
        args = arguments(
            tmp_path,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulated,
            max_steps=2,
            optim="sgd",
        )
        trainer = HeadsTrainer(heads, target, args, rows)
        trainer.train()
        weights.append(torch.cat([p.detach().flatten() for p in heads.parameters()]))
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-7)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_packed_rows_learn_what_the_same_rows_do_apart(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    # A step over all rows at once, and the same documents packed and accumulated.
    rows = Dataset.from_list([*make_rows(4, length=8), *make_rows(4, length=30, seed=1)])
    weights = []
    packed = packed_rows(rows, 40)
    assert len(packed) == 4
    for given, size, accumulated in ((rows, 8, 1), (packed, 4, 1), (packed, 1, 4)):
        heads = fresh(target)
        args = arguments(
            tmp_path,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulated,
            max_steps=2,
            optim="sgd",
            learning_rate=1.0,
        )
        HeadsTrainer(heads, target, args, given).train()
        weights.append(torch.cat([p.detach().flatten() for p in heads.parameters()]))
    moved = torch.cat([p.detach().flatten() for p in fresh(target).parameters()]) - weights[0]
    assert moved.abs().max() > 1e-3
    for other in weights[1:]:
        torch.testing.assert_close(weights[0], other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("vocab_matrix", ["shared", "own"])
def test_checkpoints_hold_the_heads_alone(
    vocab_matrix: str, target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    heads = fresh(target, vocab_matrix=vocab_matrix)
    args = arguments(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    HeadsTrainer(heads, target, args, make_rows(4)).train()
    saved = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    assert sorted(saved) == sorted(f"heads.{name}" for name in heads.state_dict())


def test_a_resumed_run_ends_bitwise_where_the_uninterrupted_one_does(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    rows = make_rows(16)
    runs = {}
    for name in ("whole", "resumed"):
        heads = fresh(target)
        args = arguments(tmp_path / name, save_strategy="steps", save_steps=3, max_steps=6)
        trainer = HeadsTrainer(heads, target, args, rows)
        if name == "resumed":
            torch.manual_seed(99)  # what the process did before must not matter
            trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
        else:
            trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        runs[name] = (heads.state_dict(), losses)
    assert runs["whole"][1] == runs["resumed"][1]
    for key, tensor in runs["whole"][0].items():
        assert torch.equal(tensor, runs["resumed"][0][key])


@pytest.mark.parametrize(
    ("changed", "schedule"),
    alternately(
        ({"learning_rate": 1e-4}, {"weight_decay": 0.5}, {"warmup_steps": 4}, {"max_steps": 9}),
        ("cosine", "constant"),
        slow=({"weight_decay": 0.5}, {"max_steps": 9}),
    ),
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_resumed_run_goes_on_at_the_rates_it_is_given_now(
    changed: dict[str, Any], schedule: str, target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    """Of a run that had come to its end, or had not; as one that had been given them all along."""

    def run(folder: str, resume: str | None = None, **more: Any) -> tuple[list[float], float]:
        saved: Any = {"save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": schedule}
        args = arguments(tmp_path / folder, **saved, **more)
        trainer: Any = HeadsTrainer(fresh(target), target, args, make_rows(12))
        trainer.train(resume_from_checkpoint=resume and str(tmp_path / resume))
        logged = [e["learning_rate"] for e in trainer.state.log_history if "learning_rate" in e]
        return logged, trainer.optimizer.param_groups[0]["weight_decay"]

    run("before")
    rates, decay = run("now", **changed)
    at = 6 if "max_steps" in changed else 3
    again, decays = run("before", f"before/checkpoint-{at}", **changed)
    assert again[at:] == rates[at:] and len(again) == len(rates) and decays == decay


def test_evaluation_measures_ranks_of_the_true_tokens(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    heads = fresh(target)
    rows = Dataset.from_list([*make_rows(3, length=20), *make_rows(2, length=11, seed=3)])
    args = arguments(tmp_path, per_device_eval_batch_size=2)
    trainer = HeadsTrainer(heads, target, args, make_rows(4), rows)
    prediction = trainer.predict(rows, metric_key_prefix="eval")
    batch = collate(list(rows))
    labels_BTK = head_labels(batch["labels"], 3)
    order_BTKV = heads(target.hidden(batch["input_ids"])).argsort(dim=-1, descending=True)
    ranks_BTK = (order_BTKV == labels_BTK[..., None]).int().argmax(dim=-1).clamp(max=16)
    ranks_BTK = ranks_BTK.where(labels_BTK != -100, -100)
    assert torch.equal(torch.as_tensor(prediction.predictions), ranks_BTK.to(torch.int8))
    complete = ranks_BTK[(ranks_BTK >= 0).all(-1)]
    metrics = prediction.metrics or {}
    assert metrics["eval_head2_top5"] == pytest.approx((complete[:, 2] < 5).float().mean().item())
    assert 1 <= metrics["eval_tokens_per_step_16"] <= metrics["eval_tokens_per_step_32"] <= 4


@pytest.mark.parametrize("batch", [2, 4])
def test_no_held_out_row_is_left_out_with_the_last_batch_of_training(
    batch: int, target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    more: Any = {"dataloader_drop_last": True, "per_device_eval_batch_size": batch}
    args, held_out = arguments(tmp_path, **more), make_rows(3, seed=7)
    trainer = HeadsTrainer(fresh(target), target, args, make_rows(7), held_out)
    assert len(trainer.predict(held_out, metric_key_prefix="eval").predictions) == 3
    assert trainer.evaluate()["eval_tokens_per_step_32"] >= 1
    assert len(trainer.get_train_dataloader()) == 1 and args.dataloader_drop_last


def test_evaluation_sees_what_a_fused_optimiser_has_just_written(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    heads = fresh(target)
    args = arguments(tmp_path, optim="adamw_torch_fused", eval_strategy="steps", eval_steps=2)
    trainer = HeadsTrainer(heads, target, args, make_rows(8), make_rows(4))
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(set(losses)) == 3 and losses[0] > losses[2]


def test_heads_are_not_sharded(
    target: TargetModel, make_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(tmp_path, fsdp="full_shard")
    with pytest.raises(ValueError, match="leave fsdp and deepspeed out of training_args"):
        HeadsTrainer(fresh(target), target, args, make_rows(4))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(ValueError, match="this is an FSDP launch, and the target is whole"):
        HeadsTrainer(fresh(target), target, arguments(tmp_path), make_rows(4))


def test_bf16_autocast_trains(target: TargetModel, make_rows: Rows, tmp_path: Path) -> None:
    heads = fresh(target)
    trainer = HeadsTrainer(heads, target, arguments(tmp_path, bf16=True), make_rows(8))
    trainer.train()
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in heads.parameters())
    assert trainer.state.log_history[0]["loss"] > trainer.state.log_history[5]["loss"]


def test_progress_lines_are_short_and_readable(
    target: TargetModel, make_rows: Rows, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments(tmp_path, disable_tqdm=False, max_steps=1, eval_strategy="steps", eval_steps=1)
    HeadsTrainer(fresh(target), target, args, make_rows(4), make_rows(2, seed=1)).train()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 1/1  loss ")
    assert lines[1].startswith("step 1/1  held-out top-1 0.") and "with 16 nodes" in lines[1]


@pytest.mark.parametrize("terms", [{"forward_kl": 1.0}, {"cross_entropy": 0.5, "acceptance": 0.5}])
def test_heads_learn_from_the_targets_own_distribution(
    target: TargetModel, make_rows: Rows, tmp_path: Path, terms: dict[str, float]
) -> None:
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
    trainer = HeadsTrainer(
        heads, target, arguments(tmp_path), make_rows(4), objective=LossConfig(terms)
    )
    batch = collate([make_rows(4)[i] for i in range(4)])
    loss = trainer.compute_loss(trainer.model_wrapped, batch)
    hidden_BTD = target.hidden(batch["input_ids"], batch["attention_mask"])
    p_BTV = target.model(batch["input_ids"]).logits.softmax(-1)
    q_BTKV = heads(hidden_BTD).softmax(-1)
    labels_BTK = head_labels(batch["labels"], 2)
    expected = torch.zeros(())
    for i in range(2):
        for b, t in (labels_BTK[..., i] != -100).nonzero().tolist():
            p_V, q_V = p_BTV[b, t + 1 + i], q_BTKV[b, t, i]
            values = {
                "forward_kl": (p_V * (p_V / q_V).log()).sum(),
                "cross_entropy": -q_V[labels_BTK[b, t, i]].log(),
                "acceptance": -torch.minimum(p_V, q_V).sum().log(),
            }
            expected += 0.8**i * sum(weight * values[name] for name, weight in terms.items())
    items = (batch["labels"] != -100).sum()
    torch.testing.assert_close(loss, expected / items, rtol=1e-4, atol=1e-5)


def test_the_held_out_loss_is_a_mean_over_tokens(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    rows = Dataset.from_list([*make_rows(5), *make_rows(2, length=9, prompt=6, seed=1)])
    losses = []
    for size in (1, 3, 7):
        args = arguments(tmp_path, per_device_eval_batch_size=size)
        trainer = HeadsTrainer(fresh(target), target, args, rows, rows)
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-5)
