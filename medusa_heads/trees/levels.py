"""How a best-first tree grows and what is chosen of it, as torch does it; on a GPU see kernels.py.

Shapes: B rows, F paths that go on, R offers behind each, J tokens of a path, K candidates that a
level keeps, A paths of them that are asked to go on, C candidates of all levels, N tree nodes (root
included).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NEVER = -1e30  # the score of a path that has none
SUREST = 0.999  # no draft is certain
DEEPER = 1e-6  # of a score, for each level: more than rounding, less than any probability matters
_BITS = 64


class Level(NamedTuple):
    """The likeliest candidates of one depth, best first."""

    scores_BK: Tensor  # log-probabilities of their paths
    above_BK: Tensor  # the paths that they stand behind
    tokens_BK: Tensor  # their own
    paths_BAJ: Tensor  # of the likeliest, with their own tokens


class Chosen(NamedTuple):
    """A tree, as `TokenTree` has it; `path_scores_BN` and `ranks_BN` as `Ranked` has them."""

    tokens_BN: Tensor
    parents_BN: Tensor
    depth_BN: Tensor
    ancestors_BNN: Tensor
    log_probs_BN: Tensor
    path_scores_BN: Tensor
    ranks_BN: Tensor


def grown_level(
    scores_BF: Tensor,
    tokens_BFR: Tensor,
    log_probs_BFR: Tensor,
    paths_BFJ: Tensor,
    kept: int,
    asked: int,
    merges: bool,
) -> Level:
    """The likeliest `kept` of all offers behind all paths, and the paths of the first `asked`.

    Args:
        scores_BF: of the paths.
        tokens_BFR, log_probs_BFR: what is offered behind each.
        merges: whether a token may be offered twice behind a path; see `merged`.
    """
    if merges:
        log_probs_BFR = merged(tokens_BFR, log_probs_BFR)
    # What is no number would come before all that are, its own parent among them.
    log_probs_BFR = log_probs_BFR.nan_to_num(nan=NEVER, neginf=NEVER)
    best_BK, flat_BK = (scores_BF.unsqueeze(2) + log_probs_BFR).flatten(1).topk(kept, dim=1)
    above_BK = flat_BK // tokens_BFR.shape[2]
    tokens_BK = tokens_BFR.flatten(1).gather(1, flat_BK)
    if asked:
        paths_BFJ = longer(paths_BFJ, above_BK.narrow(1, 0, asked), tokens_BK.narrow(1, 0, asked))
    return Level(best_BK, above_BK, tokens_BK, paths_BFJ)


def longer(paths_BFJ: Tensor, above_BA: Tensor, tokens_BA: Tensor) -> Tensor:
    """Paths, each with one more token."""
    above_BAJ = above_BA.unsqueeze(2).expand(-1, -1, paths_BFJ.shape[2])
    return torch.cat([paths_BFJ.gather(1, above_BAJ), tokens_BA.unsqueeze(2)], dim=2)


def merged(tokens_BFR: Tensor, log_probs_BFR: Tensor) -> Tensor:
    """Log-probabilities of the same offers with each token once: sources that agree are right more
    often."""
    # What is no number would leave none of what others offer.
    log_probs_BFR = log_probs_BFR.nan_to_num(nan=NEVER, neginf=NEVER)
    same_BFRR = tokens_BFR[..., :, None] == tokens_BFR[..., None, :]
    first_BFR = ~same_BFRR.tril(-1).any(dim=-1)  # none of the earlier ones is this token
    missed_BFR = torch.log1p(-log_probs_BFR.exp().clamp_max(SUREST))
    both_BFR = -torch.expm1((missed_BFR[..., None, :] * same_BFRR).sum(dim=-1))
    total_BF1 = both_BFR.where(first_BFR, 0.0).sum(dim=-1, keepdim=True)
    logs_BFR = (both_BFR / total_BF1.clamp_min(1.0)).clamp_min(1e-30).log()
    # What nobody offers stays so, and still comes before what is there already.
    logs_BFR = logs_BFR.where(both_BFR > 0, log_probs_BFR)
    return logs_BFR.where(first_BFR, 2 * NEVER)


def chosen_nodes(
    scores_BC: Tensor,
    tokens_BC: Tensor,
    parents_BC: Tensor,
    depth_BC: Tensor,
    nodes: int,
    max_depth: int,
) -> Chosen:
    """The tree of so many of the likeliest candidates, which stand in their order.

    Args:
        scores_BC: of the paths; the first candidate is the root, and no child's is larger than its
            parent's.
        parents_BC: places of candidates; -1 of the root.
        depth_BC: no parent's is larger.
        max_depth: of all candidates.
    """
    # Where a child is as likely as its parent (probability 1), the parent must come first: it does
    # in a stable order, also where scores are too large for the difference.
    order_BC = (scores_BC - DEEPER * depth_BC).argsort(dim=1, descending=True, stable=True)
    chosen_BN, ranks_BN = order_BC[:, :nodes].sort(dim=1)
    # All parents are among the chosen, which are in order; the root stands above itself.
    above_BN = torch.searchsorted(chosen_BN, parents_BC.gather(1, chosen_BN))
    path_scores_BN, depth_BN = scores_BC.gather(1, chosen_BN), depth_BC.gather(1, chosen_BN)
    return Chosen(
        tokens_BC.gather(1, chosen_BN),
        above_BN.where(depth_BN > 0, -1),
        depth_BN,
        _ancestors(above_BN, max_depth),
        path_scores_BN - path_scores_BN.gather(1, above_BN),
        path_scores_BN,
        ranks_BN,
    )


def _ancestors(above_BN: Tensor, max_depth: int) -> Tensor:
    """The ancestor mask, by doubling the distance looked back."""
    nodes_N = torch.arange(above_BN.shape[1], device=above_BN.device)
    if len(nodes_N) > _BITS:
        own_BNX = (nodes_N[:, None] == nodes_N).expand(len(above_BN), -1, -1)
    else:  # as bits of one word
        own_BNX = torch.ones_like(above_BN).bitwise_left_shift_(nodes_N).unsqueeze(2)
    wide, jump_BN, reach = own_BNX.shape[2], above_BN, 1
    while reach <= max_depth:
        own_BNX = own_BNX | own_BNX.gather(1, jump_BN.unsqueeze(2).expand(-1, -1, wide))
        reach *= 2
        if reach <= max_depth:
            jump_BN = jump_BN.gather(1, jump_BN)
    return own_BNX if wide > 1 else ((own_BNX >> nodes_N) & 1).bool()
