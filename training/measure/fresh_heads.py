"""Whether training makes what learns worse than it began.

Heads are compared with fresh ones, which need no weights; a draft model with the losses it had.

Shapes: R supervised rows, K heads, D hidden, X columns of hidden states with features, F figures.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor, nn

from medusa_heads.config import HeadsConfig
from medusa_heads.heads import DraftHeads, MedusaHeads
from medusa_heads.heads.vocabulary import scaled
from medusa_heads.target.target import TargetModel

_EVERY, _SELDOM, _OFTEN_UNTIL = 10, 50, 100  # steps
_COMPARISONS = 3
_WORSE = 1.1  # a rate that is just too high recovers; beyond this none did


class FreshHeads(MedusaHeads):
    """Heads without anything learnt, and without weights: each predicts what the lm_head does."""

    @classmethod
    def like(cls, heads: DraftHeads, target: TargetModel) -> FreshHeads:
        config = heads.config
        fresh = cls(
            HeadsConfig(
                num_heads=config.num_heads,
                draft_vocab_size=config.draft_vocab_size,
                hidden_size=config.hidden_size,
                vocab_size=config.vocab_size,
                logit_scale=config.logit_scale,
            )
        )
        fresh.draft_tokens = heads.draft_tokens
        if heads.config.vocab_matrix == "shared":
            fresh._shared = heads.vocab_matrix(0)  # no second copy of a reduced one
        else:
            fresh.share(target)
        return fresh

    def _blocks(self, head: int) -> list[nn.Module]:
        return []

    def fuse(self, hidden_RX: Tensor) -> Tensor:
        """See DraftHeads: without the features, which other heads may read."""
        return hidden_RX[..., -(self.config.hidden_size or 0) :]

    def features(self, hidden_RD: Tensor, tokens_RK: Tensor | None = None) -> Tensor:
        return scaled(self._inputs(hidden_RD), self.config.logit_scale)


class Comparison:
    """Losses of what learns and of what it began as on the same text, now and then. `worse` is what
    a run that is stopped has done, `rates` the settings that may be too high: both for the
    sentence."""

    def __init__(self, worse: str, rates: str = "learning_rate") -> None:
        self._worse, self._rates = worse, rates
        self._losses: deque[Tensor] = deque(maxlen=_COMPARISONS)
        self._compared = -1

    def is_due(self, step: int) -> bool:
        """Whether to compare in a step, once: a step may have several batches."""
        every = _EVERY if step < _OFTEN_UNTIL else _SELDOM
        if step % every < every - 1 or step == self._compared:
            return False
        self._compared = step
        return True

    def check(self, losses: Tensor, step: int, rate: float) -> None:
        """Take the losses of a comparison, now and with nothing learnt, [2, F]. Raises ValueError:
        the last few say by each figure that training makes worse what learns."""
        self._losses.append(losses)
        if len(self._losses) < _COMPARISONS:
            return
        now_F, began_F = torch.stack(tuple(self._losses)).mean(dim=0)
        if not bool((now_F <= _WORSE * began_F).any()):  # NaN is refused too
            raise ValueError(
                f"training has made {self._worse}: by step {step + 1} the loss is "
                f"{float(now_F[0]):.3g}, with nothing learnt it is {float(began_F[0]):.3g} on the "
                f"same text; the learning rate {rate:g} is too high, so give a lower {self._rates}"
            )
