"""The Trainer of draft models: what it optimises, measures, writes itself and resumes."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM, TrainingArguments

from medusa_heads.config import IGNORED
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.draft import (
    DraftArguments,
    DraftOptimisationArguments,
    draft_training_arguments,
)
from medusa_heads.training.arguments.loss_config import TERMS, LossConfig
from medusa_heads.training.data.columns import collate
from medusa_heads.training.data.own_text import OwnText
from medusa_heads.training.measure.metrics import draft_metrics
from medusa_heads.training.runs.draft import DraftTrainer, train_draft
from medusa_heads.training.runs.pruned_target import begin_draft
from tests.pairs import with_slow

Rows = Callable[..., Dataset]


def arguments(folder: Path, **changed: Any) -> TrainingArguments:
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "eval_steps": 3,
        "save_steps": 3,
        "save_total_limit": None,
        "training_args": {"use_cpu": True, "disable_tqdm": True},
    }
    return draft_training_arguments(
        DraftOptimisationArguments(**{**values, **changed}), given=False
    )


def trainer_of(
    target: TargetModel, rows: Dataset, folder: Path, share: float = 0.0, **terms: float
) -> DraftTrainer:
    torch.manual_seed(0)
    draft = begin_draft(target, num_layers=1)
    own_text = None
    if share:
        own_text = OwnText(
            TargetModel(draft), rows, share=share, refresh=4, batches_a_step=1, batch_size=4
        )
    return DraftTrainer(
        draft,
        target,
        arguments(folder),
        rows,
        rows,
        objective=LossConfig(terms or {"forward_kl": 1.0}),
        own_text=own_text,
    )


@pytest.mark.parametrize("term", [term for term in TERMS if term != "acceptance"])
def test_loss_and_gradients_are_those_of_the_written_out_formula(
    term: str, target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    trainer = trainer_of(target, make_rows(4), tmp_path, **{term: 1.0})
    draft: Any = trainer.draft.model
    batch = collate([*make_rows(2, length=12), *make_rows(1, length=9, seed=5)])
    loss = trainer.compute_loss(draft, dict(batch))
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in draft.named_parameters()}

    draft.zero_grad()
    read = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    log_q = draft(**read).logits[:, :-1].log_softmax(-1)
    log_p = target.model(**read).logits[:, :-1].log_softmax(-1)
    next_BT = batch["labels"][:, 1:]
    known = next_BT != IGNORED
    log_m = ((log_p.exp() + log_q.exp()) / 2).log()
    of_p, of_q = log_p.exp() * (log_p - log_m), log_q.exp() * (log_q - log_m)
    terms = {
        "jensen_shannon": (of_p + of_q).sum(-1) / 2,
        "forward_kl": (log_p.exp() * (log_p - log_q)).sum(-1),
        "reverse_kl": (log_q.exp() * (log_q - log_p)).sum(-1),
        "total_variation": (log_p.exp() - log_q.exp()).abs().sum(-1) / 2,
        "cross_entropy": -log_q.gather(2, next_BT.clamp(min=0)[..., None])[..., 0],
    }
    expected = terms[term][known].sum() / (batch["labels"] != IGNORED).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for name, parameter in draft.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_the_drafts_own_text_teaches_no_tokens(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    trainer = trainer_of(target, make_rows(4), tmp_path, cross_entropy=0.5, forward_kl=0.5)
    half = trainer_of(target, make_rows(4), tmp_path, forward_kl=0.5)
    batch = collate(make_rows(3))
    own = trainer.compute_loss(trainer.draft.model, {**batch, "own_text": torch.tensor(True)})
    assert torch.equal(own, half.compute_loss(half.draft.model, dict(batch)))


def test_figures_of_an_evaluation(target: TargetModel, make_rows: Rows, tmp_path: Path) -> None:
    rows = make_rows(3, length=20)
    trainer = trainer_of(target, rows, tmp_path)
    metrics = trainer.evaluate()
    ids_BT = torch.tensor(rows["input_ids"])
    q = trainer.draft.model(ids_BT).logits.softmax(-1)[:, 3:-1]
    p = target.model(ids_BT).logits.softmax(-1)[:, 3:-1]
    assert metrics["eval_acceptance"] == pytest.approx(torch.minimum(p, q).sum(-1).mean().item())
    agreement = (p.argmax(-1) == q.argmax(-1)).float().mean().item()
    assert metrics["eval_agreement"] == pytest.approx(agreement)


def test_tokens_per_step_are_those_of_a_chain_that_is_walked() -> None:
    generator = torch.Generator().manual_seed(0)
    hits = (torch.rand(400, generator=generator) < 0.7).float()
    figures = torch.stack([torch.full((400,), 0.5), hits, hits], dim=1)[None]
    metrics = draft_metrics(figures)
    # 8 windows wide, as long as the longest chain can be drafted.
    for length in (1, 4, 8):
        t = steps = tokens = 0
        while t <= 400 - 8:
            accepted = 0
            while accepted < length and hits[t + accepted]:
                accepted += 1
            steps, tokens, t = steps + 1, tokens + accepted + 1, t + accepted + 1
        assert metrics[f"tokens_per_step_{length}"] == pytest.approx(tokens / steps)


def test_a_draft_of_all_layers_is_accepted_whole(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    rows = make_rows(3)
    trainer = DraftTrainer(
        begin_draft(target, num_layers=2),
        target,
        arguments(tmp_path),
        rows,
        rows,
        objective=LossConfig({"forward_kl": 1.0}),
    )
    metrics = trainer.evaluate()
    assert metrics["eval_acceptance"] == pytest.approx(1) and metrics["eval_agreement"] == 1
    assert metrics["eval_loss"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("share", with_slow([0.5], [0.0]))
def test_a_resumed_run_ends_bitwise_where_the_uninterrupted_one_does(
    share: float, target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    """Also where the checkpoint lies amidst text that the draft model wrote before."""
    rows = make_rows(16)
    weights = []
    for name in ("whole", "resumed"):
        trainer = trainer_of(target, rows, tmp_path / name, share)
        if name == "resumed":
            torch.manual_seed(99)  # what the process did before must not matter
            random.seed(99)
            trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
        else:
            trainer.args.load_best_model_at_end = False
            trainer.train()
        trainer.args.load_best_model_at_end = False
        weights.append({k: v.clone() for k, v in trainer.draft.model.state_dict().items()})
    for key, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][key])


def test_a_run_goes_on_in_more_processes_than_have_kept_own_text(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    trainer_of(target, make_rows(16), tmp_path / "before", 0.5).train()
    checkpoint = tmp_path / "before" / "checkpoint-3"
    (checkpoint / "own_text-0.json").unlink()  # as another process finds it
    trainer = trainer_of(target, make_rows(16), tmp_path / "resumed", 0.5)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == trainer.state.max_steps


def test_own_text_is_kept_before_the_first_process_has_made_the_checkpoints_folder(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    trainer = trainer_of(target, make_rows(16), tmp_path, 0.5)
    trainer._save_rng_state(str(tmp_path / "checkpoint-1"))
    assert (tmp_path / "checkpoint-1" / "own_text-0.json").is_file()


def test_training_makes_a_draft_better_and_keeps_the_best(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    with torch.no_grad():
        for parameter in target.model.parameters():  # else all it says is nearly uniform
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    rows = make_rows(24)
    before = trainer_of(target, rows, tmp_path / "none").evaluate()["eval_acceptance"]
    digest = target.weights_digest()
    args = arguments(tmp_path / "run", max_steps=60, eval_steps=20, save_steps=20)
    draft = train_draft(
        target,
        rows,
        eval_dataset=rows,
        draft=DraftArguments(draft_layers=1, on_policy_share=0.3),
        output_dir=tmp_path / "run",
        training_args=args,
    )
    assert target.weights_digest() == digest
    trainer = DraftTrainer(
        draft, target, args, rows, rows, objective=LossConfig({"forward_kl": 1.0})
    )
    after = trainer.evaluate()["eval_acceptance"]
    assert 1 - after < 0.7 * (1 - before)
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert torch.equal(written.lm_head.weight, draft.lm_head.weight)
    # Every checkpoint is such a folder too.
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-60")
    assert (tmp_path / "run" / "run.yaml").is_file()
    assert (tmp_path / "run" / "metrics.json").is_file()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"draft_model": "x", "draft_layers": 2}, "leave draft_layers"),
        ({"on_policy_share": 1.5}, "on_policy_share must lie in"),
        ({"divergence": "cross_entropy", "on_policy_share": 0.5}, "no truth to learn"),
        ({"cross_entropy_share": 1.0}, "set divergence to cross_entropy"),
        ({"draft_layers": 0}, "draft_layers must be at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        DraftArguments(**settings)


def test_the_best_checkpoint_needs_evaluated_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple"):
        arguments(tmp_path, eval_steps=4, save_steps=6)


def test_another_draft_model_is_not_resumed(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    def run(resume: str | None, **draft: Any) -> None:
        train_draft(
            target,
            make_rows(8),
            eval_dataset=make_rows(4, seed=1),
            draft=DraftArguments(**draft),
            output_dir=tmp_path,
            training_args=arguments(tmp_path, max_steps=2, save_steps=2, eval_steps=2),
            resume_from_checkpoint=resume,
        )

    run(None)
    for changed in ({"draft_layers": 2}, {"draft_hidden_size": 8}, {"on_policy_share": 0.5}):
        with pytest.raises(ValueError, match="was made with another draft model, or another way"):
            run("last", **changed)


def test_a_draft_model_that_could_never_draft_is_refused_before_it_learns(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=target.vocab_size, hidden_size=16, num_hidden_layers=1)
    MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    with pytest.raises(ValueError, match=r"\(mamba\) keeps a recurrent state"):
        train_draft(
            target,
            make_rows(8),
            draft=DraftArguments(draft_model=str(tmp_path / "mamba")),
            output_dir=tmp_path / "run",
            training_args=arguments(tmp_path / "run"),
        )


def test_a_draft_model_comes_back_as_it_is_stored(
    target: TargetModel, make_rows: Rows, tmp_path: Path
) -> None:
    """Without the autocast it learnt in, and with its cache."""
    args = arguments(tmp_path, max_steps=2, eval_steps=2, save_steps=2, bf16=True)
    draft = train_draft(target, make_rows(8), output_dir=tmp_path, training_args=args)
    stored, ids = AutoModelForCausalLM.from_pretrained(tmp_path), torch.tensor([[1, 2, 3]])
    assert torch.equal(draft(ids).logits, stored(ids).logits)
    assert draft.config.use_cache and stored.config.use_cache
