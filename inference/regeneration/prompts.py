"""What a target is asked, and the random numbers that belong to the question.

A sampled answer must not hang on which prompts happen to stand in the same batch. So every prompt
has random numbers of its own, a function of the seed, the prompt and its row alone, and they are
spent one a token. Shapes: B rows, T tokens, V vocabulary, M new tokens.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LogitsProcessor

from medusa_heads.machine.devices import in_float64

Messages = Sequence[Mapping[str, Any]]


class Talk(NamedTuple):
    """A conversation, and what else its chat template is given."""

    messages: Messages
    tools: Sequence[Any] | None = None
    variables: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Prompt:
    """One question."""

    input_ids: Sequence[int]
    greedy: bool  # whether the answer is the likeliest text, or drawn
    row: int = 0  # of the corpus: equal prompts in other rows are to get other answers
    talk: Talk | None = field(default=None, compare=False)  # that the tokens render

    @cached_property
    def key(self) -> str:
        """What the answer is kept under."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"{int(self.greedy)} {self.row} ".encode())
        digest.update(np.asarray(self.input_ids, np.int64).tobytes())
        return digest.hexdigest()

    def number(self, seed: int) -> int:
        """128 bits that belong to this prompt and this seed."""
        digest = hashlib.blake2b(f"{seed} {self.key}".encode(), digest_size=16)
        return int.from_bytes(digest.digest(), "little")

    def draws(self, seed: int, count: int) -> NDArray[np.float32]:
        """The numbers in [0, 1) that its answer is drawn with, one a token. They have 24 bits, so
        that fp32 holds them exactly. Philox counts instead of remembering (Salmon et al. 2011), and
        numpy promises its raw stream."""
        raw = np.random.Philox(key=self.number(seed)).random_raw(count)
        return ((raw >> np.uint64(40)) / np.float64(1 << 24)).astype(np.float32)


def is_greedy(row: int, share: float) -> bool:
    """Whether a row's answers are the likeliest text. The share is spread so that every stretch of
    the corpus has the same mixture."""
    return int((row + 1) * share) > int(row * share)


class RowDraws(LogitsProcessor):
    """Makes the argmax of the scores a draw from them: to be put behind all other processors.

    transformers draws a batch with one stream of random numbers, so that a row's text hangs on its
    neighbours. Here each row spends its prompt's own numbers draws_BM, one a token behind the
    `width` of the padded prompts. What comes before this processor says what is drawn from; whoever
    takes the argmax of what it returns has drawn.
    """

    def __init__(self, draws_BM: Tensor, width: int) -> None:
        self._draws_MB = draws_BM.T.contiguous()
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
    number in [0, 1). A token without probability is never the first. Cheaper than
    torch.multinomial, which makes a random number for every entry of the vocabulary."""
    cumulated_BV = in_float64(torch.softmax(scores_BV, dim=-1)).cumsum(dim=-1)
    wanted_B = uniform_B.to(cumulated_BV) * cumulated_BV[:, -1]
    tokens_B1 = torch.searchsorted(cumulated_BV, wanted_B[:, None], right=True)
    return tokens_B1[:, 0].to(scores_BV.device)
