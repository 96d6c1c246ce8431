"""Noise that is known before it is used: of every token at every place of a text, from a counter.

Shapes: B rows, F paths, C tokens.
Sources: drawing as the argmax of log-probabilities and Gumbel noise, so that who drafts may know
the noise (Daliri et al. 2024, arXiv:2408.07978, section 3); random numbers by counting (Salmon et
al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), with the mixing function of SplitMix64
(Steele et al. 2014).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from medusa_heads.inference.engine.rows import Row

_WORD = 1 << 64
_STRIDE = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
_BITS = 53  # of a word that make a number
_FRACTION = 2.0**-_BITS

# Of a token so far behind the next one: its draw of the exponential law, of which noise is minus
# the logarithm. The token with the smallest draw over probability is drawn.
Luck = Callable[[int, int], float]


class Noise:
    """Gumbel noise of each token at each place of each row's text.

    It depends on the seed, on the row's own prompt (padding left out), on how many earlier rows of
    the batch have the same prompt, on the place among the new tokens, and on the token's id: not on
    other rows, their order, nor on drafts.

    Args:
        seed: of all rows.
        rows: of the batch, before anything is committed.
        padding: tokens of left padding, by row.
    """

    def __init__(self, seed: int, rows: Sequence[Row], padding: Sequence[int]) -> None:
        self._keys: dict[int, int] = {}
        earlier: dict[bytes, int] = {}
        for row, left in zip(rows, padding, strict=True):
            prompt = row.ids_1T()[0, left:].long().cpu().numpy().tobytes()
            nth = earlier[prompt] = earlier.get(prompt, -1) + 1
            name = hashlib.blake2b(prompt, digest_size=8, salt=nth.to_bytes(8, "little"))
            self._keys[row.index] = _mixed((seed + _whole(name)) % _WORD)

    def of(self, rows: Sequence[Row], ahead: Sequence[int], tokens_BFC: Tensor) -> Tensor:
        """Of tokens of each row, [B, F, C] in fp32: of all F at one place, `ahead` [1] tokens
        behind the next of the row, or of each of them at its own, `ahead` [F]."""
        keys = [(self._keys[row.index], len(row.tokens)) for row in rows]
        places = [[_place(key, next_one + far) for far in ahead] for key, next_one in keys]
        words_BFC = torch.tensor(places, device=tokens_BFC.device)[..., None]
        words_BFC = words_BFC + (tokens_BFC + 1) * _signed(_STRIDE)
        for shift, factor in _MIX:
            # A shift to the right brings copies of the sign along.
            shifted_BFC = (words_BFC >> shift) & ((1 << (64 - shift)) - 1)
            words_BFC = (words_BFC ^ shifted_BFC) * _signed(factor)
        bits_BFC = (words_BFC >> (64 - _BITS)) & ((1 << _BITS) - 1)
        # Small numbers, which decide, keep all their digits in fp32; 1 itself would be infinity.
        uniform_BFC = ((bits_BFC.float() + 0.5) * _FRACTION).clamp_max(1 - 2.0**-24)
        return -(-torch.log1p(-uniform_BFC)).log()

    def luck(self, row: Row) -> Luck:
        """Behind the row as it stands now, also once it is longer: token by token, on the host."""
        key, next_one = self._keys[row.index], len(row.tokens)

        def of(ahead: int, token: int) -> float:
            word = _mixed((_place(key, next_one + ahead) + (token + 1) * _STRIDE) % _WORD)
            return -math.log1p(-((word >> (64 - _BITS)) + 0.5) * _FRACTION)

        return of


def chance_drawn(chance: float, luck: float) -> float:
    """That a token of this probability is drawn, where its own luck is known, and nothing of all
    others'."""
    return math.exp(-luck * (1.0 - chance) / max(chance, 1e-9))


def _place(key: int, place: int) -> int:
    return _signed(_mixed((key + place * _STRIDE) % _WORD))


def _mixed(word: int) -> int:
    for shift, factor in _MIX:
        word = (word ^ (word >> shift)) * factor % _WORD
    return word


def _whole(name: hashlib.blake2b) -> int:
    return int.from_bytes(name.digest(), "little")


def _signed(word: int) -> int:
    """The same bits as a number that int64 holds."""
    return word - _WORD if word >= _WORD // 2 else word
