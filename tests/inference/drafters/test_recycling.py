"""Successors that were seen lately, and what is learnt of how often they come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from transformers import StoppingCriteriaList

from medusa_heads.inference.drafters.recycling import RecyclingSource
from medusa_heads.inference.engine.noise import Noise
from medusa_heads.inference.engine.rows import Row, StopCheck
from medusa_heads.trees.tree import TokenTree


def test_recycled_tokens_are_learnt_from_as_they_were_drafted() -> None:
    """With the noise of the place where they were drafted, also when that has been written."""
    row = Row(0, 1, torch.tensor([1, 2]), StopCheck(StoppingCriteriaList()))
    state: Any = SimpleNamespace(rows=[row], drawing="keyed", noise=Noise(3, [row], [0]))
    logits_1NV = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(0))
    row.commit(5)
    offers = []
    for committed in ([], [6, 2]):
        source = RecyclingSource(8)
        source.observe(TokenTree.root_only(torch.tensor([5])), logits_1NV[:, :1])
        (drafted,) = source.draft(state)
        row.tokens += committed
        offers.append(drafted.offers(drafted.root))
    assert offers[1] == offers[0]
