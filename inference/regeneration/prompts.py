"""What a target is asked, and the random numbers that belong to the question.

A sampled answer must not hang on which prompts happen to stand in the same batch. So every prompt
has random numbers of its own, a function of the seed and of the prompt alone, and they are spent
one a token.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Prompt:
    """One question.

    Args:
        input_ids: its tokens.
        greedy: whether the answer is the likeliest text, or drawn.
        occurrence: how many equal prompts came before it: they are to get other answers.
        messages: the conversation that the tokens render, where there is one.
    """

    input_ids: Sequence[int]
    greedy: bool
    occurrence: int = 0
    messages: Messages | None = field(default=None, compare=False)

    @cached_property
    def key(self) -> str:
        """What the answer is kept under."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"{int(self.greedy)} {self.occurrence} ".encode())
        digest.update(np.asarray(self.input_ids, np.int64).tobytes())
        return digest.hexdigest()

    def number(self, seed: int) -> int:
        """128 bits that belong to this prompt and this seed."""
        digest = hashlib.blake2b(f"{seed} {self.key}".encode(), digest_size=16)
        return int.from_bytes(digest.digest(), "little")

    def draws(self, seed: int, count: int) -> NDArray[np.float32]:
        """The numbers in [0, 1) that its answer is drawn with, one a token.

        They have 24 bits, so that fp32 holds them exactly. Philox counts instead of remembering
        (Salmon et al. 2011), and numpy promises its raw stream.
        """
        raw = np.random.Philox(key=self.number(seed)).random_raw(count)
        return ((raw >> np.uint64(40)) / np.float64(1 << 24)).astype(np.float32)


class PromptMaker:
    """Makes prompts in the order in which they are asked; equal ones are told apart.

    Args:
        greedy_share: share answered greedily, spread so that every stretch has the same mixture.
    """

    def __init__(self, greedy_share: float) -> None:
        self._share = greedy_share
        self._seen: Counter[tuple[bool, tuple[int, ...]]] = Counter()

    def __call__(
        self, place: int, input_ids: Sequence[int], messages: Messages | None = None
    ) -> Prompt:
        """The prompt of the conversation at this place of the corpus."""
        greedy = int((place + 1) * self._share) > int(place * self._share)
        known = (greedy, tuple(input_ids))
        self._seen[known] += 1
        return Prompt(input_ids, greedy, self._seen[known] - 1, messages)
