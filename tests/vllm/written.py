"""Heads of layers on the embedded model, as they are written for engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_heads import HeadsConfig, TargetModel, new_heads
from medusa_heads.checkpoint.checkpoint import load_heads, save_heads
from medusa_heads.heads import DraftHeads
from medusa_heads.interop import WrittenFormat
from medusa_heads.interop.export import export_heads
from tests.vllm.partly_trained import TARGET, load_target

FEATURES = [1, 3, 5]
BLOCKS: dict[str, tuple[WrittenFormat, dict[str, Any]]] = {
    "dspark": ("dspark", {"correction_rank": 8}),
    "dspark, reduced": ("dspark", {"correction_rank": 8, "draft_vocab_size": 500}),
    "dspark, two layers": ("dspark", {"correction_rank": 8, "num_layers": 2}),
    "dflash": ("dflash", {"num_layers": 2}),
    "dflash, own": ("dflash", {"draft_vocab_size": 500, "vocab_matrix": "own"}),
}


def exported(
    folder: Path, to: WrittenFormat, **config: Any
) -> tuple[DraftHeads, TargetModel, Path]:
    """Heads whose every weight matters, read back from their checkpoint, and what was written."""
    target = load_target()
    size = config.get("draft_vocab_size")
    tokens_V = None if size is None else torch.arange(1, 1 + 3 * size, 3)
    heads = new_heads(target, HeadsConfig(num_heads=4, features=FEATURES, **config), tokens_V)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    save_heads(folder / "heads", heads, target)
    export_heads(folder / "heads", folder / "out", to, target=str(TARGET))
    read = load_heads(folder / "heads", target).heads
    return read, target.with_features(FEATURES), folder / "out"


def text() -> Tensor:
    return torch.randint(4096, (1, 40), generator=torch.Generator().manual_seed(1))
