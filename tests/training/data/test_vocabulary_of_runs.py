"""Heads for a large vocabulary draft a part of it, and go on with the part that they had."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from medusa_heads import MedusaModel
from medusa_heads.checkpoint.checkpoint import load_heads
from medusa_heads.checkpoint.stored_heads import DRAFT_TOKENS
from medusa_heads.config import HeadsConfig
from medusa_heads.heads import DraftHeads
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.data import draft_vocabulary
from medusa_heads.training.runs.heads import train_heads
from tests.pairs import with_slow
from tests.training.runs.test_heads import quick

V, LEAST = 256, 128
Train = Callable[..., DraftHeads]


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is a large vocabulary elsewhere would take seconds a run."""
    monkeypatch.setattr(draft_vocabulary, "LEAST", LEAST)
    monkeypatch.setattr(draft_vocabulary, "_MEASURED", 100)


@pytest.fixture(scope="module")
def large() -> TargetModel:
    """A random Llama: 2 layers, 16 wide, a vocabulary that the text holds a part of."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=2, **shape
    )
    return TargetModel(LlamaForCausalLM(config))


def counting(count: int, first: int, length: int = 24) -> Dataset:
    """Rows that count up by threes, from `first` on."""
    ids = [[first + row + 3 * place for place in range(length)] for row in range(count)]
    return Dataset.from_list([{"input_ids": row, "labels": row} for row in ids])


LEARNT = V - 100  # the first token of the text
TEXT, HELD_OUT = counting(16, LEARNT), counting(8, LEARNT)
OTHER = counting(8, 0)  # of tokens that the text does not hold


@pytest.fixture
def train(large: TargetModel, tmp_path: Path) -> Train:
    def go(steps: int = 2, held_out: Dataset = HELD_OUT, **more: Any) -> DraftHeads:
        settings = {"save_steps": 2, "load_best_model_at_end": False}
        return train_heads(
            large,
            TEXT,
            eval_dataset=held_out,
            output_dir=tmp_path / "run",
            training_args=quick(tmp_path, steps, learning_rate=1e-3, **settings),
            **{"config": HeadsConfig(num_heads=2), **more},
        )

    return go


@pytest.mark.parametrize(
    ("shape", "loss"),
    [
        ({}, "forward_kl"),
        pytest.param(
            {"prefix_attention": True, "correction_rank": 4},
            "cross_entropy",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"kind": "hydra", "vocab_matrix": "own"}, "cross_entropy", marks=pytest.mark.slow
        ),
        pytest.param(
            {"kind": "block", "features": [0], "correction_rank": 4},
            "cross_entropy",
            marks=pytest.mark.slow,
        ),
        ({"kind": "eagle3", "vocab_matrix": "own"}, "total_variation"),
    ],
    ids=["medusa", "prefix, corrected", "hydra, own", "block", "eagle3, own"],
)
def test_heads_draft_the_tokens_of_their_text(
    shape: dict[str, Any],
    loss: str,
    train: Train,
    large: TargetModel,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The target's tokens that they do not draft are written all the same."""
    heads = train(config=HeadsConfig(num_heads=2, **shape), objective=LossConfig({loss: 1.0}))
    assert heads.draft_tokens is not None and len(heads.draft_tokens) == LEAST
    assert set(TEXT[0]["input_ids"]) <= set(heads.draft_tokens.tolist())
    (said,) = (r.message for r in caplog.records if r.message.startswith("heads draft"))
    assert said.startswith("heads draft 128 of the target's 256 tokens") and "100.00 %" in said
    loaded = load_heads(tmp_path / "run", large)
    assert torch.equal(loaded.heads.draft_tokens, heads.draft_tokens)  # type: ignore[arg-type]
    record = {"tokens": LEAST, "of": V, "held_out_share": 1.0, "why_all": None}
    assert loaded.stored.provenance["draft_vocabulary"] == record
    prompt = torch.tensor([[LEARNT, 5, LEARNT + 6]])
    plain: Any = large.model
    expected = plain.generate(prompt, max_new_tokens=12, do_sample=False)
    drafted = set(heads.draft_tokens.tolist())
    assert not set(expected[0, 3:].tolist()) <= drafted
    decoded: Any = MedusaModel(large, loaded.heads).generate(prompt, max_new_tokens=12)
    assert torch.equal(decoded, expected)


def test_a_resumed_run_keeps_what_it_chose(train: Train) -> None:
    """By other held-out text it would have chosen otherwise."""
    before = train(2)
    again = train(4, held_out=OTHER, resume_from_checkpoint="last")
    assert before.draft_tokens is not None and again.draft_tokens is not None
    assert torch.equal(again.draft_tokens, before.draft_tokens)
    assert torch.equal(again.vocab_matrix(0)[0], before.vocab_matrix(0)[0])
    train(4, resume_from_checkpoint="last", config=HeadsConfig(num_heads=2, draft_vocab_size=LEAST))
    few = HeadsConfig(num_heads=2, draft_vocab_size=64)
    for other in ({"draft_vocab": "all"}, {"config": few}):
        with pytest.raises(ValueError, match="made with heads of another shape"):
            train(4, resume_from_checkpoint="last", **other)


def test_a_resumed_run_keeps_drafting_all(train: Train) -> None:
    assert train(2, draft_vocab="all").draft_tokens is None
    assert train(4, resume_from_checkpoint="last").draft_tokens is None


def another(tokens_C: torch.Tensor, kind: str) -> torch.Tensor:
    return {
        "of a larger target": tokens_C + V,
        "below 0": tokens_C - V,
        "no ids": tokens_C + 0.5,
        "none": tokens_C[:0],
    }[kind]


@pytest.mark.parametrize("kind", with_slow(["below 0", "of a larger target"], ["no ids", "none"]))
def test_a_run_does_not_go_on_with_tokens_that_the_target_does_not_have(
    kind: str, train: Train, tmp_path: Path
) -> None:
    train(2)
    (file,) = tmp_path.glob("run/checkpoint-*/model.safetensors")
    tensors = load_file(file)
    name = f"heads.{DRAFT_TOKENS}"
    save_file(tensors | {name: another(tensors[name], kind)}, file)
    with pytest.raises(ValueError, match=r"draft tokens that this target does not have .*256"):
        train(4, resume_from_checkpoint="last")


@pytest.mark.parametrize("word", ["al", "None", 64, None])
def test_a_word_that_says_no_vocabulary_is_refused(word: Any, train: Train, tmp_path: Path) -> None:
    """It was taken for `auto`, as a number for the tokens was."""
    with pytest.raises(ValueError, match="draft_vocab must be auto or all, got"):
        train(draft_vocab=word)
    assert not (tmp_path / "run").exists()
