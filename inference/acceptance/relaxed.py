"""Lossy acceptance rules, by their names in the literature. None is ever the default.

They keep drafted tokens that the target finds likely enough, rather than only those it would have
drawn: more tokens a step, and text that no longer follows the target's distribution.

Shapes: B active rows, N tree nodes, V vocabulary.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from medusa_heads.inference.acceptance.base import look_at_scores_alone
from medusa_heads.inference.engine.rows import Row
from medusa_heads.trees.tree import TokenTree


class RelaxedRule(ABC):
    """LOSSY. Keeps the deepest path on which every drafted token is acceptable; among equally deep
    ones the path the target finds likeliest. The bonus token is the target's own.

    Args:
        processors: warpers of the target's scores (temperature, top-k, top-p, ...).
        do_sample: draw the bonus token, rather than take the most likely one.

    Raises:
        ValueError: a processor that looks at the text, which differs from node to node.
    """

    lossless = False

    def __init__(self, processors: LogitsProcessorList, do_sample: bool) -> None:
        if not look_at_scores_alone(processors):
            names = sorted({type(processor).__name__ for processor in processors})
            raise ValueError(
                f"{type(self).__name__} takes warpers such as temperature, top-k and top-p only, "
                f"got {names}: leave the others out, or use lossless acceptance"
            )
        self._processors = processors
        self._do_sample = do_sample

    @abstractmethod
    def accepts(self, log_p_BN: Tensor, entropy_BN: Tensor, tree: TokenTree) -> Tensor:
        """Which nodes are acceptable after their parent, [B, N] bool.

        Args:
            log_p_BN: the target's log-probability of each node's token after its parent.
            entropy_BN: entropy of the target's distribution after the parent, in nats.
            tree: the drafted tree.
        """

    def __call__(self, tree: TokenTree, logits_BNV: Tensor, rows: Sequence[Row]) -> list[list[int]]:
        scores: Any = logits_BNV.flatten(0, 1).float()
        ids: Any = tree.tokens_BN.reshape(-1, 1)
        log_probs_BNV = self._processors(ids, scores).log_softmax(-1).view(logits_BNV.shape)
        parents_BN = tree.parents_BN.clamp_min(0)
        after_parent_BNV = log_probs_BNV.gather(
            1, parents_BN[:, :, None].expand(-1, -1, logits_BNV.shape[2])
        )
        log_p_BN = after_parent_BNV.gather(2, tree.tokens_BN[:, :, None])[:, :, 0]
        entropy_BN = torch.special.entr(after_parent_BNV.exp()).sum(-1)
        acceptable_BN = self.accepts(log_p_BN, entropy_BN, tree)
        acceptable_BN[:, 0] = True
        log_p_BN = log_p_BN.masked_fill(tree.depth_BN == 0, 0.0)
        whole_path_BN = ~(~acceptable_BN[:, None] & tree.ancestors_BNN).any(-1)
        # Depth decides; the path's mean log-probability, squeezed into (0, 1), breaks ties.
        likeliness_BN = _along_path(log_p_BN, tree) / tree.depth_BN.clamp_min(1)
        merit_BN = tree.depth_BN + likeliness_BN.exp() * 0.99
        ends_B = merit_BN.masked_fill(~whole_path_BN, -1.0).argmax(-1)

        tokens, parents = torch.stack([tree.tokens_BN, parents_BN]).tolist()
        return [
            []
            if row.done
            else self._commit(tokens[b], parents[b], int(ends_B[b]), log_probs_BNV[b], row)
            for b, row in enumerate(rows)
        ]

    def _commit(
        self, tokens: list[int], parents: list[int], end: int, log_probs_NV: Tensor, row: Row
    ) -> list[int]:
        nodes: list[int] = []
        while end:
            nodes.append(end)
            end = parents[end]
        path = [0]
        for node in reversed(nodes):
            if row.commit(tokens[node]):
                return path
            path.append(node)
        last_V = log_probs_NV[path[-1]]
        drawn = torch.multinomial(last_V.exp(), 1) if self._do_sample else last_V.argmax(-1)
        row.commit(int(drawn))
        return path


class TypicalAcceptance(RelaxedRule):
    """LOSSY. A token is acceptable if p(token) > min(epsilon, delta * exp(-H)), H being the entropy
    of the target's distribution there: the less certain the target, the more is let through.

    Source: Cai et al. 2024, "Medusa", arXiv:2401.10774, section 2.3.1; Hewitt et al. 2022.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        do_sample: bool,
        *,
        epsilon: float = 0.09,
        delta: float = 0.3,
    ) -> None:
        super().__init__(processors, do_sample)
        self._epsilon = _in_range("epsilon", epsilon, 0, 1)
        self._delta = _in_range("delta", delta, 0, math.inf)

    def accepts(self, log_p_BN: Tensor, entropy_BN: Tensor, tree: TokenTree) -> Tensor:
        limit_BN = (self._delta * (-entropy_BN).exp()).clamp_max(self._epsilon)
        return log_p_BN.exp() > limit_BN


class ThresholdAcceptance(RelaxedRule):
    """LOSSY. A token is acceptable if p(token) >= threshold * q(token), q the draft's probability.

    Source: the lenience of Leviathan et al. 2022, arXiv:2211.17192, appendix A.5, taken
    deterministically.
    """

    def __init__(
        self, processors: LogitsProcessorList, do_sample: bool, *, threshold: float = 0.5
    ) -> None:
        super().__init__(processors, do_sample)
        self._log_threshold = math.log(_in_range("threshold", threshold, 0, math.inf))

    def accepts(self, log_p_BN: Tensor, entropy_BN: Tensor, tree: TokenTree) -> Tensor:
        return log_p_BN - _draft_log_probs(tree) >= self._log_threshold


class LogRatioAcceptance(RelaxedRule):
    """LOSSY. A path is acceptable while the sum of log p(token) - log q(token) along it stays at or
    above -tau: likelier tokens earlier on pay for less likely ones later.
    """

    def __init__(
        self, processors: LogitsProcessorList, do_sample: bool, *, tau: float = 1.0
    ) -> None:
        super().__init__(processors, do_sample)
        self._tau = _in_range("tau", tau, 0, math.inf)

    def accepts(self, log_p_BN: Tensor, entropy_BN: Tensor, tree: TokenTree) -> Tensor:
        ratio_BN = (log_p_BN - _draft_log_probs(tree)).masked_fill(tree.depth_BN == 0, 0.0)
        return _along_path(ratio_BN, tree) >= -self._tau


def _along_path(values_BN: Tensor, tree: TokenTree) -> Tensor:
    """Sum of a value over each node's path."""
    # masked_fill, not a product: a value of -inf off the path must not turn into NaN.
    values_BNN = values_BN[:, None].masked_fill(~tree.ancestors_BNN, 0.0)
    return values_BNN.sum(-1)


def _draft_log_probs(tree: TokenTree) -> Tensor:
    if tree.log_probs_BN is None:
        raise ValueError(
            "this acceptance rule compares with the draft's probabilities, which this drafter does "
            "not give: use typical or lossless acceptance"
        )
    return tree.log_probs_BN


def _in_range(name: str, value: float, low: float, high: float) -> float:
    if not low < value <= high:
        raise ValueError(f"{name} must be above {low} and at most {high}, got {value}")
    return value
