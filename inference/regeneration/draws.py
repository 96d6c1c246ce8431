"""Drawing with a row's own random numbers.

Shapes: B rows, T tokens, V vocabulary, M new tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from medusa_heads.inference.regeneration.prompts import Prompt


class RowDraws(LogitsProcessor):
    """Makes the argmax of the scores a draw from them: to be put behind all other processors.

    transformers draws a batch with one stream of random numbers, so that a row's text hangs on its
    neighbours. Here each row spends its prompt's own numbers, one a token. What comes before this
    processor says what is drawn from; whoever takes the argmax of what it returns has drawn.

    Args:
        prompts: of the batch's rows, in order.
        seed: of the run.
        max_new_tokens: tokens of an answer at most.
        width: tokens of the padded prompts.
        device: where the scores are.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        max_new_tokens: int,
        width: int,
        device: torch.device,
    ) -> None:
        draws_BM = np.stack([prompt.draws(seed, max_new_tokens) for prompt in prompts])
        self._draws_MB = torch.from_numpy(draws_BM.T.copy()).to(device)
        self._width = width

    def of_row(self, row: int) -> RowDraws:
        """What stands for this in a row of the batch: it draws for that row alone."""
        alone = copy.copy(self)
        alone._draws_MB = self._draws_MB[:, row, None]
        return alone

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores_BV of the token behind input_ids_BT, the drawn token's raised to infinity."""
        tokens_B = draw(scores, self._draws_MB[input_ids.shape[1] - self._width])
        return scores.scatter_(1, tokens_B[:, None], torch.inf)


def draw(scores_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """One token a row from softmax(scores): the first whose cumulated probability passes the row's
    number in [0, 1). A token without probability is never the first.

    Cheaper than torch.multinomial, which makes a random number for every entry of the vocabulary.

    Returns:
        tokens_B.
    """
    cumulated_BV = torch.softmax(scores_BV, dim=-1).cumsum(dim=-1, dtype=torch.float64)
    wanted_B = uniform_B.to(torch.float64) * cumulated_BV[:, -1]
    return torch.searchsorted(cumulated_BV, wanted_B[:, None], right=True)[:, 0]
