"""Where nodes are free, trained heads draft: tokens per step of the shipped demo, as a floor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_heads import MedusaModel
from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.plan import adaptive as adaptive_plan
from medusa_heads.target.loading import load_tokenizer

ASSETS = Path(__file__).parents[3] / "assets"
PROMPTS = ["def test_", "class Stack:\n    def __init__(self"]


@pytest.mark.parametrize(
    ("tree", "floor"),
    [
        ("auto", 5.0),
        pytest.param("static:15", 3.0, marks=pytest.mark.slow),
        pytest.param("dynamic:15", 3.0, marks=pytest.mark.slow),
    ],
)
def test_heads_draft(monkeypatch: pytest.MonkeyPatch, tree: str, floor: float) -> None:
    flat = Clock(dict.fromkeys((1, 2, 4, 8, 16, 32, 64), 1.0), learns=False)
    monkeypatch.setattr(adaptive_plan, "target_clock", lambda *_: flat)
    medusa = MedusaModel.from_pretrained(
        ASSETS / "demo-heads", target=str(ASSETS / "demo-target"), tree=tree, dtype=torch.float32
    )
    tokenizer: Any = load_tokenizer(str(ASSETS / "demo-target"))
    tokens = forwards = 0
    for prompt in PROMPTS:
        ids_BT = tokenizer(prompt, return_tensors="pt").input_ids.to(medusa.target.device)
        medusa.generate(ids_BT, max_new_tokens=64, do_sample=False)
        tokens += medusa.last_stats.tokens
        forwards += medusa.last_stats.steps
    assert tokens / forwards > floor
