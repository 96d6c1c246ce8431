"""Tiny targets and texts for the training tests."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from medusa_heads.target.target import TargetModel
from tests.training.cache_runs import Runs

VOCAB = 61


@pytest.fixture
def target() -> TargetModel:
    """A random Llama: 2 layers, 16 wide, 61 tokens, 64 positions."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    made = TargetModel(LlamaForCausalLM(config))
    made.freeze()
    return made


@pytest.fixture(scope="session")
def make_rows() -> Callable[..., Dataset]:
    """Rows that can be learnt: each token is the one before plus a step of the row's own. Nobody
    can change a dataset: whoever asks for the same rows is given the same one."""

    @cache
    def make(count: int, length: int = 24, prompt: int = 4, seed: int = 0) -> Dataset:
        generator = torch.Generator().manual_seed(seed)
        rows = []
        for _ in range(count):
            first, step = torch.randint(1, VOCAB, (2,), generator=generator).tolist()
            input_ids = [(first + step * t) % VOCAB for t in range(length)]
            rows.append({"input_ids": input_ids, "labels": [-100] * prompt + input_ids[prompt:]})
        return Dataset.from_list(rows)

    return make


@pytest.fixture(scope="session")
def texts(make_rows: Callable[..., Dataset]) -> tuple[Dataset, Dataset]:
    """Rows of unequal lengths, with prompts; one has two answers, one learns nothing."""
    rows = [*make_rows(9), *make_rows(6, length=40, prompt=20, seed=1)]
    rows += make_rows(2, length=5, prompt=5, seed=2)
    rows[3]["labels"][9:15] = [-100] * 6
    return Dataset.from_list(rows), Dataset.from_list([*make_rows(3, seed=7), *make_rows(2, 33)])


@pytest.fixture
def runs(target: TargetModel, texts: tuple[Dataset, Dataset], tmp_path: Path) -> Runs:
    return Runs(target, texts, tmp_path)
