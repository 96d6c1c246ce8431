"""One step's drafts of a draft model, level by level: chosen, or drawn as the target's tokens are.

Shapes: B active rows, F nodes read at once, J tokens of a path behind the committed text, R ranks
(a node's first, second, .. token), C tokens drafted behind them, L looked-at tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LogitsProcessorList

from medusa_heads.inference.acceptance.base import look_at_one_row, look_at_scores_alone
from medusa_heads.inference.drafters.coupling import LEAST, LOOKED_AT, drawn_chances
from medusa_heads.inference.drafters.model.drafted_text import DraftedText
from medusa_heads.inference.engine.rows import Row
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.tree import TokenTree, TreeShape


class Walk:
    """What a draft model has drafted so far behind the committed texts, for whoever is its `owner`.
    Where the target's tokens are drawn, `warpers` may be its logits processors; else they are None.

    Attributes:
        text: what the draft model has read.
        paths_BFJ: of the nodes that it reads next; its caller may choose among them.
        drawn_from: see TokenTree.
    """

    def __init__(
        self,
        draft: TargetModel,
        owner: object,
        state: DecodingState,
        vocab_size: int,
        warpers: LogitsProcessorList | None,
    ) -> None:
        if owner not in state.memories:
            state.memories[owner] = DraftedText(draft, state.rows, state.padding)
        self.text: DraftedText = state.memories[owner]
        self.drawn_from: dict[int, Tensor] = {}
        self._state, self._vocab_size, self._warpers = state, vocab_size, warpers
        roots_B1 = state.roots_B[:, None]
        self.paths_BFJ = roots_B1[..., None][..., :0]
        self._tokens = [roots_B1]
        self._log_probs = [torch.zeros_like(roots_B1, dtype=torch.float)]
        self._level = 0

    def read(self, above_BF: Tensor | None) -> Tensor:
        """The distributions [B, F, V] behind the nodes of `paths_BFJ`, or where the noise is known,
        what it lets the target draw there; `above_BF` says behind which of those that were read
        before they stand, at the first level none."""
        if self._level:
            assert above_BF is not None
            logits_BFV = self.text.write(self.paths_BFJ[..., -1], above_BF, self._level)
        else:
            logits_BFV = self.text.catch_up(self._state)[:, None]
        self._level += 1
        logits_BFV = logits_BFV.to(self.paths_BFJ.device)
        rows, noise = self._state.rows, self._state.noise
        probs_BFV = draft_probs(logits_BFV, self.paths_BFJ, rows, self._warpers, self._vocab_size)
        if noise is None or self._warpers is None:
            return probs_BFV
        probs_BFL, tokens_BFL = probs_BFV.topk(min(LOOKED_AT, probs_BFV.shape[2]), dim=-1)
        noise_BFL = noise.of(rows, [self._level - 1], tokens_BFL)
        chances_BFL = drawn_chances(probs_BFL.log(), noise_BFL).exp()
        return torch.full_like(probs_BFV, math.exp(LEAST)).scatter_(2, tokens_BFL, chances_BFL)

    def add(self, tokens_BC: Tensor, probs_BC: Tensor, above_BCJ: Tensor) -> None:
        """Draft tokens: how likely the draft model takes each to be, and the path it goes on."""
        self._tokens.append(tokens_BC)
        self._log_probs.append(probs_BC.log())
        self.paths_BFJ = torch.cat([above_BCJ, tokens_BC[..., None]], dim=2)

    def tree(self, shape: TreeShape) -> TokenTree:
        """All that was drafted; the shape's nodes are in the same order."""
        tree = shape.tree(torch.cat(self._tokens, dim=1), torch.cat(self._log_probs, dim=1))
        return replace(tree, drawn_from=self.drawn_from)


def draft_probs(
    logits_BFV: Tensor,
    paths_BFJ: Tensor,
    rows: Sequence[Row],
    warpers: LogitsProcessorList | None,
    vocab_size: int,
) -> Tensor:
    """The distributions [B, F, V] to draw from behind each node, in fp32, as the target's warpers
    leave them; a draft model's vocabulary matrix may have another number of rows."""
    logits_BFV = logits_BFV[..., :vocab_size].to(dtype=torch.float32, copy=True)
    missing = vocab_size - logits_BFV.shape[2]
    logits_BFV = F.pad(logits_BFV, (0, missing), value=float("-inf")) if missing else logits_BFV
    # Only those warpers that can be asked about a text that may never be: what they say follows
    # from one row's text alone. Others may count the times they are called, or run the model;
    # drafts go without them, which costs acceptance and nothing else.
    asked = LogitsProcessorList(
        warper for warper in warpers or () if look_at_one_row(LogitsProcessorList([warper]))
    )
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


def draw_different(probs_BFV: Tensor, count: int) -> Tensor:
    """`count` tokens [B, F, R] behind each node, one after the other, none twice.

    The first has distribution p, the second p without the first, and so on: what of several clocks
    with rates p rings first, second, .. Where p has fewer tokens, the rest are any others.
    """
    times_BFV = torch.empty_like(probs_BFV).exponential_()
    order_BFV = probs_BFV / times_BFV.clamp_min(torch.finfo(times_BFV.dtype).tiny)
    return order_BFV.topk(count, dim=-1).indices
