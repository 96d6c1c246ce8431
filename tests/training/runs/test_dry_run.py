"""What a dry run says of memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from medusa_heads.config import HeadsConfig
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.joint_config import JointConfig
from medusa_heads.training.arguments.renamed import CHECKPOINTING
from medusa_heads.training.loss.fused import LEAST_CHUNK
from medusa_heads.training.runs.dry_run import TextSize, plan_draft, plan_heads, text_size
from medusa_heads.training.runs.heads_trainer import HeadsTrainer
from tests.conftest import TinyLlama
from tests.training.runs.test_heads import quick


@pytest.mark.parametrize(("longest_row", "pairs"), [(400, LEAST_CHUNK), (3, 3 * 8)])
def test_chunks_of_a_large_vocabulary_are_not_cut_short(
    tmp_path: Path, longest_row: int, pairs: int
) -> None:
    """A product has at least so many pairs, if there are, however much memory a pair takes."""
    vocabulary = 100_000
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    with torch.device("meta"):
        target = TargetModel(LlamaForCausalLM(config))
    text = TextSize(rows=64, tokens=9000, learnt=9000, longest_row=longest_row)
    args = quick(tmp_path)
    fp32_logits = pairs * vocabulary * 4
    planned = plan_draft(target, target.model, args, text).memory
    assert planned["chunks of logits"] == 2 * 3 * fp32_logits
    heads = plan_heads(target, HeadsConfig(num_heads=1), args, text).memory
    assert heads["a chunk of logits"] == 3 * fp32_logits
    reading = plan_heads(target, HeadsConfig(num_heads=1, features=[0]), args, text)
    tokens = args.per_device_train_batch_size * longest_row
    assert reading.memory["target's forward"] - heads["target's forward"] == tokens * 2 * 16 * 4
    assert reading.disk["hidden states, if cached"] == 9000 * 2 * 16 * 4
    with pytest.raises(ValueError, match="features asks for layer 1, and LlamaForCausalLM has"):
        plan_heads(target, HeadsConfig(features=[1]), args, text)


@pytest.mark.parametrize("name", CHECKPOINTING)
def test_an_adapter_may_keep_one_layer_at_a_time(
    name: str, tmp_path: Path, tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whichever name transformers has for it."""
    args, target = quick(tmp_path), TargetModel(tiny_llama(num_hidden_layers=4))
    for each in CHECKPOINTING:
        monkeypatch.delattr(args, each, raising=False)
        monkeypatch.delattr(TrainingArguments, each, raising=False)
    text = TextSize(rows=8, tokens=80, learnt=80, longest_row=10)
    backward = []
    for said in (False, True):
        args.__dict__[name] = said
        plan = plan_heads(target, HeadsConfig(num_heads=1), args, text, joint=JointConfig())
        backward.append(plan.memory["target's backward"])
    assert backward[0] == 4 * backward[1]
    with pytest.raises(ValueError, match=f"{name} has no place in this training"):
        HeadsTrainer.check_arguments(args)


def test_the_longest_row_is_the_true_one() -> None:
    rows = Dataset.from_list([{"input_ids": [1] * n} for n in (3, 9, 4)])
    assert text_size(rows, learnt=5) == TextSize(3, 16, 5, 9)


def test_what_heads_read_by_induction_is_counted(tmp_path: Path, tiny_llama: TinyLlama) -> None:
    """Of every position, a state for each head."""
    text = TextSize(rows=8, tokens=80, learnt=80, longest_row=10)
    args, target = quick(tmp_path), TargetModel(tiny_llama())
    configs = HeadsConfig(num_heads=3), HeadsConfig(num_heads=3, induction=True)
    alone, beside = (
        plan_heads(target, config, args, text).memory["heads' activations"] for config in configs
    )
    tokens = args.per_device_train_batch_size * 10
    assert beside - alone == tokens * 3 * 64 * 2 * 4  # and its gradient
