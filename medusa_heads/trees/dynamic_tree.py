"""The best tree for this very step: best-first expansion over what heads take to follow.

Shapes: B batch, F frontier: paths drafted so far, J tokens of a path (the root first), K heads,
R ranks, N tree nodes (root included), C candidates, S measured positions, L tokens of a tail,
D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from medusa_heads.heads import DraftHeads
from medusa_heads.heads.base import After
from medusa_heads.trees.kernels import best, choose, chooses, grow
from medusa_heads.trees.levels import NEVER, Chosen, merged
from medusa_heads.trees.tree import Ranked, TokenTree, TreeShape

DYNAMIC_RANKS = 16  # candidates of each head that a dynamic tree chooses from
DYNAMIC_SIZES = (3, 7, 11, 15, 23, 31, 47, 63)  # drafted nodes measured when heads are trained
DYNAMIC_WIDTH = 10  # paths that sequential heads are asked to continue at each level

# The candidates for the token at depth `level` + 1, after every path [B, F, J = level + 1], each of
# which stands behind a path of the level above [B, F]: token ids and log-probabilities, each
# [B, F, R]; best first, unless several offer them.
Guess = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


class Tail(NamedTuple):
    """One path behind the root, which is known beyond the levels on which a tree branches."""

    tokens_BL: Tensor  # of the path
    log_probs_BL: Tensor  # of each, if those before it are right; NEVER where there is none


class Ranking:
    """Which candidates heads have: the tokens that they take to be likeliest, each head's logits
    divided by its temperature."""

    def __init__(self, heads: DraftHeads, temperatures: Sequence[float]) -> None:
        self.heads, self._temperatures = heads, list(temperatures)
        self._inverse_K = torch.empty(0)  # on the heads' device, once it is known

    def best(
        self,
        logits_BFC: Tensor,
        num_ranks: int,
        level: int | None = None,
        places_BC: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Token ids and log-probabilities [B, F, R], best first, of logits that are all for the
        token at depth `level` + 1; without a level, F counts the heads. Places are as those of
        `After`."""
        if self._inverse_K.device != logits_BFC.device or not len(self._inverse_K):
            every = [1 / each for each in self._temperatures]
            self._inverse_K = logits_BFC.new_tensor(every, dtype=torch.float32)
        inverse = self._inverse_K if level is None else self._inverse_K[level : level + 1]
        log_probs_BFC = (logits_BFC.float() * inverse[:, None]).log_softmax(dim=-1)
        best_BFR, ids_BFR = best(log_probs_BFC, num_ranks)
        return self.tokens(ids_BFR, places_BC), best_BFR

    def tokens(self, ids_BFR: Tensor, places_BC: Tensor | None = None) -> Tensor:
        """The token ids of some of the logits, by where they stand among them."""
        if places_BC is not None:
            ids_BFR = places_BC.gather(1, ids_BFR.flatten(1)).view_as(ids_BFR)
        return self.heads.token_ids(ids_BFR)


def guesses(ranking: Ranking, after: After, num_ranks: int) -> Guess:
    """The guesses of sequential heads, as many after each path."""

    def after_path(level: int, paths_BFJ: Tensor, above_BF: Tensor) -> tuple[Tensor, Tensor]:
        logits_BFC, places_BC = after(level, paths_BFJ, above_BF)
        return ranking.best(logits_BFC, num_ranks, level, places_BC)

    return after_path


def same_guesses(ranking: Ranking, hidden_BD: Tensor, num_ranks: int) -> Guess:
    """Those of heads that do not see each other, likewise, from hidden states as `heads.encode`
    left them."""
    tokens_BKR, log_probs_BKR = ranking.best(ranking.heads(hidden_BD), num_ranks)

    def of_level(level: int, paths_BFJ: Tensor, above_BF: Tensor) -> tuple[Tensor, Tensor]:
        shape = (-1, paths_BFJ.shape[1], -1)
        return tokens_BKR[:, level, None].expand(shape), log_probs_BKR[:, level, None].expand(shape)

    return of_level


def best_first_tree(
    roots_B: Tensor,
    guess: Guess,
    num_drafted: int,
    num_levels: int,
    width: int | None = None,
    tail: Tail | None = None,
    merges: bool = False,
) -> TokenTree:
    """The tree of `num_drafted` nodes with the largest expected number of accepted tokens.

    A path's probability is the product of its nodes'. A child is never likelier than its parent,
    hence the likeliest `num_drafted` paths form a tree, and each level need keep no more than that
    many. All rows are expanded at once, level by level: no loop over nodes. The guesses make at
    least as many nodes. At a `width`, only so many paths of each level, the likeliest, are asked to
    go on; where asking costs, little is lost by it. What a tail has beyond the levels is added
    where the tree has the tail's beginning. Nodes stand in order of depth.
    """
    scores_BF = torch.zeros(len(roots_B), 1, dtype=torch.float, device=roots_B.device)
    asked_BF = torch.zeros_like(scores_BF, dtype=torch.long)  # the root stands behind no other
    paths_BFJ = roots_B[:, None, None]
    scores, tokens = [scores_BF], [roots_B[:, None]]
    above: list[tuple[Tensor, int]] = [(asked_BF, -1)]  # and where what they count begins
    first, count = 0, 1  # of the paths that are asked, among all candidates; of candidates
    for level in range(num_levels):
        tokens_BFR, log_probs_BFR = guess(level, paths_BFJ, asked_BF)
        kept = min(num_drafted, tokens_BFR.shape[1] * tokens_BFR.shape[2])
        most = 0 if level + 1 == num_levels else min(kept, width or kept)
        given = scores_BF, tokens_BFR, log_probs_BFR, paths_BFJ, kept, most
        scores_BF, above_BF, tokens_BF, longer_BFJ = grow(*given, merges)
        above.append((above_BF, first))
        tokens.append(tokens_BF)
        scores.append(scores_BF)
        first, count = count, count + kept
        if most:
            scores_BF, asked_BF, paths_BFJ = scores_BF[:, :most], above_BF[:, :most], longer_BFJ
    # All at once: what is made for each level by itself is a kernel each on a GPU.
    depths = [torch.full_like(of_level[0], level) for level, (of_level, _) in enumerate(above)]
    parents = [of_level + begins for of_level, begins in above]
    further = 0 if tail is None else tail.tokens_BL.shape[1] - num_levels
    if tail is not None and further > 0:
        *_, last_B1 = tail.tokens_BL[:, :num_levels].split(1, dim=1)
        begun_BF = (paths_BFJ[:, :, 1:] == tail.tokens_BL[:, None, : num_levels - 1]).all(dim=-1)
        begun_BF = begun_BF.gather(1, above_BF) & (tokens_BF == last_B1)
        start_B1, place_B1 = scores_BF.where(begun_BF, 2 * NEVER).max(dim=1, keepdim=True)
        # Where nothing begins it, it stands behind any path, which must be chosen before it.
        start_B1 = start_B1.minimum(scores_BF.gather(1, place_B1))
        scores.append(start_B1 + tail.log_probs_BL[:, num_levels:].cumsum(dim=1))
        tokens.append(tail.tokens_BL[:, num_levels:])
        behind_L = torch.arange(count, count + further - 1, device=roots_B.device)
        parents += [first + place_B1, behind_L.expand(len(roots_B), -1)]
        depths.append(num_levels + 1 + torch.arange(further, device=roots_B.device))
    scores_BC, depth_BC = torch.cat(scores, dim=1), torch.cat(depths).expand(len(roots_B), -1)
    parents_BC, tokens_BC = torch.cat(parents, dim=1), torch.cat(tokens, dim=1)
    most_deep = num_levels + max(further, 0)
    candidates = scores_BC, tokens_BC, parents_BC, depth_BC
    return _tree(choose(*candidates, num_drafted + 1, most_deep))


def _tree(chosen: Chosen) -> TokenTree:
    return TokenTree(
        chosen.tokens_BN,
        chosen.parents_BN,
        chosen.depth_BN,
        chosen.ancestors_BNN,
        chosen.log_probs_BN,
        ranked=Ranked(chosen.path_scores_BN, chosen.ranks_BN),
    )


def best_chain(roots_B: Tensor, guess: Guess, shape: TreeShape, merges: bool = False) -> TokenTree:
    """A chain of this shape, each node the likeliest behind those before it."""
    path_B1J, above_B1 = roots_B[:, None, None], torch.zeros_like(roots_B[:, None])
    log_probs = [torch.zeros_like(above_B1, dtype=torch.float)]
    for level in range(shape.max_depth):
        tokens_B1R, log_probs_B1R = guess(level, path_B1J, above_B1)
        if merges:
            log_probs_B1R = merged(tokens_B1R, log_probs_B1R)
        best_B11, place_B11 = log_probs_B1R.nan_to_num(nan=NEVER).max(dim=2, keepdim=True)
        path_B1J = torch.cat([path_B1J, tokens_B1R.gather(2, place_B11)], dim=2)
        log_probs.append(best_B11[:, 0])
    return shape.tree(path_B1J[:, 0], torch.cat(log_probs, dim=1))


def likeliest(tree: TokenTree, nodes: int) -> tuple[TokenTree, Tensor]:
    """So many of a best-first tree's likeliest nodes, root included: the best-first tree of that
    size. And the tokens expected to be accepted [B, N] of the 0, 1, 2, .. likeliest."""
    assert tree.ranked is not None
    scores_BN, ranks_BN = tree.ranked
    numbers_N = torch.arange(tree.num_nodes, device=ranks_BN.device)
    among_BNN = ranks_BN[:, None] <= numbers_N[:, None]
    expected_BN = (scores_BN.exp()[:, None] * among_BNN).sum(dim=2) - 1.0  # the root is no draft
    if nodes == tree.num_nodes:
        return tree, expected_BN
    if chooses(scores_BN, nodes):
        given = scores_BN, tree.tokens_BN, tree.parents_BN, tree.depth_BN
        return _tree(choose(*given, nodes, tree.num_nodes)), expected_BN
    # Their places, in the order of the places: of the others none is smaller.
    chosen_BN = numbers_N.where(ranks_BN < nodes, tree.num_nodes).sort(dim=1).values
    chosen_BM = chosen_BN[:, :nodes].contiguous()
    above_BM = tree.parents_BN.clamp_min(0).gather(1, chosen_BM)
    depth_BM = tree.depth_BN.gather(1, chosen_BM)
    columns_BNM = chosen_BM[:, None].expand(-1, tree.num_nodes, -1)
    rows_BMM = chosen_BM[:, :, None].expand(-1, -1, nodes)
    smaller = TokenTree(
        tokens_BN=tree.tokens_BN.gather(1, chosen_BM),
        parents_BN=torch.searchsorted(chosen_BM, above_BM).where(depth_BM > 0, -1),
        depth_BN=depth_BM,
        ancestors_BNN=tree.ancestors_BNN.gather(2, columns_BNM).gather(1, rows_BMM),
    )
    return smaller, expected_BN


def accepted_by_size(tree: TokenTree, true_BK: Tensor, sizes: Sequence[int]) -> list[int]:
    """How many drafted nodes of best-first trees of each size would have been accepted. The
    likeliest n nodes of a larger tree are the tree of n nodes, so one proposal answers for all
    sizes. `true_BK` are the tokens that did follow the root; all rows are counted together."""
    right_BN = tree.tokens_BN == true_BK.gather(1, (tree.depth_BN - 1).clamp_min(0))
    right_BN[:, 0] = True
    kept_BN = ~(~right_BN[:, None] & tree.ancestors_BNN).any(-1)
    assert tree.ranked is not None
    kept_by_rank_BN = torch.zeros_like(kept_BN).scatter(1, tree.ranked.ranks_BN, kept_BN)
    return [int(kept_by_rank_BN[:, 1 : size + 1].sum()) for size in sizes]
