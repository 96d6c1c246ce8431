"""The best tree for this very step: best-first expansion over the heads' probabilities.

Shapes: B batch, K heads, R ranks, N tree nodes (root included), F frontier, C all candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medusa_heads.tree import TokenTree

DYNAMIC_RANKS = 16  # candidates of each head that a dynamic tree chooses from
DYNAMIC_SIZES = (3, 7, 11, 15, 23, 31, 47, 63)  # drafted nodes measured when heads are trained


def best_first_tree(
    roots_B: Tensor, candidates_BKR: Tensor, log_probs_BKR: Tensor, num_drafted: int
) -> TokenTree:
    """The tree of `num_drafted` nodes with the largest expected number of accepted tokens.

    Heads predict independently of each other, so a path's probability is the product of its nodes'.
    A child is never likelier than its parent, hence the likeliest `num_drafted` paths form a tree,
    and each level need keep no more than that many. All rows are expanded at once, level by level:
    no loop over nodes.

    Args:
        roots_B: last committed token of each row.
        candidates_BKR: each head's best tokens, best first.
        log_probs_BKR: their log-probabilities.
        num_drafted: nodes besides the root; at most the K levels' sum of R**level.

    Returns:
        A tree per row, all of the same size; nodes in order of depth.
    """
    batch, heads, ranks = candidates_BKR.shape
    device = roots_B.device
    scores_BF = torch.zeros(batch, 1, device=device)
    places_BF = torch.zeros(batch, 1, dtype=torch.long, device=device)  # among all candidates
    scores, parents, tokens, depths = [scores_BF], [places_BF - 1], [roots_B[:, None]], [0]
    added = 1
    for level in range(heads):
        expanded_BFR = scores_BF[:, :, None] + log_probs_BKR[:, level, None, :].float()
        kept = min(num_drafted, expanded_BFR.shape[1] * ranks)
        scores_BF, flat_BF = expanded_BFR.flatten(1).topk(kept, dim=1)
        parents.append(places_BF.gather(1, flat_BF // ranks))
        tokens.append(candidates_BKR[:, level].gather(1, flat_BF % ranks))
        places_BF = torch.arange(added, added + kept, device=device).expand(batch, -1)
        scores.append(scores_BF)
        depths += [level + 1] * kept
        added += kept
    depth_C = torch.tensor(depths, device=device)
    # Where a child is as likely as its parent (probability 1), the parent must come first.
    ranked_BC = torch.cat(scores, dim=1) - 1e-6 * depth_C
    chosen_BN = ranked_BC.topk(num_drafted + 1, dim=1).indices.sort(dim=1).values
    places_BC = torch.zeros(batch, added, dtype=torch.long, device=device)
    places_BC.scatter_(1, chosen_BN, torch.arange(num_drafted + 1, device=device).expand(batch, -1))
    old_parents_BN = torch.cat(parents, dim=1).gather(1, chosen_BN)
    above_BN = places_BC.gather(1, old_parents_BN.clamp_min(0))  # the root stands above itself
    path_scores_BN = torch.cat(scores, dim=1).gather(1, chosen_BN)
    parents_BN = above_BN.clone()
    parents_BN[:, 0] = -1
    return TokenTree(
        tokens_BN=torch.cat(tokens, dim=1).gather(1, chosen_BN),
        parents_BN=parents_BN,
        depth_BN=depth_C[chosen_BN],
        ancestors_BNN=_ancestors(above_BN, heads),
        log_probs_BN=path_scores_BN - path_scores_BN.gather(1, above_BN),
    )


def _ancestors(above_BN: Tensor, max_depth: int) -> Tensor:
    """The ancestor mask, by doubling the distance looked back."""
    batch, nodes = above_BN.shape
    ancestors_BNN = torch.eye(nodes, dtype=torch.bool, device=above_BN.device).repeat(batch, 1, 1)
    jump_BN, reach = above_BN, 1
    while reach <= max_depth:
        ancestors_BNN = ancestors_BNN | ancestors_BNN.gather(
            1, jump_BN[:, :, None].expand(-1, -1, nodes)
        )
        jump_BN = jump_BN.gather(1, jump_BN)
        reach *= 2
    return ancestors_BNN


def expected_tokens_per_step(
    log_probs_SKR: Tensor, ranks_SK: Tensor, num_drafted: int, chunk: int = 1024
) -> float:
    """1 + the mean number of accepted nodes of dynamic trees at measured positions.

    Args:
        log_probs_SKR: at S positions, each head's calibrated log-probabilities, best first.
        ranks_SK: the rank of the true token under each head.
        num_drafted: nodes of each tree besides the root.
        chunk: positions handled at a time, which bounds memory and nothing else.
    """
    positions, heads, ranks = log_probs_SKR.shape
    accepted = 0
    for start in range(0, positions, chunk):
        log_probs_BKR = log_probs_SKR[start : start + chunk]
        true_BK = ranks_SK[start : start + chunk]
        batch = len(log_probs_BKR)
        own_ranks_BKR = torch.arange(ranks, device=true_BK.device).expand(batch, heads, ranks)
        roots_B = true_BK.new_zeros(batch)
        tree = best_first_tree(roots_B, own_ranks_BKR, log_probs_BKR, num_drafted)
        right_BN = tree.tokens_BN == true_BK.gather(1, (tree.depth_BN - 1).clamp_min(0))
        right_BN[:, 0] = True
        kept_BN = ~(~right_BN[:, None] & tree.ancestors_BNN).any(-1)
        accepted += int(kept_BN[:, 1:].sum())
    return 1 + accepted / positions
