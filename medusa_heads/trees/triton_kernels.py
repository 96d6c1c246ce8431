"""Best-first trees on a GPU: kernels in Triton, each of which does at once what torch would start
dozens of kernels for, on numbers so few that most of a GPU waits.

Shapes: B rows, F paths that go on, R offers behind each, J tokens of a path, K candidates that a
level keeps, C candidates of all levels, N tree nodes (root included).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from medusa_heads.machine.kernels import FUSED

_PAIRS = 16384  # of offers that are compared at once


def at_once(paths: int, ranks: int) -> int:
    """With how many offers behind its path each offer is compared at once."""
    return min(max(_PAIRS // (paths * ranks), 1), ranks)


def grow_level(
    scores_BF: Tensor,
    tokens_BFR: Tensor,
    log_probs_BFR: Tensor,
    paths_BFJ: Tensor,
    kept: int,
    asked: int,
    merges: bool,
    surest: float,
    never: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The likeliest `kept` of all offers behind all paths: scores, the paths that they stand
    behind, and tokens, [B, K] each; and the paths of the first `asked` of them."""
    batch, paths, ranks = tokens_BFR.shape
    length = paths_BFJ.shape[2]
    count = paths * ranks
    spare_BC = scores_BF.new_empty(batch, count)
    best_BK = scores_BF.new_empty(batch, kept)
    above_BK, own_BK = (tokens_BFR.new_empty(batch, kept) for _ in range(2))
    longer_BAJ = tokens_BFR.new_empty(batch, asked, length + 1)
    if scores_BF.stride(1) != 1:
        scores_BF = scores_BF.contiguous()
    block_F, block_R = triton.next_power_of_2(paths), triton.next_power_of_2(ranks)
    _grow_level[(batch,)](
        scores_BF,
        tokens_BFR.contiguous(),
        log_probs_BFR.contiguous(),
        paths_BFJ.contiguous(),
        spare_BC,
        best_BK,
        above_BK,
        own_BK,
        longer_BAJ,
        scores_BF.stride(0),
        paths,
        ranks,
        length,
        kept,
        asked,
        surest,
        never,
        MERGES=merges,
        BLOCK_F=block_F,
        BLOCK_R=block_R,
        BLOCK_S=at_once(block_F, block_R),
        BLOCK_C=triton.next_power_of_2(count),
        num_warps=8,
        **FUSED,
    )
    return best_BK, above_BK, own_BK, longer_BAJ


def choose_nodes(
    scores_BC: Tensor,
    tokens_BC: Tensor,
    parents_BC: Tensor,
    depth_BC: Tensor,
    nodes: int,
    deeper: float,
) -> tuple[Tensor, ...]:
    """The tree of the likeliest candidates: tokens, parents, depths, ancestors, log-probabilities,
    scores and ranks of its nodes, in the order of the candidates."""
    batch, count = scores_BC.shape
    spare_BC = scores_BC.new_empty(batch, count, dtype=torch.float)
    places_BC = tokens_BC.new_empty(batch, count)
    tokens_BN, parents_BN, depth_BN, ranks_BN, jumps_BN, words_BN = (
        tokens_BC.new_empty(batch, nodes) for _ in range(6)
    )
    log_probs_BN, path_scores_BN = (scores_BC.new_empty(batch, nodes) for _ in range(2))
    ancestors_BNN = tokens_BC.new_empty(batch, nodes, nodes, dtype=torch.bool)
    # Of one row a compiler may give another step, which a kernel of its own would be made for; that
    # cannot be loaded while a graph is recorded.
    row_step = depth_BC.stride(0) if batch > 1 else 0
    _choose_nodes[(batch,)](
        scores_BC.contiguous(),
        tokens_BC.contiguous(),
        parents_BC.contiguous(),
        depth_BC,
        spare_BC,
        places_BC,
        jumps_BN,
        words_BN,
        tokens_BN,
        parents_BN,
        depth_BN,
        ancestors_BNN,
        log_probs_BN,
        path_scores_BN,
        ranks_BN,
        row_step,
        depth_BC.stride(1),
        count,
        nodes,
        deeper,
        BLOCK_C=triton.next_power_of_2(count),
        BLOCK_N=triton.next_power_of_2(nodes),
        DOUBLINGS=(nodes - 1).bit_length(),
        num_warps=16,
        **FUSED,
    )
    return tokens_BN, parents_BN, depth_BN, ancestors_BNN, log_probs_BN, path_scores_BN, ranks_BN


@triton.jit
def _ranks_of(of_all, value_C, place_C, count, OTHERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many of these numbers, which lie behind a pointer too, are larger than each, or as large
    and before it."""
    rank_C = tl.zeros_like(place_C)
    for start in range(0, count, OTHERS):
        other_O = start + tl.arange(0, OTHERS)
        value_O = tl.load(of_all + other_O, mask=other_O < count, other=float("-inf"))
        larger_CO = value_O[None, :] > value_C[:, None]
        equal_CO = (value_O[None, :] == value_C[:, None]) & (other_O[None, :] < place_C[:, None])
        rank_C += tl.sum((larger_CO | equal_CO).to(tl.int32), 1)
    return rank_C


@triton.jit(do_not_specialize=["scores_b"])
def _grow_level(  # type: ignore[no-untyped-def]
    scores,
    tokens,
    log_probs,
    paths,
    spare,
    best,
    above,
    own,
    longer,
    scores_b,
    F,
    R,
    J,
    kept,
    asked,
    surest,
    never,
    MERGES: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    tokens += b * F * R
    log_probs += b * F * R
    spare += b * F * R
    paths += b * F * J
    f_F, r_R = tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_R)
    there_FR = (f_F < F)[:, None] & (r_R < R)[None, :]
    at_FR = f_F[:, None] * R + r_R[None, :]
    log_FR = tl.load(log_probs + at_FR, mask=there_FR, other=0.0).to(tl.float32)
    log_FR = tl.where(log_FR != log_FR, never, log_FR)
    if MERGES:  # each token once, and likelier where more say it
        token_FR = tl.load(tokens + at_FR, mask=there_FR, other=0)
        missed_FR = tl.zeros([BLOCK_F, BLOCK_R], tl.float32)  # log(1 - p), of all who say it
        earlier_FR = tl.zeros([BLOCK_F, BLOCK_R], tl.int32)  # who say it
        for start in range(0, R, BLOCK_S):
            s_S = start + tl.arange(0, BLOCK_S)
            there_FS = (f_F < F)[:, None] & (s_S < R)[None, :]
            at_FS = f_F[:, None] * R + s_S[None, :]
            token_FS = tl.load(tokens + at_FS, mask=there_FS, other=-1)
            log_FS = tl.load(log_probs + at_FS, mask=there_FS, other=never).to(tl.float32)
            chance_FS = tl.minimum(tl.exp(tl.where(log_FS != log_FS, never, log_FS)), surest)
            few_FS = -chance_FS * (1 + chance_FS * (0.5 + chance_FS * (1.0 / 3 + chance_FS * 0.25)))
            log_missed_FS = tl.where(chance_FS < 0.02, few_FS, tl.log(1.0 - chance_FS))
            same_FRS = token_FR[:, :, None] == token_FS[:, None, :]
            missed_FR += tl.sum(tl.where(same_FRS, log_missed_FS[:, None, :], 0.0), 2)
            earlier_FRS = same_FRS & (s_S[None, None, :] < r_R[None, :, None])
            earlier_FR += tl.sum(earlier_FRS.to(tl.int32), 2)
        first_FR = there_FR & (earlier_FR == 0)
        few_FR = -missed_FR * (1 + missed_FR * (0.5 + missed_FR * (1.0 / 6)))
        both_FR = tl.where(missed_FR > -0.02, few_FR, 1.0 - tl.exp(missed_FR))
        total_F = tl.sum(tl.where(first_FR, both_FR, 0.0), 1)
        logs_FR = tl.log(tl.maximum(both_FR / tl.maximum(total_F, 1.0)[:, None], 1e-30))
        logs_FR = tl.where(both_FR > 0, logs_FR, log_FR)
        log_FR = tl.where(first_FR, logs_FR, 2 * never)
    log_FR = tl.where(log_FR == float("-inf"), never, log_FR)
    score_F = tl.load(scores + b * scores_b + f_F, mask=f_F < F, other=0.0)
    tl.store(spare + at_FR, score_F[:, None] + log_FR, mask=there_FR)
    tl.debug_barrier()
    place_C = tl.arange(0, BLOCK_C)
    value_C = tl.load(spare + place_C, mask=place_C < F * R, other=float("-inf"))
    rank_C = _ranks_of(spare, value_C, place_C, F * R, 32)
    kept_C = (rank_C < kept) & (place_C < F * R)
    to_C = b * kept + rank_C
    above_C = place_C // R
    token_C = tl.load(tokens + place_C, mask=kept_C, other=0)
    tl.store(best + to_C, value_C, mask=kept_C)
    tl.store(above + to_C, above_C.to(tl.int64), mask=kept_C)
    tl.store(own + to_C, token_C, mask=kept_C)
    asked_C = (rank_C < asked) & (place_C < F * R)
    to_C = (b * asked + rank_C) * (J + 1)
    for j in range(0, J):
        before_C = tl.load(paths + above_C * J + j, mask=asked_C, other=0)
        tl.store(longer + to_C + j, before_C, mask=asked_C)
    tl.store(longer + to_C + J, token_C, mask=asked_C)


@triton.jit
def _choose_nodes(  # type: ignore[no-untyped-def]
    scores,
    tokens,
    parents,
    depths,
    spare,
    places,
    jumps,
    words,
    own_tokens,
    own_parents,
    own_depths,
    ancestors,
    own_log_probs,
    own_scores,
    own_ranks,
    depth_b,
    depth_c,
    C,
    N,
    deeper,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOUBLINGS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    scores += b * C
    spare += b * C
    places += b * C
    jumps += b * N
    words += b * N
    place_C = tl.arange(0, BLOCK_C)
    there_C = place_C < C
    depth_C = tl.load(depths + b * depth_b + place_C * depth_c, mask=there_C, other=0)
    score_C = tl.load(scores + place_C, mask=there_C, other=0.0).to(tl.float32)
    # Where a child is as likely as its parent, the parent comes first.
    value_C = score_C - deeper * depth_C.to(tl.float32)
    tl.store(spare + place_C, value_C, mask=there_C)
    tl.debug_barrier()
    # As it stands there: rounded otherwise, two might have one rank.
    value_C = tl.load(spare + place_C, mask=there_C, other=float("-inf"))
    rank_C = _ranks_of(spare, value_C, place_C, C, 32)
    chosen_C = (rank_C < N) & there_C
    node_C = tl.cumsum(chosen_C.to(tl.int32), 0) - chosen_C.to(tl.int32)
    tl.store(places + place_C, tl.minimum(node_C, N - 1), mask=there_C)
    tl.debug_barrier()
    parent_C = tl.maximum(tl.load(parents + b * C + place_C, mask=chosen_C, other=0), 0)
    above_C = tl.load(places + parent_C, mask=chosen_C, other=0).to(tl.int64)
    before_C = tl.load(scores + parent_C, mask=chosen_C, other=0.0)
    token_C = tl.load(tokens + b * C + place_C, mask=chosen_C, other=0)
    to_C = b * N + node_C
    tl.store(own_tokens + to_C, token_C, mask=chosen_C)
    tl.store(own_parents + to_C, tl.where(depth_C > 0, above_C, -1), mask=chosen_C)
    tl.store(own_depths + to_C, depth_C, mask=chosen_C)
    tl.store(own_log_probs + to_C, score_C - before_C, mask=chosen_C)
    tl.store(own_scores + to_C, score_C, mask=chosen_C)
    tl.store(own_ranks + to_C, rank_C.to(tl.int64), mask=chosen_C)
    tl.store(jumps + node_C, above_C, mask=chosen_C)
    # Each node's ancestors as bits, found by looking back twice as far again and again.
    node_N = tl.arange(0, BLOCK_N)
    there_N = node_N < N
    word_N = tl.full([BLOCK_N], 1, tl.int64) << node_N.to(tl.int64)
    tl.store(words + node_N, word_N, mask=there_N)
    tl.debug_barrier()
    for _ in tl.static_range(DOUBLINGS):
        jump_N = tl.load(jumps + node_N, mask=there_N, other=0)
        word_N = word_N | tl.load(words + jump_N, mask=there_N, other=0)
        jump_N = tl.load(jumps + jump_N, mask=there_N, other=0)
        tl.debug_barrier()
        tl.store(words + node_N, word_N, mask=there_N)
        tl.store(jumps + node_N, jump_N, mask=there_N)
        tl.debug_barrier()
    is_above_NN = (word_N[:, None] >> node_N.to(tl.int64)[None, :]) & 1
    at_NN = b * N * N + node_N[:, None] * N + node_N[None, :]
    tl.store(ancestors + at_NN, is_above_NN != 0, mask=there_N[:, None] & there_N[None, :])
