"""Successors that were seen lately, and what is learnt of how often they come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import StoppingCriteriaList

from medusa_heads import TargetModel
from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.drafters import recycling
from medusa_heads.inference.drafters.blended import BlendedDrafter
from medusa_heads.inference.drafters.recycling import RecycledTrees, RecyclingSource
from medusa_heads.inference.engine.capability import capability
from medusa_heads.inference.engine.noise import Noise
from medusa_heads.inference.engine.rows import Row, StopCheck
from medusa_heads.inference.engine.stats import GenerationStats
from medusa_heads.trees.tree import TokenTree, TreeShape
from tests.conftest import DEVICE, TinyLlama
from tests.inference.planted import decoding

STATE: Any = SimpleNamespace(rows=[SimpleNamespace(tokens=[3])], drawing="greedy", noise=None)


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


def test_what_stands_behind_right_tokens_is_counted_for_itself() -> None:
    """Where the noise is known: there more is right than at the text's end."""
    row = Row(0, 1, torch.tensor([1, 5]), StopCheck(StoppingCriteriaList()))
    row.commit(5)
    state: Any = SimpleNamespace(rows=[row], drawing="keyed", noise=Noise(3, [row], [0]))
    source = RecyclingSource(8)
    # Behind 5 the token 5 is all but certain, so that it is the first behind itself, too.
    source.observe(TokenTree.root_only(torch.tensor([5])), 20.0 * torch.eye(8)[None, 5:6])
    (drafted,) = source.draft(state)
    right = next(offer for offer in drafted.offers(drafted.root) if offer[1] == 5)
    further = next(offer for offer in drafted.offers(right[2]) if offer[1] == 5)
    assert right[0] == pytest.approx(further[0], abs=1e-3)
    drafted.learn([5, 5])
    (again,) = source.draft(state)
    accepted, counted = again.evidence.columns
    assert right[3] < len(counted) // 2 <= further[3]
    assert accepted[right[3]] / counted[right[3]] > 0.6
    drafted.learn([5, 2])
    assert accepted[right[3]] / counted[right[3]] > accepted[further[3]] / counted[further[3]]


def test_trees_on_the_device_are_of_the_latest_successors() -> None:
    drafter, roots_B = RecycledTrees(10, 6), torch.tensor([3, 8])
    state: Any = SimpleNamespace(rows=[], noise=None, roots_B=roots_B)
    tree = TreeShape.from_choices([(0,)]).tree(torch.tensor([[3, 5]]))
    logits_BNV = torch.full((1, 2, 10), -9.0)
    logits_BNV[0, 0, [5, 6]] = torch.tensor([9.0, 8.0])  # behind 3: 5, then 6
    logits_BNV[0, 1, [3, 7]] = torch.tensor([9.0, 8.0])  # behind 5: 3, then 7
    drafter.observe(tree, -logits_BNV)  # seen before
    drafter.observe(tree, logits_BNV)
    drafted: Any = drafter.propose(state)
    paths = []
    for node in range(7):
        ancestors_N = drafted.ancestors_BNN[0, node].nonzero()[:, 0]
        paths.append(tuple(drafted.tokens_BN[0, ancestors_N].tolist()))
    # Likeliest first; of 6, which was never read, nothing is known.
    likely = {(3,), (3, 5), (3, 6), (3, 5, 3), (3, 5, 7), (3, 5, 3, 5), (3, 5, 3, 5, 3)}
    assert set(paths) == likely
    assert len(drafted.tokens_BN[1]) == 7 and drafter.levels == 6


class Written(TorchFunctionMode):
    """Keeps what is written into tensors, and where."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[Any, Any]] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.__setitem__:
            self.pairs.append(args[1:])
        return function(*args, **(kwargs or {}))


def test_nodes_of_one_token_write_the_same() -> None:
    """That of the last of them: a device, or threads, may write them in any order."""
    drafter, tokens_BN = RecycledTrees(10, 6), torch.tensor([[3, 5, 3], [5, 3, 3]])
    logits_BNV = torch.randn(2, 3, 10, generator=torch.Generator().manual_seed(0))
    with Written() as written:
        drafter.observe(TreeShape.from_choices([(0,), (1,)]).tree(tokens_BN), logits_BNV)
    assert len(written.pairs) == 2
    for index, values in written.pairs:
        for token in (3, 5):
            of_token = values[index == token]
            assert torch.equal(of_token, of_token[-1:].expand_as(of_token))
    successors_VR, _ = drafter._matrix(tokens_BN.device)
    last_2R = logits_BNV[1, [2, 0]].topk(8).indices
    assert torch.equal(successors_VR[[3, 5]], last_2R)


def test_the_last_of_pairs_is_that_of_sorted_tokens() -> None:
    tokens_M = torch.randint(9, (40,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    last_M = recycling._last_of_pairs(tokens_M)
    for token, last in zip(tokens_M, last_M, strict=True):
        assert token == tokens_M[last] and token not in tokens_M[last + 1 :]
    assert torch.equal(recycling._last_alike(tokens_M.cpu()), last_M.cpu())


NAN = float("nan")


def test_what_is_no_number_is_not_kept() -> None:
    """On both roads: a token without a number leaves the others, a node with none what was."""
    tree = TreeShape.from_choices([(0,)]).tree(torch.tensor([[3, 5]]))
    known_1NV = torch.randn(1, 2, 10, generator=torch.Generator().manual_seed(0))
    partly_1NV = known_1NV.clone()
    partly_1NV[0, 0, known_1NV[0, 0].argmin()] = NAN
    partly_1NV[0, 1] = NAN
    for drafter in (RecyclingSource(10), RecycledTrees(10, 6)):
        matrices = []
        for logits_1NV in (known_1NV, partly_1NV):
            drafter.observe(tree, logits_1NV)
            if isinstance(drafter, RecyclingSource):
                assert drafter.draft(STATE)
                of_host = drafter._successors_VR, np.log(drafter._chances_VR + 1e-30)
                kept = [torch.tensor(of) for of in of_host]
            else:
                kept = [of.clone() for of in drafter._matrix(tree.tokens_BN.device)]
            matrices.append(kept)
        (successors_VR, chances_VR), (later_VR, later_chances_VR) = matrices
        assert torch.equal(later_VR[5], successors_VR[5])
        assert torch.equal(later_chances_VR[5], chances_VR[5])
        assert torch.equal(later_VR[3, 1:], successors_VR[3, :-1])
        assert later_chances_VR[3, 0] <= -60  # of the token that has none
        assert torch.all(later_chances_VR[3, 1:] >= chances_VR[3, :-1])


def test_a_target_without_numbers_for_a_while(tiny_llama: TinyLlama) -> None:
    """It is generate() that says what comes then; and later as much is drafted as ever."""
    model: Any = tiny_llama().to(DEVICE)
    ids_BT = torch.randint(199, (1, 12), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    drafters = [
        BlendedDrafter(Clock.flat(), range(8), sources=[RecyclingSource(199)], always=True)
        for _ in range(2)
    ]
    capability(TargetModel(model))  # which is asked once, before it falls silent
    silent = model.lm_head.register_forward_hook(lambda module, args, out: out * NAN)
    expected_BT = model.generate(ids_BT, max_new_tokens=12, do_sample=False)
    assert torch.equal(written(model, drafters[0], ids_BT, 12)[0], expected_BT)
    silent.remove()
    expected_BT = model.generate(ids_BT, max_new_tokens=60, do_sample=False)
    steps = []
    for drafter in drafters:
        got_BT, stats = written(model, drafter, ids_BT, 60)
        assert torch.equal(got_BT, expected_BT)
        steps.append(stats.accepted)
    assert steps[0] == steps[1] and max(steps[0]) > 0


def written(model: Any, drafter: Any, ids_BT: Tensor, new: int) -> tuple[Tensor, GenerationStats]:
    stats = GenerationStats()
    custom = decoding(TargetModel(model), drafter, stats=stats)
    options = {"max_new_tokens": new, "do_sample": False, "custom_generate": custom}
    return model.generate(ids_BT, **options), stats


def test_the_matrix_is_where_the_target_is() -> None:
    drafter = RecycledTrees(10, 6)
    for device in ("cpu", "meta"):
        state: Any = SimpleNamespace(rows=[], noise=None, roots_B=torch.tensor([3], device=device))
        assert drafter.propose(state).tokens_BN.device.type == device


@pytest.mark.parametrize("nodes", [0, 64])
def test_sizes_that_are_not_there(nodes: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 63 tokens, got {nodes}"):
        RecycledTrees(10, nodes)
