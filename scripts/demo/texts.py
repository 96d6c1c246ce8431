"""Prompts for the demo target and what it answers, for scripts that compare ways of training."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

import torch
from datasets import Dataset
from transformers import AutoTokenizer

from medusa_heads.data.corpus import prompt_windows, standard_library
from medusa_heads.inference.regeneration.regenerate import regenerate
from medusa_heads.machine.choice import choose
from medusa_heads.target.target import TargetModel

TARGET = Path(__file__).resolve().parents[2] / "assets" / "demo-target"
PROMPT, CONTINUATION = 64, 128  # tokens


def check_recipes(given: Sequence[str], known: Collection[str]) -> None:
    """Raises ValueError where a recipe is unknown."""
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(f"unknown recipes {unknown}; known: {list(known)}")


def autocast() -> bool:
    """Whether this machine trains faster in bf16 autocast."""
    return choose("train", count_threads=False).dtype == torch.bfloat16


def windows(part: Literal["train", "held_out"], count: int, length: int = PROMPT) -> Dataset:
    """Pieces of the standard library, `length` tokens each."""
    return prompt_windows(
        standard_library(part),
        AutoTokenizer.from_pretrained(str(TARGET)),
        num_prompts=count,
        prompt_length=length,
        seed=0,
    )


def written(
    target: TargetModel, prompts: Dataset, greedy_share: float, output: Path, workers: int
) -> Dataset:
    """The target's continuations, the others at temperature 0.7; kept below `output`."""
    return regenerate(
        target,
        prompts,
        max_new_tokens=CONTINUATION,
        batch_size=256,
        greedy_share=greedy_share,
        temperature=0.7,
        seed=0,
        cache_dir=output / "texts",
        num_workers=workers,
    )
