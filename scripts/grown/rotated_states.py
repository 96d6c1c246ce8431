"""A rotated target and its hidden states, without running it: they follow from the small one's.

Shapes: B batch, T tokens, D hidden of the small target, E of the rotated one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa_heads import TargetModel
from medusa_heads.training.hidden.states import DrawnOrder, HiddenStates
from scripts.grown.model import grow
from scripts.grown.rotated import random_basis
from scripts.grown.shape import Shape

BASIS = 0  # seed of it


@dataclass(frozen=True)
class Rotated:
    """A rotated target, and what its hidden states are made of.

    Attributes:
        target: rotated, perhaps grown.
        matrix_DE: hidden states of the small target times this are those of the rotated one.
    """

    target: TargetModel
    matrix_DE: Tensor

    @classmethod
    def of(cls, small: TargetModel, width: int) -> Rotated:
        """The small target in a random basis, grown to `width` channels."""
        shape = Shape.of(small.config)
        heads, keys = shape.num_attention_heads, shape.num_key_value_heads
        heads = next(n for n in range(heads, width) if width % n == 0 and n % keys == 0)
        shape = shape.with_sizes({"hidden_size": width, "num_attention_heads": heads})
        grown = grow(small, None, shape, dtype=torch.float32, rotation=BASIS)
        model: Any = small.model
        basis_DE = random_basis(shape.hidden_size, BASIS)[: small.hidden_size]
        weights_D = model.model.norm.weight.detach().float() * grown.place.norm_scale
        rotated = cls(grown.target, basis_DE / weights_D[:, None])
        ids_BT = torch.randint(
            small.vocab_size, (1, 32), generator=torch.Generator().manual_seed(0)
        )
        made_BTE = small.hidden(ids_BT) @ rotated.matrix_DE
        torch.testing.assert_close(made_BTE, grown.target.hidden(ids_BT), rtol=0, atol=2e-3)
        difference, spread = grown.differences()["target"]
        assert difference < 1e-3 * spread, "a rotated target has the logits of the small one"
        return rotated


class RotatedStates(HiddenStates):
    """Hidden states of a rotated target, made of those of the small one.

    Args:
        rotated: the target.
        small: where the small target's come from.
    """

    def __init__(self, rotated: Rotated, small: HiddenStates) -> None:
        super().__init__(rotated.target)
        self._small, self._matrix_DE = small, rotated.matrix_DE
        self.collate = small.collate

    def of(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return self._small.of(inputs) @ self._matrix_DE

    def order(self, rows: int, seed: int) -> DrawnOrder:
        return self._small.order(rows, seed)
