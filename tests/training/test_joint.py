"""Joint training: the loss as written out, who learns when, what is saved, and that heads and
adapter come back together."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    TrainingArguments,
)

from medusa_heads.adapter import adapter_digest
from medusa_heads.checkpoint import load_heads
from medusa_heads.config import HeadsConfig
from medusa_heads.heads import MedusaHeads
from medusa_heads.inference.model import MedusaModel
from medusa_heads.stored_heads import read_sidecar
from medusa_heads.target import TargetModel
from medusa_heads.training.arguments import (
    OptimisationArguments,
    TargetArguments,
    to_training_arguments,
)
from medusa_heads.training.cache_arguments import CacheArguments
from medusa_heads.training.data import collate
from medusa_heads.training.joint import JointTrainer
from medusa_heads.training.joint_arguments import JointArguments
from medusa_heads.training.joint_config import JointConfig
from medusa_heads.training.joint_objective import JointObjective, adapted
from medusa_heads.training.loss_config import LossConfig
from medusa_heads.training.own_loss import own_losses, own_rows
from medusa_heads.training.rows import supervised_rows
from medusa_heads.training.teacher import Teacher
from medusa_heads.training.train import train_heads

Rows = Callable[..., Dataset]
SMALL = JointConfig(lora_r=4, lora_alpha=8, warmup_steps=2, learning_rate=5e-3)


def arguments(folder: Path, **changed: Any) -> TrainingArguments:
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": 6,
        "learning_rate": 2e-2,
        "logging_steps": 1,
        "save_steps": 2,
        "load_best_model_at_end": False,
        "training_args": {"use_cpu": True, "disable_tqdm": True, "eval_strategy": "no"},
    }
    return to_training_arguments(OptimisationArguments(**{**values, **changed}), "shared")


def fresh(target: TargetModel) -> MedusaHeads:
    return MedusaHeads.from_target(target, HeadsConfig(num_heads=3))


def disturb(model: PeftModel) -> None:
    """An adapter that has learnt something: fresh ones are zero."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def text(make_rows: Rows) -> dict[str, Tensor]:
    return collate([*make_rows(2, length=12), *make_rows(1, length=9, seed=5)])


def written_out(
    heads: MedusaHeads, target: TargetModel, model: PeftModel, batch: dict[str, Tensor]
) -> Tensor:
    """The loss with weights 0.7, 0.4 and 0.3 from whole logits, summed over all tokens."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad(), model.disable_adapter():
        p_BTV = target.model(**inputs).logits.softmax(-1)
    with target.capture_hidden() as hidden:
        log_q_BTV = target.model(**inputs).logits.log_softmax(-1)
        heads_BTKV = heads(hidden()).log_softmax(-1)
    loss = torch.zeros(())
    labels = batch["labels"].tolist()
    for b, row in enumerate(labels):
        for t in range(len(row) - 1):
            if row[t + 1] == -100:
                continue
            p_V, log_q_V = p_BTV[b, t], log_q_BTV[b, t]
            loss = loss - 0.7 * log_q_V[row[t + 1]] + 0.4 * (p_V * (p_V.log() - log_q_V)).sum()
            for i in range(3):
                if t + 2 + i < len(row) and row[t + 2 + i] != -100:
                    loss = loss - 0.3 * 0.5**i * heads_BTKV[b, t, i, row[t + 2 + i]]
    return loss


def test_loss_and_gradients_are_those_of_the_written_out_formula(
    target: TargetModel, make_rows: Rows
) -> None:
    heads, batch = fresh(target), text(make_rows)
    config = replace(SMALL, lm_weight=0.7, kl_weight=0.4, heads_weight=0.3)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    with adapted(target, config) as model:
        disturb(model)
        joint = JointObjective(heads, target, model, config, LossConfig(decay=0.5))
        rows = supervised_rows(batch["input_ids"], batch["labels"], 3)
        learning = list(joint.parameters())
        loss = joint(batch, rows, 7)
        gradients = torch.autograd.grad(loss, learning)
        expected = written_out(heads, target, model, batch) / 7
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        for got, wanted in zip(gradients, torch.autograd.grad(expected, learning), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-6)

        # Without the target's own part there still is a gradient in the adapter: the heads' one.
        reading = joint.read(batch, before=False)
        heads_alone = joint.loss(reading, torch.zeros(1), batch, rows, 7)
        through = torch.autograd.grad(heads_alone, list(joint.adapter.parameters()))
        assert all(gradient.abs().max() > 0 for gradient in through)
        in_warm_up = joint(batch, rows, 7, heads_alone=True)
        assert in_warm_up.item() == pytest.approx(heads_alone.item(), rel=1e-6)
        none = torch.autograd.grad(in_warm_up, list(joint.adapter.parameters()), allow_unused=True)
        assert none == (None,) * len(none)


def tiny(kind: str) -> TargetModel:
    shape: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    torch.manual_seed(0)
    if kind == "capped":
        gemma = Gemma2Config(**shape, final_logit_softcapping=2.0)
        model: Any = Gemma2ForCausalLM(gemma)
    else:
        model = GraniteForCausalLM(GraniteConfig(**shape, logits_scaling=0.25))
    with torch.no_grad():
        model.get_output_embeddings().weight.copy_(torch.randn(61, 16))
    return TargetModel(model.eval())


@pytest.mark.parametrize("kind", ["capped", "scaled"])
def test_own_loss_follows_what_the_target_does_behind_its_lm_head(
    kind: str, make_rows: Rows
) -> None:
    target, batch = tiny(kind), text(make_rows)
    with target.capture_hidden() as last:
        logits_BTV = target.model(batch["input_ids"]).logits
        hidden_BTD = last()
    before_BTD = hidden_BTD.detach() + 0.3
    before_V = F.log_softmax(_logits(target, before_BTD), dim=-1)
    labels_N = batch["labels"][:, 1:].flatten()
    plain = F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_N, reduction="sum")
    kl_BT = F.kl_div(logits_BTV.log_softmax(-1), before_V, log_target=True, reduction="none").sum(
        -1
    )
    plain = plain + 0.5 * kl_BT[:, :-1].flatten()[labels_N != -100].sum()
    objective = LossConfig({"cross_entropy": 1.0, "forward_kl": 0.5})
    rows = own_rows(batch["labels"])
    got_N, _ = own_losses(Teacher.from_target(target), hidden_BTD, rows, objective, before_BTD)
    torch.testing.assert_close(got_N.sum(), plain, rtol=1e-5, atol=1e-5)
    got, wanted = (
        torch.autograd.grad(x, hidden_BTD, retain_graph=True)[0] for x in (got_N.sum(), plain)
    )
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-5)


def _logits(target: TargetModel, hidden_BTD: Tensor) -> Tensor:
    head = Teacher.from_target(target)
    return head.shaped(hidden_BTD @ head.weight_WD.T).detach()


def test_own_rows_do_not_cross_documents() -> None:
    labels_BT = torch.tensor([[-100, -100, 5, 6, -100, 7, 8, 9]])
    positions_BT = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1]])
    assert own_rows(labels_BT).positions_N.tolist() == [1, 2, 4, 5, 6]
    rows = own_rows(labels_BT, positions_BT)
    assert (rows.positions_N.tolist(), rows.labels_N.tolist()) == ([1, 2, 4, 6], [5, 6, 7, 9])


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


@pytest.mark.parametrize("at", [1, 4], ids=["in the warm-up", "behind it"])
def test_a_resumed_run_ends_bitwise_where_the_uninterrupted_one_does(
    at: int, target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    rows, config = make_rows(16), replace(SMALL, lora_dropout=0.3)
    runs = []
    for resumed in (False, True):
        heads = fresh(target)
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


def test_dropped_activations_are_made_anew_with_the_same_gradients(
    target: TargetModel, make_rows: Rows
) -> None:
    batch, heads = text(make_rows), fresh(target)
    rows = supervised_rows(batch["input_ids"], batch["labels"], 3)
    gradients = []
    with adapted(target, SMALL) as model:
        disturb(model)
        joint = JointObjective(heads, target, model, SMALL, LossConfig()).train()
        kept: list[int] = []
        for dropping in (False, True):
            if dropping:
                joint.activation_checkpointing_enable()
            count = 0

            def keep(tensor: Tensor) -> Tensor:
                nonlocal count
                count += 1
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = joint(batch, rows, 7)
            kept.append(count)
            gradients.append(torch.autograd.grad(loss, list(joint.parameters())))
    assert kept[1] < kept[0] / 2
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


@pytest.fixture
def target_folder(target: TargetModel, tmp_path: Path) -> Path:
    target.model.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def trained(target_folder: Path, make_rows: Rows, tmp_path: Path) -> Path:
    """A folder with heads and adapter, as train_heads leaves it."""
    target = TargetModel.from_pretrained(str(target_folder))
    digest = target.weights_digest()
    train_heads(
        target,
        make_rows(24),
        eval_dataset=make_rows(6, seed=9),
        config=HeadsConfig(num_heads=3),
        output_dir=tmp_path / "run",
        training_args=arguments(tmp_path, max_steps=12),
        joint=SMALL,
    )
    assert target.weights_digest() == digest
    assert not any(".lora_" in name for name, _ in target.model.named_parameters())
    return tmp_path / "run"


def test_heads_and_adapter_come_back_in_one_call(
    trained: Path, target_folder: Path, make_rows: Rows
) -> None:
    assert {p.name for p in (trained / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    sidecar = read_sidecar(trained)
    assert sidecar["adapter"]["folder"] == "adapter"
    assert sidecar["provenance"]["joint"]["lora_r"] == 4
    metrics = json.loads((trained / "metrics.json").read_text())
    assert metrics["eval_target_kl"] > 0

    prompt = torch.tensor([make_rows(1, length=10, seed=2)["input_ids"][0]])
    base: Any = TargetModel.from_pretrained(str(target_folder)).model
    plain = base.generate(prompt, max_new_tokens=30, do_sample=False)
    tuned: Any = PeftModel.from_pretrained(base, str(trained / "adapter"))
    expected = tuned.generate(input_ids=prompt, max_new_tokens=30, do_sample=False)
    assert not torch.equal(plain, expected)  # else nothing below would be shown
    for merge in (False, True):
        model = MedusaModel.from_pretrained(trained, merge_adapter=merge, tree=8)
        got: Any = model.generate(prompt, max_new_tokens=30, do_sample=False)
        assert torch.equal(got, expected)
        carries = any(".lora_" in name for name, _ in model.target.model.named_parameters())
        assert carries == (not merge)
    in_memory = MedusaModel.from_pretrained(trained, target=tuned, tree=8)
    got = in_memory.generate(prompt, max_new_tokens=30, do_sample=False)
    assert torch.equal(got, expected)
    # The digest is of the adapter, not of the dtype it is loaded in.
    rounded = MedusaModel.from_pretrained(trained, dtype=torch.bfloat16)
    assert adapter_digest(rounded.target.model) == sidecar["adapter"]["sha256"]


def test_heads_are_refused_without_their_adapter(trained: Path, target_folder: Path) -> None:
    bare = TargetModel.from_pretrained(str(target_folder))
    with pytest.raises(ValueError, match="this target carries no adapter: apply"):
        load_heads(trained, bare)
    with pytest.raises(ValueError, match="this target carries no adapter: apply"):
        MedusaModel.from_pretrained(trained, target=bare)
    other = get_peft_model(bare.model, LoraConfig(r=4, target_modules="all-linear"))
    with pytest.raises(ValueError, match="this target carries another adapter"):
        MedusaModel.from_pretrained(trained, target=other)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="there is none: leave it out"):
        tuned = PeftModel.from_pretrained(
            TargetModel.from_pretrained(str(target_folder)).model, str(trained / "adapter")
        )
        MedusaModel.from_pretrained(trained, target=tuned, merge_adapter=True)  # type: ignore[arg-type]
    (trained / "adapter" / "adapter_model.safetensors").write_bytes(b"broken")
    with pytest.raises(ValueError, match="cannot be applied"):
        MedusaModel.from_pretrained(trained)
    shutil.rmtree(trained / "adapter")
    with pytest.raises(ValueError, match="copy the whole checkpoint folder"):
        MedusaModel.from_pretrained(trained)


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


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"lora_r": 8}, "lora_r plays a part in joint training only: add --joint"),
        ({"joint": True, "lora_r": 0}, "lora_r must be at least 1"),
        ({"joint": True, "lora_dropout": 1.0}, "lora_dropout must lie in"),
        ({"joint": True, "joint_warmup_steps": 2.5}, "a whole number of steps, or a share"),
        ({"joint": True, "lora_learning_rate": 0.0}, "learning_rate of joint training"),
        ({"joint": True, "joint_kl_weight": -1.0}, "kl_weight must be at least 0"),
        ({"joint": True, "joint_lm_weight": 0.0, "joint_kl_weight": 0.0}, "nothing would preserve"),
        ({"joint": True, "lora_target_modules": []}, "at least one module"),
    ],
)
def test_flags_out_of_range(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        JointArguments(**given)


def test_flags_make_a_config() -> None:
    assert JointArguments().config() is None
    assert JointArguments(joint=True).config() == JointConfig()
    given = JointArguments(joint=True, lora_target_modules=["q_proj"], joint_warmup_steps=0.1)
    assert given.config() == JointConfig(target_modules=("q_proj",), warmup_steps=0.1)
    assert (JointConfig().warmup(11), JointConfig(warmup_steps=4).warmup(11)) == (3, 4)


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
