"""Lossy acceptance rules, by their names in the literature. None is ever the default.

They keep drafted tokens that the target finds likely enough, rather than only those it would have
drawn: more tokens a step, and text that no longer follows the target's distribution.

Shapes: B active rows, N tree nodes, V vocabulary.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from medusa_heads.inference.acceptance.base import Settings, look_at_scores_alone
from medusa_heads.inference.engine.rows import Row
from medusa_heads.trees.tree import TokenTree


class RelaxedRule(ABC):
    """LOSSY. Keeps the deepest path on which every drafted token is acceptable; among equally deep
    ones the path the target finds likeliest. The bonus token is the target's own. Raises
    ValueError: a processor that looks at the text, which differs from node to node, or a setting
    out of its range."""

    lossless = False
    settings: ClassVar[Settings]

    def __init__(self, processors: LogitsProcessorList, do_sample: bool, **settings: float) -> None:
        if not look_at_scores_alone(processors):
            names = sorted({type(processor).__name__ for processor in processors})
            raise ValueError(
                f"{type(self).__name__} takes warpers such as temperature, top-k and top-p only, "
                f"got {names}: leave the others out, or use lossless acceptance"
            )
        self._processors = processors
        self._do_sample = do_sample
        self._set = {name: settings.get(name, usual) for name, (usual, _) in self.settings.items()}
        for name, (_, most) in self.settings.items():
            if not 0 < self._set[name] <= most:
                got = self._set[name]
                raise ValueError(f"{name} must be above 0 and at most {most}, got {got}")

    @abstractmethod
    def accepts(self, log_p_BN: Tensor, entropy_BN: Tensor, tree: TokenTree) -> Tensor:
        """Which nodes are acceptable after their parent, [B, N] bool, by the target's
        log-probability of their tokens there, and the entropy of its distribution in nats."""

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
        ends, given = ends_B.tolist(), (log_probs_BNV, logits_BNV)
        walks = zip(tokens, parents, ends, *given, rows, strict=True)
        return [[] if walk[-1].done else self._commit(*walk) for walk in walks]

    def _commit(
        self,
        tokens: list[int],
        parents: list[int],
        end: int,
        log_probs_NV: Tensor,
        logits_NV: Tensor,
        row: Row,
    ) -> list[int]:
        nodes: list[int] = []
        while end:
            nodes.append(end)
            end = parents[end]
        path = [0]
        for node in reversed(nodes):
            if row.watch is not None:
                row.watch(logits_NV[path[-1]], tokens[node])
            if row.commit(tokens[node]):
                return path
            path.append(node)
        last_V = log_probs_NV[path[-1]]
        drawn = torch.multinomial(last_V.exp(), 1) if self._do_sample else last_V.argmax(-1)
        if row.watch is not None:
            row.watch(logits_NV[path[-1]], int(drawn))
        row.commit(int(drawn))
        return path


class TypicalAcceptance(RelaxedRule):
    """LOSSY. A token is acceptable if p(token) > min(epsilon, delta * exp(-H)), H being the entropy
    of the target's distribution there: the less certain the target, the more is let through.
    Source: Cai et al. 2024, "Medusa", arXiv:2401.10774, section 2.3.1; Hewitt et al. 2022."""

    settings: ClassVar[Settings] = {"epsilon": (0.09, 1), "delta": (0.3, math.inf)}

    def accepts(self, log_p_BN: Tensor, entropy_BN: Tensor, tree: TokenTree) -> Tensor:
        limit_BN = (self._set["delta"] * (-entropy_BN).exp()).clamp_max(self._set["epsilon"])
        return log_p_BN.exp() > limit_BN


class ThresholdAcceptance(RelaxedRule):
    """LOSSY. A token is acceptable if p(token) >= threshold * q(token), q the draft's probability.
    Source: the lenience of Leviathan et al. 2022, arXiv:2211.17192, appendix A.5, taken
    deterministically."""

    settings: ClassVar[Settings] = {"threshold": (0.5, math.inf)}

    def accepts(self, log_p_BN: Tensor, entropy_BN: Tensor, tree: TokenTree) -> Tensor:
        return log_p_BN - _draft_log_probs(tree) >= math.log(self._set["threshold"])


class LogRatioAcceptance(RelaxedRule):
    """LOSSY. A path is acceptable while the sum of log p(token) - log q(token) along it stays at or
    above -tau: likelier tokens earlier on pay for less likely ones later.
    """

    settings: ClassVar[Settings] = {"tau": (1.0, math.inf)}

    def accepts(self, log_p_BN: Tensor, entropy_BN: Tensor, tree: TokenTree) -> Tensor:
        ratio_BN = (log_p_BN - _draft_log_probs(tree)).masked_fill(tree.depth_BN == 0, 0.0)
        return _along_path(ratio_BN, tree) >= -self._set["tau"]


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
