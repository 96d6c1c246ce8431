"""What the text suggests, and how far it is believed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from transformers import StoppingCriteriaList

from medusa_heads.inference.drafters.text import TextSource
from medusa_heads.inference.engine.rows import Row, StopCheck


def test_greedy_text_says_nothing_of_drawn_text() -> None:
    """A greedy text that repeats itself is always right; the next one may be drawn."""
    ids_T = torch.tensor([5, 6, 7, 5, 6, 7, 5])
    row = Row(0, 1, ids_T, StopCheck(StoppingCriteriaList()))
    source = TextSource(4)

    def suggested(drawing: str) -> Any:
        state: Any = SimpleNamespace(rows=[row], padding=[0], memories={}, noise=None)
        state.drawing = drawing
        return source.draft(state)[0][0]

    before = suggested("greedy").expected()
    for _ in range(50):
        suggested("greedy").learn([6, 7, 5, 6])
    assert suggested("greedy").expected() > 1.2 * before
    assert suggested("drawn").expected() == before
