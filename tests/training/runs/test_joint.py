"""Joint training: who learns when, what is measured, and which targets take an adapter."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from safetensors.torch import load_file
from transformers import TrainerCallback

from medusa_heads.checkpoint.adapter import save_adapter
from medusa_heads.config import HeadsConfig
from medusa_heads.inference.models.medusa import MedusaModel
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.cache import CacheArguments
from medusa_heads.training.arguments.target import TargetArguments
from medusa_heads.training.data.columns import collate
from medusa_heads.training.runs.heads import train_heads
from medusa_heads.training.runs.heads_trainer import HeadsTrainer
from medusa_heads.training.runs.joint import JointTrainer, adapted
from scripts.prove.tiny_models import builder
from tests.pairs import alternately
from tests.training.joint_cases import SMALL, Rows, arguments, disturb, fresh


def test_heads_learn_alone_first_then_both_at_their_own_rates(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    heads = fresh(target)
    args = arguments(tmp_path, save_total_limit=None, lr_scheduler_type="constant")
    config = replace(SMALL, learning_rate=None)
    with adapted(target, config) as model:
        trainer = JointTrainer(heads, target, model, args, make_rows(8), config=config)
        trainer.train()
        assert trainer.lr_scheduler is not None
        assert trainer.lr_scheduler.get_last_lr() == [2e-2, 5e-3]
    states = [load_file(tmp_path / f"checkpoint-{n}" / "model.safetensors") for n in (2, 4)]
    for n, state in zip((2, 4), states, strict=True):
        of_adapter = [t for name, t in state.items() if "/lora_B/" in name]
        assert of_adapter and all(t.abs().max() > 0 for t in of_adapter) == (n == 4)
        assert all(t.eq(0).all() for t in of_adapter) == (n == 2)
        assert state["heads.0.0.linear.weight"].abs().max() > 0
    # Heads and adapter, and nothing of the target.
    names = {f"heads.{name}" for name in heads.state_dict()}
    assert {name for name in states[0] if "/lora_" not in name} == names
    assert target.weights_digest() == TargetModel(target.model).weights_digest(with_adapter=False)


@pytest.mark.parametrize("rate", [None, 1e-3])
def test_norms_and_biases_do_not_decay(
    rate: float | None, target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    heads = fresh(target, kind="eagle3")
    args = arguments(tmp_path, weight_decay=0.1, learning_rate=rate)
    with adapted(target, SMALL) as model:
        trainer = JointTrainer(heads, target, model, args, make_rows(8), config=SMALL)
        groups = trainer.create_optimizer().param_groups
    decays = {id(part): group["weight_decay"] for group in groups for part in group["params"]}
    of_norms = [decays[id(part)] for name, part in heads.named_parameters() if "norm" in name]
    others = [decays[id(part)] for part in heads.parameters() if part.ndim == 2]
    assert set(of_norms) == {0.0} and set(others) == {0.1}


@pytest.mark.parametrize(("at", "kind"), alternately((1, 4), ("medusa", "eagle3"), slow=(4,)))
def test_a_resumed_run_ends_bitwise_where_the_uninterrupted_one_does(
    at: int, kind: str, target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    rows, config = make_rows(16), replace(SMALL, lora_dropout=0.3)
    runs = []
    for resumed in (False, True):
        heads = fresh(target, kind=kind)
        args = arguments(tmp_path / str(resumed), save_steps=at, save_total_limit=None)
        torch.manual_seed(7 + resumed)  # what the process did before must not matter
        with adapted(target, config) as model:
            trainer = JointTrainer(heads, target, model, args, rows, config=config)
            checkpoint = str(tmp_path / "False" / f"checkpoint-{at}") if resumed else None
            trainer.train(resume_from_checkpoint=checkpoint)
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            state = {name: t.clone() for name, t in trainer.joint.state_dict().items()}
        runs.append((losses, state))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(tensor, runs[1][1][name]) for name, tensor in runs[0][1].items())


def test_a_resumed_run_goes_on_at_the_rates_it_is_given_now(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    """The heads, and the adapter at its own."""

    def run(folder: str, rate: float, resume: str | None = None) -> list[float]:
        heads, config = fresh(target), replace(SMALL, learning_rate=rate / 2)
        args = arguments(tmp_path / folder, learning_rate=rate, lr_scheduler_type="linear")
        args.save_total_limit = None
        with adapted(target, config) as model:
            rows = make_rows(16)
            trainer: Any = JointTrainer(heads, target, model, args, rows, config=config)
            rates: list[float] = []
            record: Any = TrainerCallback()
            record.on_pre_optimizer_step = lambda *_, **__: rates.extend(
                group["lr"] for group in trainer.optimizer.param_groups
            )
            trainer.add_callback(record)
            trainer.train(resume_from_checkpoint=resume and str(tmp_path / resume))
        return rates

    run("before", 2e-2)
    whole, again = run("now", 1e-3), run("before", 1e-3, "before/checkpoint-4")
    assert again == whole[-len(again) :] and 0 < len(again) < len(whole) and min(again) > 0


def test_evaluation_measures_the_target_itself(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    rows = Dataset.from_list([*make_rows(3, length=20), *make_rows(2, length=11, seed=3)])
    args = arguments(tmp_path, per_device_eval_batch_size=2)
    with adapted(target, SMALL) as model:
        disturb(model)
        trainer = JointTrainer(fresh(target), target, model, args, rows, rows, config=SMALL)
        metrics = trainer.evaluate()
        batch = collate(list(rows))
        labels_N = batch["labels"][:, 1:].flatten()
        log_q = target.model(batch["input_ids"]).logits[:, :-1].flatten(0, 1).log_softmax(-1)
        with model.disable_adapter():
            log_p = target.model(batch["input_ids"]).logits[:, :-1].flatten(0, 1).log_softmax(-1)
    kl_N = (log_p.exp() * (log_p - log_q)).sum(-1)
    expected = {
        "target_loss": F.nll_loss(log_q, labels_N),
        "target_loss_before": F.nll_loss(log_p, labels_N),
        "target_kl": kl_N[labels_N != -100].mean(),
    }
    for name, value in expected.items():
        assert metrics[f"eval_{name}"] == pytest.approx(value.item(), rel=1e-5)
    assert metrics["eval_target_kl"] > 0.001 and metrics["eval_tokens_per_step_16"] >= 1


def test_a_target_that_cannot_take_an_adapter(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    for modules, sentence in (
        (("lm_head",), "share with the target"),
        (("embed_tokens", "q_proj"), "share with the target"),
        (("no_such",), "takes no adapter at"),
    ):
        with (
            pytest.raises(ValueError, match=sentence),
            adapted(target, replace(SMALL, target_modules=modules)),
        ):
            pass
    assert not any(".lora_" in name for name, _ in target.model.named_parameters())
    with pytest.raises(ValueError, match="leave hidden_cache off"):
        train_heads(
            target,
            make_rows(8),
            output_dir=tmp_path,
            training_args=arguments(tmp_path),
            hidden_cache=CacheArguments(hidden_cache="auto"),
            joint=SMALL,
        )
    with (
        adapted(target, SMALL),
        pytest.raises(ValueError, match="merge that first"),
        adapted(target, SMALL),
    ):
        pass


def test_a_run_that_is_refused_late_has_overwritten_nothing(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"config": HeadsConfig(num_heads=1), "output_dir": tmp_path / "run"}
    given["training_args"] = arguments(tmp_path, max_steps=2)
    train_heads(target, make_rows(8), **given)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    given["overwrite_output_dir"] = True
    for refused, sentence in (
        ({"hidden_cache": CacheArguments("read", str(tmp_path))}, "holds no hidden states"),
        ({"joint": replace(SMALL, target_modules=("no_such",))}, "takes no adapter at"),
    ):
        with pytest.raises(ValueError, match=sentence):
            train_heads(target, make_rows(8), **given, **refused)
        after = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
        assert after == before


def test_an_adapter_that_could_not_be_saved_is_refused_before_it_learns(tmp_path: Path) -> None:
    """peft puts matrices into the parameters of experts, which are no modules."""
    target = TargetModel(builder("mixtral")((0.15, 0.15)))
    with (
        pytest.raises(ValueError, match=r"experts.*of these \['k_proj', 'o_proj', 'q_proj', 'v_"),
        adapted(target, SMALL),
    ):
        pass
    assert not any(".lora_" in name for name, _ in target.model.named_parameters())
    with adapted(target, replace(SMALL, target_modules=["q_proj", "v_proj"])) as model:
        save_adapter(tmp_path, model, None, torch.float32)


def test_joint_training_on_a_target_in_4_bits(tiny_llama: Any, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    folder = tmp_path / "target"
    tiny_llama().save_pretrained(folder)  # wide enough for the kernels of bitsandbytes
    placement = TargetArguments(str(folder), load_in_4bit=True).placement(torch.device("cpu"))
    target = TargetModel.from_pretrained(str(folder), **placement)
    assert type(target.model.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    rows = [[(7 * i + 5 * t) % 199 for t in range(20)] for i in range(30)]
    dataset = Dataset.from_list([{"input_ids": row, "labels": row} for row in rows])
    digest = target.weights_digest()
    train_heads(
        target,
        dataset.select(range(24)),
        eval_dataset=dataset.select(range(24, 30)),
        config=HeadsConfig(num_heads=3),
        output_dir=tmp_path / "run",
        training_args=arguments(tmp_path, max_steps=12, eval_steps=6),
        joint=replace(SMALL, kl_weight=0.0),
    )
    assert target.weights_digest() == digest
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["eval_target_loss"] < 0.99 * metrics["eval_target_loss_before"]

    model = MedusaModel.from_pretrained(tmp_path / "run", tree=8, **placement)
    got: Any = model.generate(torch.tensor([[3, 8, 13]]), max_new_tokens=8)
    assert got.shape == (1, 11)
    target.hidden(torch.tensor([[3, 8, 13]]))
    packed = target.model.model.layers[0].mlp.up_proj.weight.quant_state
    if getattr(packed, "packing_format_for_cpu", False):
        with pytest.raises(ValueError, match="load it anew"), adapted(target, SMALL):
            pass


def test_an_optimiser_that_groups_parameters_itself_gives_all_one_rate(
    target: TargetModel, make_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As GaLore does: enough for plain heads, too little for parts with rates of their own."""

    def made(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        if model is None:
            raise ValueError("You need to pass a model")
        options = {"lr": args.learning_rate, "params": [{"params": [*model.parameters()]}]}
        return torch.optim.SGD, options

    monkeypatch.setattr(HeadsTrainer, "get_optimizer_cls_and_kwargs", staticmethod(made))
    args = arguments(tmp_path, learning_rate=None)

    def optimiser(**parts: Any) -> Any:
        return HeadsTrainer(fresh(target, **parts), target, args, make_rows(4)).create_optimizer()

    assert len(optimiser().param_groups) == 1
    with pytest.raises(ValueError, match="adamw_torch_fused gives all parts one rate: give a lear"):
        optimiser(prefix_attention=True)
    with adapted(target, SMALL) as model:
        trainer = JointTrainer(fresh(target), target, model, args, make_rows(4), config=SMALL)
        with pytest.raises(ValueError, match="one rate, and an adapter has its own: choose anoth"):
            trainer.create_optimizer()


def test_so_does_an_optimiser_that_is_given_by_its_class(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    given: Any = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.5})}
    args = arguments(tmp_path, learning_rate=None)

    def optimiser(**parts: Any) -> Any:
        trainer = HeadsTrainer(fresh(target, **parts), target, args, make_rows(4), **given)
        return trainer.create_optimizer()

    assert isinstance(optimiser(), torch.optim.SGD) and optimiser().param_groups[0]["lr"] == 0.5
    with pytest.raises(ValueError, match="optimizer_cls_and_kwargs gives all parts one rate: giv"):
        optimiser(prefix_attention=True)
    with adapted(target, SMALL) as model:
        sets = (make_rows(4),)
        trainer = JointTrainer(fresh(target), target, model, args, *sets, config=SMALL, **given)
        with pytest.raises(ValueError, match="one rate, and an adapter has its own: choose anoth"):
            trainer.create_optimizer()
