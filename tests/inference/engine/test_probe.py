"""Negative controls of the self-test: whatever is wrong with a target shows in its numbers.

Shapes: B rows, N tree nodes, S cache slots.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_heads import TargetModel
from medusa_heads.inference.engine.probe import CHAIN, TREE, Prober, Trial, text_logits
from medusa_heads.target.attention import TreeMask
from medusa_heads.target.cache import RowCache
from medusa_heads.trees.tree import TokenTree
from scripts.prove.tiny_models import builder
from tests.conftest import TinyLlama
from tests.inference.narrowed import DTYPES, WIDTHS, narrow


@pytest.mark.parametrize("trial", [TREE, CHAIN], ids=["tree", "chain"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wrong_with_a_sound_target(
    tiny_llama: TinyLlama, width: float, dtype: torch.dtype, trial: Trial
) -> None:
    probe = Prober(TargetModel(narrow(tiny_llama(), width).to(dtype))).probe(trial)
    assert probe.fault(dtype) is None and probe.leak == 0.0 < 1e-2 < probe.effect


def test_any_device_may_be_the_default(tiny_llama: TinyLlama) -> None:
    target = TargetModel(tiny_llama())
    with torch.device("meta"):
        assert Prober(target).probe(TREE).fault(torch.float32) is None


def test_logits_of_a_text_are_those_that_it_is_written_by() -> None:
    """Left alone, RoBERTa counts positions from its padding's id on."""
    model: Any = builder("roberta")((0.15, 0.15)).eval()
    ids_1T = torch.arange(5, 14)[None]
    asked = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
    made = model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), do_sample=False, **asked)
    torch.testing.assert_close(text_logits(TargetModel(model), ids_1T)[:, -1], made.logits[0])


class BySlot(TargetModel):
    """Counts positions by the slot, not by the depth in the tree."""

    def verify(self, tree: TokenTree, cache: RowCache, mask: TreeMask) -> Tensor:
        first_B1 = mask.query_positions_BN[:, :1]
        slots_BN = first_B1 + torch.arange(tree.num_nodes)
        return super().verify(tree, cache, replace(mask, query_positions_BN=slots_BN))


class BySlotChunks(TargetModel):
    """Attends within chunks of 16 slots of the cache."""

    def verify(self, tree: TokenTree, cache: RowCache, mask: TreeMask) -> Tensor:
        chunks_S = torch.arange(mask.visible_BNS.shape[2]) // 16
        visible_BNS = mask.visible_BNS & (chunks_S == chunks_S[mask.first_slot :, None])
        return super().verify(tree, cache, replace(mask, visible_BNS=visible_BNS, bias_BNS=None))


class Seeing(TargetModel):
    """Its nodes see other nodes than their ancestors."""

    def seen(self, tree: TokenTree) -> Tensor:
        """Nodes by nodes."""
        raise NotImplementedError

    def verify(self, tree: TokenTree, cache: RowCache, mask: TreeMask) -> Tensor:
        visible_BNS = mask.visible_BNS.clone()
        visible_BNS[:, :, -tree.num_nodes :] = self.seen(tree)
        return super().verify(tree, cache, replace(mask, visible_BNS=visible_BNS, bias_BNS=None))


class Blind(Seeing):
    """The text, the root and themselves alone."""

    def seen(self, tree: TokenTree) -> Tensor:
        alone_NN = torch.eye(tree.num_nodes, dtype=torch.bool)
        alone_NN[:, 0] = True
        return alone_NN


class SeesChildren(Seeing):
    def seen(self, tree: TokenTree) -> Tensor:
        parents_N = tree.parents_BN[0]
        children_NN = parents_N == torch.arange(tree.num_nodes)[:, None]
        return tree.ancestors_BNN[0] | children_NN


class SeesSiblings(Seeing):
    def seen(self, tree: TokenTree) -> Tensor:
        parents_N = tree.parents_BN[0]
        return tree.ancestors_BNN[0] | (parents_N == parents_N[:, None])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("wrong", "width"),
    [
        (BySlot, 1.0),
        (BySlotChunks, 1.0),
        *((each, width) for each in (Blind, SeesChildren, SeesSiblings) for width in WIDTHS),
    ],
)
def test_wrong_positions_and_masks_are_caught_in_any_dtype(
    tiny_llama: TinyLlama, wrong: type[TargetModel], width: float, dtype: torch.dtype
) -> None:
    target = wrong(narrow(tiny_llama(), width).to(dtype))
    assert Prober(target).probe(TREE).fault(dtype) is not None


@pytest.mark.parametrize("trial", [TREE, CHAIN], ids=["tree", "chain"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_mean_over_all_tokens_is_caught(
    tiny_llama: TinyLlama, width: float, dtype: torch.dtype, trial: Trial
) -> None:
    model: Any = narrow(tiny_llama(), width).to(dtype)
    model.model.layers[0].register_forward_hook(lambda _m, _i, x: x + 0.1 * x.mean((0, 1)))
    assert Prober(TargetModel(model)).probe(trial).fault(dtype) is not None


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_change_each_other_are_caught(tiny_llama: TinyLlama, dtype: torch.dtype) -> None:
    model: Any = tiny_llama().to(dtype)
    model.model.layers[0].register_forward_hook(lambda _m, _i, x: x + x.mean(0))
    assert Prober(TargetModel(model)).probe(TREE).fault(dtype) is not None
