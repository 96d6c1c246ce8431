"""Best-first trees by few kernels on a GPU: there torch starts dozens of small ones for each level,
and most of what a step takes besides the target's forward goes by between them.

Shapes: as in levels.py; V columns to choose from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from medusa_heads.machine.kernels import Tried, triton_operator
from medusa_heads.trees import levels
from medusa_heads.trees.levels import DEEPER, NEVER, SUREST, Chosen, Level

# What a program has room for: candidates that it ranks, nodes whose ancestors are bits of one word,
# and columns that it picks one by one.
_MOST_CANDIDATES, _MOST_NODES, _MOST_PICKED = 1024, 64, 64
_FEWEST_COLUMNS = 1024  # of which torch chooses by one small kernel or two


def serve(device: torch.device) -> bool:
    return _tried.serve(device)


def grow(
    scores_BF: Tensor,
    tokens_BFR: Tensor,
    log_probs_BFR: Tensor,
    paths_BFJ: Tensor,
    kept: int,
    asked: int,
    merges: bool,
) -> Level:
    given = scores_BF, tokens_BFR, log_probs_BFR, paths_BFJ, kept, asked, merges
    room = tokens_BFR.shape[1] * tokens_BFR.shape[2] <= _MOST_CANDIDATES
    if room and serve(scores_BF.device):
        return Level(*grown_level(*given, SUREST, NEVER))
    return levels.grown_level(*given)


def choose(
    scores_BC: Tensor,
    tokens_BC: Tensor,
    parents_BC: Tensor,
    depth_BC: Tensor,
    nodes: int,
    max_depth: int,
) -> Chosen:
    given = scores_BC, tokens_BC, parents_BC, depth_BC, nodes
    if chooses(scores_BC, nodes):
        return Chosen(*chosen_nodes(*given, DEEPER))
    return levels.chosen_nodes(*given, max_depth)


def chooses(scores_BC: Tensor, nodes: int) -> bool:
    """Whether a kernel makes the tree of so many of these candidates."""
    room = scores_BC.shape[1] <= _MOST_CANDIDATES and nodes <= _MOST_NODES
    return room and serve(scores_BC.device)


def best(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest of the last dimension and where they stand, largest first, as torch.topk."""
    few = count <= _MOST_PICKED and x.shape[-1] >= _FEWEST_COLUMNS
    if not few or x.dtype == torch.float64 or not serve(x.device):
        found = x.topk(count, dim=-1)
        return found.values, found.indices
    values_RK, ids_RK = largest(x.flatten(0, -2), count)
    shape = *x.shape[:-1], count
    return values_RK.view(shape), ids_RK.view(shape)


def _agree(device: torch.device) -> bool:
    """Whether the kernels make the tree that torch makes, of a few random offers."""
    random = torch.Generator("cpu").manual_seed(0)
    batch, paths, ranks, kept = 2, 3, 5, 8
    # Whatever torch's default device is.
    here: Any = {"generator": random, "device": "cpu"}
    options = {**here, "dtype": torch.float}
    scores_BF = -torch.rand(batch, paths, **options).to(device)
    tokens_BFR = torch.randint(99, (batch, paths, ranks), **here).to(device)
    logs_BFR = -torch.rand(batch, paths, ranks, **options).to(device)
    given = scores_BF, tokens_BFR, logs_BFR, tokens_BFR[..., :2], kept, 4, True
    expected: list[Tensor] = [*levels.grown_level(*given)]
    made: list[Tensor] = [*grown_level(*given, SUREST, NEVER)]
    scores_BC = torch.cat([torch.zeros_like(scores_BF[:, :1]), expected[0] - 1], dim=1)
    depth_BC = torch.tensor([0] + [1] * kept, device=device).expand(batch, -1)
    tokens_BC = tokens_BFR.flatten(1)[:, : kept + 1]
    candidates = scores_BC, tokens_BC, depth_BC - 1, depth_BC, kept
    expected += levels.chosen_nodes(*candidates, 1)
    made += chosen_nodes(*candidates, DEEPER)
    x_RV = torch.randperm(3 * _FEWEST_COLUMNS, **here).float().to(device)[None]
    expected += x_RV.topk(9)
    made += largest(x_RV, 9)
    pairs = zip(made, expected, strict=True)
    if not all(torch.allclose(one.double(), other.double(), atol=1e-4) for one, other in pairs):
        raise ArithmeticError("kernels of this package do not make the trees that torch makes")
    return True


_tried = Tried(lambda device: _agree(device), "trees go on by torch's own kernels")


def _like_level(
    scores_BF: Tensor,
    tokens_BFR: Tensor,
    log_probs_BFR: Tensor,
    paths_BFJ: Tensor,
    kept: int,
    asked: int,
    *others: object,
) -> Any:
    batch, length = len(scores_BF), paths_BFJ.shape[2] + 1
    above_BK, tokens_BK = (tokens_BFR.new_empty(batch, kept) for _ in range(2))
    paths_BAJ = tokens_BFR.new_empty(batch, asked, length)
    return scores_BF.new_empty(batch, kept), above_BK, tokens_BK, paths_BAJ


def _like_chosen(
    scores_BC: Tensor, tokens_BC: Tensor, parents: Tensor, depths: Tensor, nodes: int, _: float
) -> Any:
    batch = len(scores_BC)
    *whole, ranks_BN = (tokens_BC.new_empty(batch, nodes) for _ in range(4))
    ancestors_BNN = tokens_BC.new_empty(batch, nodes, nodes, dtype=torch.bool)
    scores = (scores_BC.new_empty(batch, nodes) for _ in range(2))
    return *whole, ancestors_BNN, *scores, ranks_BN


def _like_largest(x_RV: Tensor, count: int) -> Any:
    ids_RK = x_RV.new_empty(len(x_RV), count, dtype=torch.long)
    return x_RV.new_empty(len(x_RV), count), ids_RK


grown_level: Any = triton_operator(
    "grown_level(Tensor scores, Tensor tokens, Tensor log_probs, Tensor paths, int kept,"
    " int asked, bool merges, float surest, float never) -> (Tensor, Tensor, Tensor, Tensor)",
    "trees.triton_kernels.grow_level",
    _like_level,
)
chosen_nodes: Any = triton_operator(
    "chosen_nodes(Tensor scores, Tensor tokens, Tensor parents, Tensor depths, int nodes,"
    " float deeper) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "trees.triton_kernels.choose_nodes",
    _like_chosen,
)
largest: Any = triton_operator(
    "largest(Tensor x, int count) -> (Tensor, Tensor)",
    "trees.triton_largest.largest",
    _like_largest,
)
