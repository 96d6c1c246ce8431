"""Noise that is known before it is used: of every token at every place of a text, from a counter.

Shapes: B rows, F paths, C tokens, V vocabulary.
Sources: drawing as the argmax of log-probabilities and Gumbel noise, so that who drafts may know
the noise (Daliri et al. 2024, arXiv:2408.07978, section 3); random numbers by counting (Salmon et
al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), with the mixing function of SplitMix64
(Steele et al. 2014).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from medusa_heads.inference.engine.rows import Row

# What draws the target's tokens: noise with a key, or torch's stream as generate() reads it.
Rng = Literal["keyed", "transformers"]
RNGS: tuple[Rng, ...] = get_args(Rng)
NO_TOKEN = -1
_WORD = 1 << 64
_STRIDE = 0x9E3779B97F4A7C15
_MASK = _WORD - 1
_ONE, _OTHER = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MIX = ((30, _ONE), (27, _OTHER), (31, 1))
_BITS = 53  # of a word that make a number
_FRACTION = 2.0**-_BITS
_AT_ONCE = 1 << 15  # tokens on a CPU, whose cache holds as many
_FEW = 64  # tokens that are looked at alone, where no other can be drawn

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
        self._every_V = torch.empty(0, dtype=torch.long)  # all tokens, once their number is known
        earlier: dict[bytes, int] = {}
        for row, left in zip(rows, padding, strict=True):
            prompt = row.ids_1T()[0, left:].long().cpu().numpy().tobytes()
            nth = earlier[prompt] = earlier.get(prompt, -1) + 1
            name = hashlib.blake2b(prompt, digest_size=8, salt=nth.to_bytes(8, "little"))
            self._keys[row.index] = _mixed((seed + int.from_bytes(name.digest(), "little")) % _WORD)

    def keys(self, rows: Sequence[Row]) -> list[int]:
        """What each row's noise is counted from, as numbers that int64 holds."""
        return [_signed(self._keys[row.index]) for row in rows]

    def take(self, index: int, other: Noise, theirs: int) -> None:
        """The row of this index draws as the row `theirs` of the other noise."""
        self._keys[index] = other._keys[theirs]

    def of(self, rows: Sequence[Row], ahead: Sequence[int], tokens_BFC: Tensor) -> Tensor:
        """Of tokens of each row, [B, F, C] in fp32: of all F at one place, `ahead` [1] tokens
        behind the next of the row, or of each of them at its own, `ahead` [F]."""
        keys = [(self._keys[row.index], len(row.tokens)) for row in rows]
        places = [[[_signed(_place(key, at + far))] for far in ahead] for key, at in keys]
        places_BF1 = torch.tensor(places, device=tokens_BFC.device)
        if tokens_BFC.shape[2] <= _AT_ONCE or tokens_BFC.device.type != "cpu":
            return _gumbel(places_BF1, tokens_BFC)
        pieces = tokens_BFC.split(_AT_ONCE, dim=2)
        return torch.cat([_gumbel(places_BF1, piece) for piece in pieces], dim=2)

    def draw(self, rows: Sequence[Row], scores_BV: Tensor) -> Tensor:
        """The next token [B] of each row: that with the largest sum of processed score, in fp32,
        and noise, which has the law of the scores; NO_TOKEN where they are no distribution."""
        least_B1, most_B1 = torch.aminmax(scores_BV, dim=-1, keepdim=True)
        scores_BC, tokens_BC = self._possible(scores_BV, least_B1)
        # Near 0, where noise that is added keeps its digits however large the scores are. What
        # is no distribution has nan here.
        near_0_BC = scores_BC - most_B1
        noisy_BC = self.of(rows, [0], tokens_BC[:, None])[:, 0].add_(near_0_BC)
        noisiest_B1, places_B1 = noisy_BC.max(dim=-1, keepdim=True)
        return _if_known(tokens_BC.gather(1, places_B1), noisiest_B1)[:, 0]

    def _possible(self, scores_BV: Tensor, least_B1: Tensor) -> tuple[Tensor, Tensor]:
        """The scores [B, C] of all tokens that can be drawn, and these tokens."""
        # Elsewhere than on a CPU a look at them takes longer than to draw.
        many = scores_BV.device.type == "cpu" and scores_BV.shape[1] > _FEW
        if many and -torch.inf in least_B1.flatten().tolist():
            scores_BC, tokens_BC = scores_BV.topk(_FEW, dim=-1)
            if scores_BC[:, -1].amax() == -torch.inf:
                return scores_BC, tokens_BC
        if len(self._every_V) != scores_BV.shape[1] or self._every_V.device != scores_BV.device:
            self._every_V = torch.arange(scores_BV.shape[1], device=scores_BV.device)
        return scores_BV, self._every_V.expand_as(scores_BV)

    def luck(self, row: Row) -> Luck:
        """Behind the row as it stands now, also once it is longer: token by token, on the host."""
        key, next_one = self._keys[row.index], len(row.tokens)
        places: dict[int, int] = {}  # each is asked for several tokens

        def of(ahead: int, token: int) -> float:
            place = places.get(ahead)
            if place is None:
                place = places[ahead] = _place(key, next_one + ahead)
            word = _mixed(place + token * _STRIDE & _MASK)
            return -math.log1p(-((word >> (64 - _BITS)) + 0.5) * _FRACTION)

        return of


class NoiseOnDevice(Noise):
    """The same noise of rows whose keys and lengths are tensors: nothing of it asks the host.

    Args:
        keys_B: of the rows, as `Noise` has them.
        written_B: how many new tokens each row has.
        tokens_V: all tokens.
    """

    def __init__(self, keys_B: Tensor, written_B: Tensor, tokens_V: Tensor) -> None:
        self._keys_B, self._written_B, self._every_V = keys_B, written_B, tokens_V

    def of(self, rows: Sequence[Row], ahead: Sequence[int], tokens_BFC: Tensor) -> Tensor:
        """See Noise; the rows are those of the keys."""
        numbers_BF = torch.stack([self._written_B + far for far in ahead], dim=1)
        return _counted(self._keys_B, numbers_BF, tokens_BFC)

    def of_some(self, rows_K: Tensor) -> NoiseOnDevice:
        """That of these rows; of one several times, where it is named so."""
        return NoiseOnDevice(self._keys_B[rows_K], self._written_B[rows_K], self._every_V)

    def behind(self, depth_BN: Tensor, tokens_BNC: Tensor) -> Tensor:
        """Of tokens behind every node, [B, N, C]."""
        return _counted(self._keys_B, self._written_B[:, None] + depth_BN, tokens_BNC)

    def draw_all(self, scores_BNV: Tensor, depth_BN: Tensor) -> Tensor:
        """What `draw` draws behind every node, [B, N]."""
        noise_BNV = self.behind(depth_BN, self._every_V.expand_as(scores_BNV))
        near_0_BNV = scores_BNV - scores_BNV.amax(dim=-1, keepdim=True)
        noisiest_BN, tokens_BN = (noise_BNV + near_0_BNV).max(dim=-1)
        return _if_known(tokens_BN, noisiest_BN)


# One operation, which no compiler looks into: Inductor's vectors of whole numbers are wrong on some
# processors (AVX2), and its loops over them overflow.
@torch.library.custom_op("medusa_heads::gumbel_noise", mutates_args=())
def _counted(keys_B: Tensor, numbers_BF: Tensor, tokens_BFC: Tensor) -> Tensor:
    """The noise of tokens of these numbers, by the keys of their rows."""
    stride = _signed(_STRIDE)
    places_BF = _mix(keys_B[:, None] + numbers_BF * stride) + stride
    return _gumbel(places_BF[..., None], tokens_BFC)


@_counted.register_fake
def _(keys_B: Tensor, numbers_BF: Tensor, tokens_BFC: Tensor) -> Tensor:
    shape = torch.broadcast_shapes((*numbers_BF.shape, 1), tokens_BFC.shape)
    return torch.empty(shape, dtype=torch.float, device=tokens_BFC.device)


def _if_known(tokens: Tensor, noisiest: Tensor) -> Tensor:
    return tokens.where(noisiest == noisiest, NO_TOKEN)


def chance_drawn(chance: float, luck: float) -> float:
    """That a token of this probability is drawn, where its own luck is known, and nothing of all
    others'."""
    return math.exp(-luck * (1.0 - chance) / max(chance, 1e-9))


def _place(key: int, place: int) -> int:
    """What a place's tokens are counted from."""
    return (_mixed((key + place * _STRIDE) % _WORD) + _STRIDE) % _WORD


def _gumbel(places_BF1: Tensor, tokens_BFC: Tensor) -> Tensor:
    words_BFC = torch.add(places_BF1, tokens_BFC, alpha=_signed(_STRIDE))
    # All in place: of many tokens, to ask for memory takes longer than to count.
    shifted_BFC = torch.empty_like(words_BFC)
    _mix(words_BFC, shifted_BFC)
    below_0_BFC = _to_the_right(words_BFC, 64 - _BITS, shifted_BFC).float()
    # Small numbers, which decide, keep all their digits in fp32; -1 itself would be infinity.
    below_0_BFC.add_(0.5).mul_(-_FRACTION).clamp_min_(2.0**-24 - 1)
    return below_0_BFC.log1p_().neg_().log_().neg_()


def _mix(words: Tensor, shifted: Tensor | None = None) -> Tensor:
    """`_mixed` of each word, in place; what is shifted is written to `shifted`."""
    shifted = torch.empty_like(words) if shifted is None else shifted
    for shift, factor in _MIX:
        words ^= _to_the_right(words, shift, shifted)
        if factor != 1:
            words *= _signed(factor)
    return words


def _to_the_right(words: Tensor, bits: int, shifted: Tensor) -> Tensor:
    """The words moved by so many bits, in `shifted`."""
    torch.bitwise_right_shift(words, bits, out=shifted)
    shifted &= (1 << (64 - bits)) - 1  # else copies of the sign come along
    return shifted


def _mixed(word: int) -> int:
    # Without a loop in half the time: a walk asks for some fifty tokens a node.
    word = (word ^ (word >> 30)) * _ONE & _MASK
    word = (word ^ (word >> 27)) * _OTHER & _MASK
    return word ^ (word >> 31)


def _signed(word: int) -> int:
    """The same bits as a number that int64 holds."""
    return word - _WORD if word >= _WORD // 2 else word
