"""Heads of the embedded model, trained for some steps only: good enough to be accepted, and bad
enough to be rejected, at every place of a chain."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from medusa_heads.checkpoint.checkpoint import load_heads
from medusa_heads.config import HeadsConfig
from medusa_heads.decoder_shape import BlockShape, DecoderShape
from medusa_heads.heads import DraftHeads
from medusa_heads.inference.bench.prompts import held_out_prompts
from medusa_heads.inference.serving.chain import greedy
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.training import OptimisationArguments, to_training_arguments
from medusa_heads.training.runs.heads import train_heads

TARGET = Path(__file__).parents[2] / "assets" / "demo-target"
NUM_HEADS = 4
NEW_TOKENS = 64
MOST = 12  # prompts
STEPS = 12
YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0}
YARN |= {"original_max_position_embeddings": 16}
KINDS: dict[str, dict[str, Any]] = {
    "shared": {"vocab_matrix": "shared"},
    "own": {"vocab_matrix": "own", "num_layers": 2},
    "reduced-shared": {"vocab_matrix": "shared", "draft_vocab_size": 1001},
    "corrected": {
        "vocab_matrix": "shared",
        "linear_shortcut": True,
        "draft_vocab_size": 1001,
        "correction_rank": 16,
    },
    "corrected-own": {"vocab_matrix": "own", "correction_rank": 16},
    "reduced-own": {"vocab_matrix": "own", "draft_vocab_size": 1001},
    "eagle3": {"kind": "eagle3"},
    "eagle3-features": {"kind": "eagle3", "features": [1, 3, 5], "draft_vocab_size": 1001},
    "eagle3-norm-output": {
        "kind": "eagle3",
        "features": [1, 3, 5],
        "draft_vocab_size": 1001,
        "decoder": replace(DecoderShape.of_width(384), norm_output=True),
    },
    "eagle3-side-by-side": {
        "kind": "eagle3",
        "features": [1, 3, 4],
        "draft_vocab_size": 1001,
        "decoder": replace(DecoderShape.of_width(384), feature_norm="all"),
    },
    "eagle3-bare": {
        "kind": "eagle3",
        "features": [1, 2, 4],
        "decoder": replace(
            DecoderShape.of_width(384), feature_norm="none", norm_before_residual=False
        ),
    },
    "block": {"kind": "block", "features": [1, 4], "num_layers": 2},
    "block-yarn": {
        "kind": "block",
        "features": [1, 4],
        "correction_rank": 16,
        "decoder": replace(BlockShape.of_width(384), rope_parameters=YARN),
    },
    "block-corrected": {
        "kind": "block",
        "features": [1, 3, 4],
        "correction_rank": 16,
        "draft_vocab_size": 1001,
    },
}


def load_target() -> TargetModel:
    """The embedded model in fp32, in which text and counts can be compared exactly."""
    return TargetModel.from_pretrained(str(TARGET), dtype=torch.float32)


@cache
def written(count: int, new_tokens: int) -> list[list[int]]:
    """What the target writes greedily behind so many prompts, which heads of all kinds learn."""
    target = load_target()
    return [greedy(target, prompt, new_tokens).tolist() for prompt in prompts(count)]


def train(kind: str, folder: Path, count: int = MOST, new_tokens: int = NEW_TOKENS) -> Path:
    """A checkpoint of such heads, by this package's own training, on what they will be asked: so
    many prompts."""
    target, rows = load_target(), written(count, new_tokens)
    dataset = Dataset.from_list([{"input_ids": row, "labels": row} for row in rows])
    config = HeadsConfig(num_heads=NUM_HEADS, **KINDS[kind])
    arguments = OptimisationArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=len(rows),
        logging_steps=STEPS,
        eval_steps=STEPS,
    )
    train_heads(
        target,
        dataset,
        eval_dataset=dataset.select(range(2)),
        config=config,
        output_dir=folder,
        training_args=to_training_arguments(arguments, config.vocab_matrix),
        with_vocab_matrix=kind == "shared",
    )
    return folder


def load(folder: Path, target: TargetModel) -> DraftHeads:
    """The heads of a checkpoint, on their target."""
    return load_heads(folder, target).heads


def prompts(count: int = MOST) -> list[list[int]]:
    """Token ids of prompts of unequal length, from sources that nothing was trained on."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    windows = held_out_prompts(tokenizer, num_prompts=MOST, prompt_length=48, seed=7)
    return [window[: 12 + 3 * n] for n, window in enumerate(windows[:count])]
