"""Heads as they begin, to tell whether training makes others better or worse than that.

Shapes: B batch, T tokens, R supervised rows, K heads, D hidden.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from medusa_heads.heads import DraftHeads, MedusaHeads
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.loss.row_blocks import rows_loss
from medusa_heads.training.loss.rows import SupervisedRows, encode_rows

_EVERY, _SELDOM, _OFTEN_UNTIL = 10, 50, 100  # steps
_COMPARISONS = 3
_WORSE = 1.1  # a rate that is just too high recovers; beyond this none did


class FreshHeads(MedusaHeads):
    """Heads without anything learnt, and without weights: each predicts what the lm_head does."""

    @classmethod
    def beside(cls, heads: DraftHeads, target: TargetModel) -> FreshHeads:
        """What `heads` were when they were made."""
        config = replace(heads.config, kind="medusa", vocab_matrix="shared", prefix_attention=False)
        fresh = cls(config)
        fresh.draft_tokens = heads.draft_tokens
        if heads.config.vocab_matrix == "shared":
            fresh._shared = heads.vocab_matrix(0)  # no second copy of a reduced one
        else:
            fresh.share(target)
        return fresh

    def _blocks(self, head: int) -> list[nn.Module]:
        return []

    def features(self, hidden_RD: Tensor, tokens_RK: Tensor | None = None) -> Tensor:
        """See DraftHeads."""
        return hidden_RD[..., None, :].expand(*hidden_RD.shape[:-1], self.config.num_heads, -1)


class Comparison:
    """Losses of heads and of fresh ones on the same text, now and then.

    Both are cross-entropy: the run's own loss may weigh the heads by how good they are.

    Args:
        heads: that are trained.
        target: of the heads.
    """

    def __init__(self, heads: DraftHeads, target: TargetModel) -> None:
        self.heads = heads
        self.fresh = FreshHeads.beside(heads, target)
        self._losses: deque[Tensor] = deque(maxlen=_COMPARISONS)
        self._compared = -1

    def is_due(self, step: int) -> bool:
        """Whether to compare in a step, once: a step may have several batches."""
        every = _EVERY if step < _OFTEN_UNTIL else _SELDOM
        due = step % every == every - 1 and step != self._compared
        if due:
            self._compared = step
        return due

    @torch.no_grad()
    def losses(
        self, hidden_BTD: Tensor, inputs: Mapping[str, Tensor], rows: SupervisedRows
    ) -> Tensor:
        """Of the heads and of fresh ones, per row, [2]."""
        items = max(len(rows.positions_R), 1)
        plain = LossConfig()
        return torch.stack(
            [
                rows_loss(
                    heads,
                    encode_rows(heads, hidden_BTD, inputs, rows),
                    rows,
                    objective=plain,
                    num_items=items,
                )
                for heads in (self.heads, self.fresh)
            ]
        ).float()

    def check(self, losses: Tensor, step: int, rate: float) -> None:
        """Take the losses of a comparison.

        Raises:
            ValueError: the last few say that training makes the heads worse than they began.
        """
        self._losses.append(losses)
        now, fresh = torch.stack(tuple(self._losses)).mean(dim=0).tolist()
        if len(self._losses) == _COMPARISONS and not now <= _WORSE * fresh:  # NaN is refused too
            raise ValueError(
                f"the heads have become worse than fresh ones: by step {step + 1} their loss is "
                f"{now:.3g}, that of fresh heads {fresh:.3g} on the same text; the learning rate "
                f"{rate:g} is too high, so give a lower learning_rate"
            )
