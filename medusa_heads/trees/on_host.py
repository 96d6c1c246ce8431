"""The best tree for this very step where tensors lie in the host's memory: numpy takes a part of
the time that torch takes for so few numbers, and the host may look at them between levels.

Shapes: as in levels.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medusa_heads.trees.dynamic_tree import Guess
from medusa_heads.trees.levels import DEEPER, NEVER
from medusa_heads.trees.tree import Ranked, TokenTree

_BITS = 63  # nodes whose ancestors are bits of one word
_Array = np.ndarray[Any, Any]


def best_first_on_host(
    roots_B: Tensor, guess: Guess, num_drafted: int, num_levels: int, width: int | None = None
) -> TokenTree:
    """The tree that `best_first_tree` makes, of tensors on a CPU. Paths that can be in no tree any
    more are not asked to go on, and a level without any other is the last. Shapes are not fixed,
    and no compiler sees what is done."""
    batch, root_B1 = len(roots_B), roots_B[:, None]
    rows_B1 = np.arange(batch)[:, None]
    scores_BF = np.zeros((batch, 1), dtype=np.float32)
    asked_BF, paths_BFJ = torch.zeros_like(root_B1), root_B1[:, None]
    scores, parents, tokens = [scores_BF], [np.full((batch, 1), -1)], [root_B1.numpy()]
    first = 0  # of the paths that are asked, among all candidates: the likeliest of their level
    for level in range(num_levels):
        tokens_BFR, log_probs_BFR = (each.numpy() for each in guess(level, paths_BFJ, asked_BF))
        if not np.isfinite(log_probs_BFR).all():  # no number would come before all that are
            log_probs_BFR = np.nan_to_num(log_probs_BFR, nan=NEVER, neginf=NEVER)
        offered_BC = (scores_BF[:, :, None] + log_probs_BFR).reshape(batch, -1)
        best_BK = (-offered_BC).argsort(axis=1, kind="stable")[:, :num_drafted]
        above_BK, rank_BK = np.divmod(best_BK, tokens_BFR.shape[2])
        scores.append(offered_BC[rows_B1, best_BK])
        parents.append(above_BK + first)
        tokens.append(tokens_BFR[rows_B1, above_BK, rank_BK])
        first += scores[-2].shape[1]
        if level + 1 == num_levels:
            break
        most = min(_hopeful(scores, num_drafted), width or num_drafted)
        if not most:
            break
        scores_BF, above_BF = scores[-1][:, :most], above_BK[:, :most]
        before_BFJ, own_BF1 = paths_BFJ.numpy()[rows_B1, above_BF], tokens[-1][:, :most, None]
        paths_BFJ = torch.from_numpy(np.concatenate([before_BFJ, own_BF1], axis=2))
        asked_BF = torch.from_numpy(above_BF)
    return _chosen(scores, parents, tokens, num_drafted + 1)


def _hopeful(scores: Sequence[_Array], num_drafted: int) -> int:
    """How many paths of the last level are among the likeliest of all as yet, in the row that has
    the most; of the others none will be, nor what comes behind them."""
    ranked = [each_BK - DEEPER * (1 + depth) for depth, each_BK in enumerate(scores[1:])]
    ranked_BC, last_BK = np.concatenate(ranked, axis=1), ranked[-1]
    if ranked_BC.shape[1] <= num_drafted:
        return last_BK.shape[1]
    least_B1 = np.partition(ranked_BC, -num_drafted, axis=1)[:, -num_drafted, None]
    return int((last_BK >= least_B1).sum(axis=1).max())


def _chosen(
    scores: Sequence[_Array], parents: Sequence[_Array], tokens: Sequence[_Array], nodes: int
) -> TokenTree:
    """The tree of so many of the likeliest candidates of all levels. See `levels.chosen_nodes`."""
    depth_C = np.repeat(np.arange(len(scores)), [each_BK.shape[1] for each_BK in scores])
    scores_BC, parents_BC, tokens_BC = (
        np.concatenate(each, axis=1) for each in (scores, parents, tokens)
    )
    rows_B1 = np.arange(len(scores_BC))[:, None]
    ranked_BC = scores_BC - np.float32(DEEPER) * depth_C.astype(np.float32)
    order_BN = (-ranked_BC).argsort(axis=1, kind="stable")[:, :nodes]
    ranks_BN = order_BN.argsort(axis=1)
    chosen_BN = order_BN[rows_B1, ranks_BN]
    nodes_N, places_BC = np.arange(nodes), np.zeros_like(parents_BC)
    places_BC[rows_B1, chosen_BN] = nodes_N
    parents_BN = parents_BC[rows_B1, chosen_BN]
    parents_BN[:, 0] = 0  # the root stands above itself
    above_BN = places_BC[rows_B1, parents_BN]
    path_scores_BN = scores_BC[rows_B1, chosen_BN]
    ancestors_BNN = _ancestors(above_BN, len(scores))
    parents_BN[:, 1:], parents_BN[:, 0] = above_BN[:, 1:], -1
    log_probs_BN = path_scores_BN - path_scores_BN[rows_B1, above_BN]
    return TokenTree(
        torch.from_numpy(tokens_BC[rows_B1, chosen_BN]),
        torch.from_numpy(parents_BN),
        torch.from_numpy(depth_C[chosen_BN]),
        torch.from_numpy(ancestors_BNN),
        torch.from_numpy(log_probs_BN),
        ranked=Ranked(torch.from_numpy(path_scores_BN), torch.from_numpy(ranks_BN)),
    )


def _ancestors(above_BN: _Array, levels: int) -> _Array:
    """The ancestor mask, by doubling the distance looked back."""
    rows_B1, nodes_N = np.arange(len(above_BN))[:, None], np.arange(above_BN.shape[1])
    if len(nodes_N) > _BITS:
        own = np.eye(len(nodes_N), dtype=bool)[None].repeat(len(above_BN), axis=0)
    else:
        own = (1 << nodes_N)[None].repeat(len(above_BN), axis=0)
    jump_BN, reach = above_BN, 1
    while reach < levels:
        own = own | own[rows_B1, jump_BN]
        jump_BN, reach = jump_BN[rows_B1, jump_BN], 2 * reach
    return own if own.ndim == 3 else (own[..., None] >> nodes_N) & 1 != 0
