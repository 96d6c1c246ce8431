"""Text in half precision: every committed token is the argmax of the target's own forward of n
tokens, at the node where its row then stood.

Shapes: B rows, N tree nodes, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_heads.inference.engine.capability import capability
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.inference.engine.stats import GenerationStats
from medusa_heads.target.attention import TreeMask
from medusa_heads.target.cache import RowCache
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.tree import TokenTree
from tests.conftest import DEVICE, TinyLlama
from tests.inference.padded import padded
from tests.inference.planted import PlantedDrafter, decoding
from tests.pairs import alternately

VOCAB = 24
PROMPT = 12
NEW = 24


class Recording(TargetModel):
    """Keeps every verified tree and its logits."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        capability(self)  # which verifies trees of its own
        self.steps: list[tuple[TokenTree, Tensor]] = []

    def verify(self, tree: TokenTree, cache: RowCache, mask: TreeMask) -> Tensor:
        logits_BNV = super().verify(tree, cache, mask)
        if hasattr(self, "steps"):
            self.steps.append((tree, logits_BNV.clone()))
        return logits_BNV


class Misreporting(Recording):
    """Negative control: hands on other logits than it recorded, now and then."""

    def verify(self, tree: TokenTree, cache: RowCache, mask: TreeMask) -> Tensor:
        logits_BNV = super().verify(tree, cache, mask)
        if hasattr(self, "steps") and len(self.steps) % 4 == 0:
            best_BN1 = logits_BNV.argmax(-1, keepdim=True)
            logits_BNV.scatter_(2, best_BN1, float("-inf"))
        return logits_BNV


class Noting(PlantedDrafter):
    """Keeps which rows each step began with, and how many tokens they had."""

    def propose(self, state: DecodingState) -> TokenTree:
        self.begun = [*getattr(self, "begun", []), {r.index: len(r.tokens) for r in state.rows}]
        return super().propose(state)


def mismatches(
    model: Any, kind: type[Recording], batch: int, **options: Any
) -> tuple[int, GenerationStats]:
    """Committed tokens that are not the best of the recorded logits, or after which a draft that
    carried them was not followed."""
    inputs: dict[str, Any] = {
        **padded([0, 3, 5, 1][:batch], PROMPT),
        "max_new_tokens": NEW,
        "do_sample": False,
        **options,
    }
    plain_BT = model.generate(**inputs)[:, PROMPT:]
    target, drafter, stats = kind(model), Noting(plain_BT.tolist(), VOCAB), GenerationStats()
    custom = decoding(target, drafter, stats=stats)
    texts = model.generate(**inputs, custom_generate=custom)[:, PROMPT:].tolist()
    end = options.get("eos_token_id")
    texts = [text[: text.index(end) + 1] if end in text else text for text in texts]
    wrong = 0
    for (tree, logits_BNV), begun, after in zip(
        target.steps, drafter.begun, [*drafter.begun[1:], {}], strict=True
    ):
        tokens, parents = tree.tokens_BN.tolist(), tree.parents_BN.tolist()
        for b, (row, start) in enumerate(begun.items()):
            node: int | None = 0
            for token in texts[row][start : after.get(row)]:
                wrong += node is None or bool(
                    logits_BNV[b, node, token] != logits_BNV[b, node].max()
                )
                children = [n for n, parent in enumerate(parents[b]) if parent == node]
                node = next((n for n in children if tokens[b][n] == token), None)
            wrong += node is not None and row in after  # the walk went on, the tokens did not
    return wrong, stats


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16], ids=str)
def model(request: pytest.FixtureRequest, tiny_llama: TinyLlama) -> Any:
    made = tiny_llama(vocab_size=VOCAB).to(device=DEVICE, dtype=request.param)
    made.generation_config.pad_token_id = 0
    return made


@pytest.mark.parametrize(("options", "batch"), alternately([{}, {"eos_token_id": 5}], [1, 4]))
def test_committed_tokens_are_the_best_of_the_forward_they_came_from(
    model: Any, batch: int, options: dict[str, Any]
) -> None:
    wrong, stats = mismatches(model, Recording, batch, **options)
    assert wrong == 0
    assert stats.tokens_per_step > 1.3


@pytest.mark.parametrize("batch", [1, 4])
def test_other_tokens_are_noticed(model: Any, batch: int) -> None:
    """Negative control."""
    wrong, _ = mismatches(model, Misreporting, batch)
    assert wrong > 0
