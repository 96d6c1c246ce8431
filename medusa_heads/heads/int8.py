"""Linear layers in eight bits: a quarter of what they are in float32, which many processors read
and multiply faster.

Shapes: R rows (any leading dimensions), N all of them, D inputs, O outputs.
Source: products of integers, with a scale for each row of weights and for each input (Jacob et al.
2018, arXiv:1712.05877; Dettmers et al. 2022, arXiv:2208.07339, section 2).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from medusa_heads.heads.near import NearLinear, made_of
from medusa_heads.machine.kernels import int8_product

# Where a processor has no instructions for such products, two of them are added in 16 bits, which
# these weights never fill. Elsewhere another bit would bring nothing that a draft could tell.
_MOST_WEIGHT = 63
_AT_ONCE = 1 << 22  # weights that are rounded at a time
# A layer that also hands its input on has a diagonal beside which all other weights would be
# rounded away.
_OUTSTANDING = 8.0  # times as large as the others


class Rounded(NamedTuple):
    """Weights in eight bits."""

    int8_OD: Tensor  # the weights, those that hand inputs on left out
    unit_O: Tensor  # what a unit of each row is
    # The weight of each output's own input; None where these are as all others.
    handed_on_O: Tensor | None
    first: int  # the column of the first output's own input


class Int8Linear(NearLinear):
    """A linear layer that multiplies in eight bits."""

    _rounded: Rounded | None = None  # when it is first asked for

    @property
    def held(self) -> int:
        """Bytes besides the weights."""
        return (
            sum(part.nbytes for part in self._parts() if isinstance(part, Tensor))
            if self.is_near
            else 0
        )

    def rows(self, x_RD: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """See NearLinear; in float32."""
        if not self.is_near:
            return self.usual_rows(x_RD, start, stop).float()
        int8_OD, unit_O, handed_on_O, first = self._parts()
        x_ND = x_RD.flatten(0, -2).float()
        out_NO = int8_product(x_ND, int8_OD[start:stop]).mul_(unit_O[start:stop])
        if handed_on_O is not None:
            own_NO = x_ND[:, first : first + self.out_features]
            out_NO.addcmul_(own_NO[:, start:stop], handed_on_O[start:stop])
        if self.bias is not None:
            out_NO.add_(self.bias[start:stop])
        return out_NO.unflatten(0, x_RD.shape[:-1])

    def _parts(self) -> Rounded:
        if self._rounded is None:
            self._rounded = made_of(self.weight, _round)
        return self._rounded


def _round(weight_OD: Tensor) -> Rounded:
    handed_on_O, first = _handed_on(weight_OD)
    rows = max(_AT_ONCE // weight_OD.shape[1], 1)
    int8s, units = [], []
    for start in range(0, len(weight_OD), rows):
        piece = weight_OD[start : start + rows].to(torch.float32, copy=True)
        if handed_on_O is not None:
            piece.diagonal(first + start).zero_()
        units.append(piece.abs().amax(dim=1).div_(_MOST_WEIGHT).clamp_min_(1e-30))
        int8s.append((piece / units[-1][:, None]).round_().to(torch.int8))
    return Rounded(torch.cat(int8s), torch.cat(units), handed_on_O, first)


def _handed_on(weight_OD: Tensor) -> tuple[Tensor | None, int]:
    """Of several inputs side by side, each as wide as what comes out, that which the layer also
    hands on: the weights of its diagonal, and its first column."""
    usual = weight_OD.abs().mean(dtype=torch.float32)
    for first in range(0, weight_OD.shape[1] - len(weight_OD) + 1, len(weight_OD)):
        # A copy: a view would follow the weights, and keep them.
        own_O = weight_OD.detach().diagonal(first).to(torch.float32, copy=True)
        if own_O.abs().mean() > _OUTSTANDING * usual:
            return own_O, first
    return None, 0
