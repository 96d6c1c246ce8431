"""Where the heads' guesses hold the true tokens: what evaluation counts.

Shapes: R rows, C rows of a chunk, K heads, D hidden, V vocabulary of the heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medusa_heads.config import IGNORED
from medusa_heads.heads import DraftHeads
from medusa_heads.training.loss.fused import chunk_pairs
from medusa_heads.training.loss.rows import SupervisedRows


@torch.no_grad()
def head_ranks(heads: DraftHeads, hidden_RD: Tensor, rows: SupervisedRows, max_rank: int) -> Tensor:
    """The rank each head gave the true token: 0 for its top-1, `max_rank` for all at or beyond.

    Equal logits, common in bf16, rank by token id; a token that the heads cannot draft ranks last.
    Features and logits exist for one chunk of rows at a time.

    Returns:
        ranks_RK, int64, -100 where the rows' labels are.
    """
    labels_RK = rows.labels_RK
    drafted_RK = heads.draft_ids(labels_RK)
    ranks_RK = torch.full_like(labels_RK, IGNORED)
    dtype = heads.vocab_matrix(0)[0].dtype
    size = chunk_pairs(heads.config.num_candidates, hidden_RD.device.type, dtype)
    for start in range(0, len(labels_RK), size):
        chunk = slice(start, start + size)
        features_CKD = heads.features(hidden_RD[chunk], rows.tokens_RK[chunk])
        for i in range(labels_RK.shape[1]):
            rank_C = _ranks(heads.project(i, features_CKD[:, i]), drafted_RK[chunk, i], max_rank)
            ranks_RK[chunk, i] = rank_C.where(labels_RK[chunk, i] != IGNORED, IGNORED)
    return ranks_RK


def _ranks(logits_CV: Tensor, drafted_C: Tensor, max_rank: int) -> Tensor:
    label_C1 = drafted_C[:, None].clamp(min=0)
    true_C1 = logits_CV.gather(1, label_C1)
    tokens_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    ahead_CV = (logits_CV > true_C1) | ((logits_CV == true_C1) & (tokens_V < label_C1))
    ranks_C = ahead_CV.sum(dim=1).clamp(max=max_rank)
    return ranks_C.where(drafted_C != IGNORED, max_rank)
