"""What the text suggests, and how far it is believed."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from medusa_heads import TargetModel
from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.adapt.evidence import Evidence
from medusa_heads.inference.drafters.blended import BlendedDrafter
from medusa_heads.inference.drafters.merged import MergedTrees
from medusa_heads.inference.drafters.text import TextProposal, TextSource
from medusa_heads.inference.engine.rows import Row, StopCheck
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.inference.lookup.suffix_automaton import Continuation
from medusa_heads.trees.dynamic_tree import Guess
from tests.conftest import DEVICE, TinyLlama
from tests.inference.clock import Clock as Time
from tests.inference.rereading import run


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


class _Offering:
    """A part that offers one token at each level, behind whatever path."""

    depth, reads_prompt = 3, False

    def guess(self, state: Any) -> Guess:
        def offered(level: int, paths_BFJ: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
            tokens_BF1 = torch.full_like(paths_BFJ[..., :1], [9, 3, 8][level])
            return tokens_BF1, torch.full_like(tokens_BF1, -0.5, dtype=torch.float)

        return offered


def test_the_text_goes_on_behind_its_own_path_alone() -> None:
    """And not where another path ends in the same token."""
    row = Row(0, 1, torch.tensor([1, 2, 3, 4, 5, 6, 1]), StopCheck(StoppingCriteriaList()))
    numbers = {"rows": [row], "roots_B": torch.tensor([1]), "noise": None, "drawing": "greedy"}
    state: Any = SimpleNamespace(**numbers, padding=[0], memories={})
    tree = MergedTrees([_Offering()], 9).propose(state)  # type: ignore[list-item]
    tokens, parents = tree.tokens_BN[0].tolist(), tree.parents_BN[0].tolist()
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    assert {(2, 3, 4), (9, 3, 8), (2, 3, 4, 5, 6)} <= {*paths}
    assert (9, 3, 4) not in paths


class Repeating:
    """Is sure of every text that token 7 follows, whatever came of that; counts the looks at it."""

    def __init__(self, time: Time) -> None:
        self.time, self.looks = time, 0

    def draft(self, state: DecodingState) -> list[list[TextProposal]]:
        self.looks += 1
        self.time.work(0.1)
        found = Continuation(40, [7] * 5, [1.0] * 5)
        return [[TextProposal(Evidence([1.0] * 8, weight=1e9), found)] for _ in state.rows]


def test_a_look_is_worth_what_came_of_it_and_not_what_it_promises(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = tiny_llama(vocab_size=24).to(DEVICE)
    text: Any = Repeating(Time(monkeypatch))
    drafter = BlendedDrafter(Clock({1: 1.0, 16: 1.5}, learns=False), (0, 1, 3, 7), text=text)
    ids_BT = torch.tensor([[5, 6, 5, 6]], device=DEVICE)
    inputs = {"input_ids": ids_BT, "max_new_tokens": 60, "do_sample": False}
    inputs |= {"bad_words_ids": [[7]]}
    model.generate(**inputs, custom_generate=partial(run, TargetModel(model), drafter))
    assert 1 < text.looks < 30
