"""What the text suggests, and how far it is believed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
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


def test_what_luck_says_of_copied_tokens() -> None:
    """Places where the target is sure, one way or the other, and others: of tokens that are
    believed so far, as many are drawn."""
    ids_T = torch.tensor([5, 6, 7, 5])
    row = Row(0, 1, ids_T, StopCheck(StoppingCriteriaList()))
    source, random, said = TextSource(1), np.random.default_rng(0), []
    for _ in range(6000):
        own = random.beta(0.3, 0.3)
        luck = random.exponential()
        noise = SimpleNamespace(luck=lambda row, luck=luck: lambda ahead, token: luck)
        state: Any = SimpleNamespace(rows=[row], padding=[0], memories={}, noise=noise)
        state.drawing = "keyed"
        (proposal,) = source.draft(state)[0]
        # All others' luck is that of one token with all the rest.
        right = luck / max(own, 1e-9) < random.exponential() / max(1.0 - own, 1e-9)
        said.append((proposal.expected(), float(right)))
        proposal.learn([6 if right else 9])
    by_chance = sorted(said[500:])
    for few in (by_chance[i : i + 500] for i in range(0, len(by_chance), 500)):
        chance, right = (sum(each) / len(few) for each in zip(*few, strict=True))
        assert abs(chance - right) < 0.12, (chance, right)
