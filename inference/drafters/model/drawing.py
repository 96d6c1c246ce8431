"""Drawing a draft: from the draft model's logits, as the target's tokens are drawn from its own.

Shapes: B active rows, F nodes, J tokens of a path behind the committed text, R tokens drawn behind
a node, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LogitsProcessorList

from medusa_heads.inference.acceptance.base import look_at_one_row, look_at_scores_alone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from medusa_heads.inference.engine.rows import Row


def draft_probs(
    logits_BFV: Tensor,
    paths_BFJ: Tensor,
    rows: Sequence[Row],
    warpers: LogitsProcessorList | None,
    vocab_size: int,
) -> Tensor:
    """The distributions [B, F, V] to draw from behind each node, in fp32.

    Args:
        logits_BFV: of the draft model, whose vocabulary matrix may have another number of rows.
        paths_BFJ: each node's drafted tokens behind the committed text.
        rows: the committed text.
        warpers: the target's logits processors, where its tokens are drawn.
        vocab_size: of the target.
    """
    logits_BFV = logits_BFV[..., :vocab_size].to(dtype=torch.float32, copy=True)
    missing = vocab_size - logits_BFV.shape[2]
    logits_BFV = F.pad(logits_BFV, (0, missing), value=float("-inf")) if missing else logits_BFV
    asked = _predictable(warpers or LogitsProcessorList())
    if look_at_scores_alone(asked):
        ids: Any = paths_BFJ.flatten(0, 1)
        scores: Any = logits_BFV.flatten(0, 1)
        return torch.softmax(asked(ids, scores), dim=-1).view_as(logits_BFV)
    for row, logits_FV, paths_FJ in zip(rows, logits_BFV, paths_BFJ, strict=True):
        text_1T = row.ids_1T()
        for node, path_J in enumerate(paths_FJ):
            ids = torch.cat([text_1T, path_J[None].to(text_1T.device)], dim=1)
            scores = logits_FV[node, None].clone()
            logits_FV[node] = asked(ids.to(scores.device), scores)[0]
    return torch.softmax(logits_BFV, dim=-1)


def _predictable(warpers: LogitsProcessorList) -> LogitsProcessorList:
    """Those of them that can be asked about a text that may never be: what they say follows from
    one row's text alone. Others may count the times they are called, or run the model; drafts go
    without them, which costs acceptance and nothing else."""
    return LogitsProcessorList(
        warper for warper in warpers if look_at_one_row(LogitsProcessorList([warper]))
    )


def draw_different(probs_BFV: Tensor, count: int) -> Tensor:
    """`count` tokens [B, F, R] behind each node, one after the other, none twice.

    The first has distribution p, the second p without the first, and so on: what of several clocks
    with rates p rings first, second, .. Where p has fewer tokens, the rest are any others.
    """
    times_BFV = torch.empty_like(probs_BFV).exponential_()
    order_BFV = probs_BFV / times_BFV.clamp_min(torch.finfo(times_BFV.dtype).tiny)
    return order_BFV.topk(count, dim=-1).indices
