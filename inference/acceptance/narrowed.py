"""Drawing among the likeliest tokens alone, on tensors: as `Likeliest` does, for all nodes at once
and without a question of the host.

top_p sorts all scores, and noise is counted for all tokens. Here that is done for few nodes: for
those where others than the likeliest tokens might be drawn, or rounding decides. There is room for
every root among them, so that each row goes on; a node for which there is none is left out of the
tree. What is drawn behind a place of a text is the same either way.

Shapes: B rows, N tree nodes, R = B x N of both, K of these looked at as a whole, C likeliest
tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from medusa_heads.inference.acceptance.base import warp
from medusa_heads.inference.acceptance.likeliest import (
    CLOSE,
    FEW,
    LOWEST,
    SUMMED,
    limits_among,
)
from medusa_heads.inference.engine.noise import NoiseOnDevice

LEFT_OUT = -2  # in place of the token that is drawn behind a node which was not looked at
_MANY = 1024  # likeliest tokens, where no top_k says how many are left
_TIMES = 16  # tokens of the vocabulary for each of the likeliest, from which on to find them pays
_FEWEST, _SHARE = 2, 16  # nodes besides the roots that are looked at as a whole: one in so many
_LATER = 1 << 20  # than every node that is not sure


class Narrowed:
    """Processors behind which a few tokens are left, as a rule.

    Args:
        before: what runs first; then temperature.
        limits: top_k, top_p and min_p, as far as there are any.
    """

    def __init__(self, before: LogitsProcessorList, limits: LogitsProcessorList) -> None:
        of_kind: dict[type, Any] = {type(each): each for each in limits}
        self._before, self._limits = before, limits
        self._top_k = of_kind.get(TopKLogitsWarper)
        self._top_p = of_kind.get(TopPLogitsWarper)
        self._min_p = of_kind.get(MinPLogitsWarper)
        self._count = _MANY if self._top_k is None else max(FEW, 2 * self._top_k.top_k)

    @classmethod
    def of(
        cls, processors: LogitsProcessorList, rows: int, nodes: int, vocab: int
    ) -> Narrowed | None:
        """None where these are others, or where to look at all tokens is less work."""
        split = limits_among(processors)
        if split is None or rows * nodes < 2 * _whole(rows, nodes):
            return None
        before, last = split
        if last and type(last[0]) is TemperatureLogitsWarper:
            before, last = LogitsProcessorList([*before, last[0]]), LogitsProcessorList(last[1:])
        narrowed = cls(before, last)
        return narrowed if vocab >= _TIMES * narrowed._count else None

    def draw_all(
        self, logits_BNV: Tensor, depth_BN: Tensor, noise: NoiseOnDevice, seen_RV: Any
    ) -> Tensor:
        """The next token [B, N] behind every node; LEFT_OUT behind some, no roots among them."""
        batch, nodes, _ = logits_BNV.shape
        scores_RV = warp(self._before, seen_RV, logits_BNV.float().flatten(0, 1))
        scores_RC, tokens_RC = scores_RV.topk(self._count, dim=-1)
        near_RC = scores_RC - scores_RC[:, :1]
        weights_RC = near_RC.exp()
        may_RC = near_RC > LOWEST  # below, no noise makes up for it
        sure_R1 = scores_RC[:, :1].isfinite()
        if self._top_k is not None:
            may_RC &= scores_RC >= scores_RC[:, self._top_k.top_k - 1, None]
            weights_RC = weights_RC.where(may_RC, 0.0)
            sure_R1 &= ~may_RC[:, -1:]  # else top_k leaves more, and these count for top_p
        close, total_R1 = CLOSE, weights_RC.sum(dim=-1, keepdim=True)
        if self._top_p is not None:
            if self._top_k is None:
                close += SUMMED * scores_RV.shape[1]
                total_R1 = (scores_RV - scores_RC[:, :1]).exp().sum(dim=-1, keepdim=True)
            likelier_RC = weights_RC.cumsum(dim=-1) - weights_RC
            within_RC = likelier_RC < (self._top_p.top_p + close) * total_R1
            last_R1 = weights_RC.where(within_RC, 1.0).amin(dim=-1, keepdim=True)
            may_RC &= weights_RC >= last_R1 * (1 - CLOSE)
        if self._min_p is not None:
            may_RC &= weights_RC >= self._min_p.min_p * (1 - CLOSE)
        noise_BNC = noise.behind(depth_BN, tokens_RC.view(batch, nodes, -1))
        noisy_RC = (noise_BNC.flatten(0, 1) + near_RC).where(may_RC, -torch.inf)
        noisiest_R1, place_R1 = noisy_RC.max(dim=-1, keepdim=True)
        as_noisy_RC = noisy_RC > noisiest_R1 - CLOSE
        sure_R1 &= ~may_RC[:, -1:] & (as_noisy_RC.sum(dim=-1, keepdim=True) == 1)
        weight_R1 = weights_RC.gather(1, place_R1)
        if self._top_p is not None:
            as_likely_RC = weights_RC >= weight_R1 * (1 - CLOSE)
            likelier_R1 = weights_RC.where(as_likely_RC, 0.0).sum(dim=-1, keepdim=True) - weight_R1
            sure_R1 &= likelier_R1 <= (self._top_p.top_p - close) * total_R1
        if self._min_p is not None:
            sure_R1 &= weight_R1 >= self._min_p.min_p * (1 + CLOSE)
        drawn_R1 = tokens_RC.gather(1, place_R1).where(sure_R1, LEFT_OUT)
        order_R = depth_BN.flatten() + _LATER * sure_R1[:, 0]
        whole_K = order_R.topk(_whole(batch, nodes), largest=False).indices
        scores_KV = warp(self._limits, None, scores_RV[whole_K])
        of_these = noise.of_some(whole_K // nodes)
        drawn_K1 = of_these.draw_all(scores_KV[:, None], depth_BN.flatten()[whole_K, None])
        return drawn_R1[:, 0].scatter(0, whole_K, drawn_K1[:, 0]).view(batch, nodes)


def _whole(rows: int, nodes: int) -> int:
    """How many nodes are looked at as a whole."""
    return min(rows * nodes, rows + max(_FEWEST, rows * nodes // _SHARE))
