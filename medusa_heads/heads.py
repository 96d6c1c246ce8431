"""Medusa heads: K small networks on the target's last hidden state.

Shapes: R rows (any leading dimensions), K heads, D hidden, V vocabulary.
Source: Cai et al. 2024, "Medusa", arXiv:2401.10774, section 2.1.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medusa_heads.config import HeadsConfig


class HasVocabulary(Protocol):
    """What heads need of a target: a TargetModel, or any transformers causal LM."""

    def get_output_embeddings(self) -> Any:
        """The lm_head: a module with `weight` [V, D] and `bias` [V] or None."""


class ResBlock(nn.Module):
    """`x + SiLU(W x + b)`, the identity while W and b are zero, as they start."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x_RD: Tensor) -> Tensor:
        return x_RD + F.silu(self.linear(x_RD))


class MedusaHeads(nn.Module):
    """K heads over a frozen target. Head i predicts token t + 2 + i from h_t.

    The state dict holds what is trained and nothing of the target: `{i}.{l}.linear.weight` [D, D],
    `{i}.{l}.linear.bias` [D] and, with own vocabulary matrices, `{i}.{L}.weight` [V, D] (and
    `{i}.{L}.bias` [V] where the target's lm_head has one).
    """

    def __init__(self, config: HeadsConfig) -> None:
        if config.hidden_size is None or config.vocab_size is None:
            raise ValueError(
                "the heads' hidden_size and vocab_size are not known yet: use "
                "MedusaHeads.from_target(target, config), which reads them off the target"
            )
        super().__init__()
        self.config = config
        self._shared: tuple[Tensor, Tensor | None] | None = None
        self._stack: tuple[list[tuple[int, int]], list[tuple[Tensor, Tensor]]] | None = None
        for i in range(config.num_heads):
            blocks: list[nn.Module] = [
                ResBlock(config.hidden_size) for _ in range(config.num_layers)
            ]
            if config.vocab_matrix == "own":
                blocks.append(nn.Linear(config.hidden_size, config.vocab_size, bias=False))
            # Named "0", "1", ... as in FasterDecoding's checkpoints.
            self.add_module(str(i), nn.Sequential(*blocks))
        # Kept, because finding them anew costs more than a head's own work on a small target.
        self._all_parameters = tuple(self.parameters())

    @classmethod
    def from_target(cls, target: HasVocabulary, config: HeadsConfig | None = None) -> MedusaHeads:
        """Fresh fp32 heads on the target's device; each predicts exactly what its lm_head does.

        Raises:
            ValueError: `config` names sizes other than the target's.
        """
        weight_VD, bias_V = _vocabulary(target)
        vocab_size, hidden_size = weight_VD.shape
        config = (config or HeadsConfig()).for_target(hidden_size, vocab_size)
        heads = cls(config).to(device=weight_VD.device, dtype=torch.float32)
        heads.share(target)
        if config.vocab_matrix == "own":
            for i in range(config.num_heads):
                out = heads._own(i)
                with torch.no_grad():
                    out.weight.copy_(weight_VD)
                if bias_V is not None:
                    out.bias = nn.Parameter(bias_V.detach().to(out.weight.dtype, copy=True))
        return heads

    def share(self, target: HasVocabulary) -> None:
        """Project with this target's vocabulary matrix. It stays the target's: neither a parameter
        of the heads nor part of their state dict.

        Raises:
            ValueError: the target's sizes are not those the heads were made for.
        """
        weight_VD, bias_V = _vocabulary(target)
        vocab_size, hidden_size = weight_VD.shape
        self.config = self.config.for_target(hidden_size, vocab_size)
        if self.config.vocab_matrix == "shared":
            self._shared = (weight_VD, bias_V)

    def features(self, hidden_RD: Tensor) -> Tensor:
        """Outputs of the residual blocks, before the vocabulary: (..., D) -> (..., K, D)."""
        hidden_RD = hidden_RD.to(self._all_parameters[0].dtype)
        if hidden_RD.ndim == 2 and not torch.is_grad_enabled():
            return self._features_at_once(hidden_RD)
        features = []
        for sequence in self._sequences():
            x_RD = hidden_RD
            for block in islice(sequence, self.config.num_layers):
                x_RD = block(x_RD)
            features.append(x_RD)
        return torch.stack(features, dim=-2)

    def _features_at_once(self, hidden_RD: Tensor) -> Tensor:
        """One product for the blocks of all heads: while decoding, calls cost more than sums."""
        x_KRD = hidden_RD.expand(self.config.num_heads, -1, -1)
        for weight_KDD, bias_K1D in self._stacked():
            x_KRD = x_KRD + F.silu(torch.baddbmm(bias_K1D, x_KRD, weight_KDD))
        return x_KRD.transpose(0, 1)

    def _stacked(self) -> list[tuple[Tensor, Tensor]]:
        """Every layer's weights [K, D, D], transposed, and biases [K, 1, D]; made anew when a
        parameter was written to or moved."""
        state = [(tensor.data_ptr(), tensor._version) for tensor in self._all_parameters]
        if self._stack is None or self._stack[0] != state:
            blocks = [list(islice(heads, self.config.num_layers)) for heads in self._sequences()]
            layers = []
            for layer in zip(*blocks, strict=True):
                weight_KDD = torch.stack([block.linear.weight.T for block in layer]).contiguous()
                bias_K1D = torch.stack([block.linear.bias[None] for block in layer])
                layers.append((weight_KDD, bias_K1D))
            self._stack = (state, layers)
        return self._stack[1]

    def vocab_matrix(self, head: int) -> tuple[Tensor, Tensor | None]:
        """Weight [V, D] and bias [V] or None with which head `head` projects."""
        if self.config.vocab_matrix == "own":
            out = self._own(head)
            return out.weight, out.bias
        if self._shared is None:
            raise ValueError(
                "these heads share their target's vocabulary matrix: call heads.share(target) first"
            )
        return self._shared

    def forward(self, hidden_RD: Tensor) -> Tensor:
        """Logits of every head: (..., D) -> (..., K, V)."""
        features_RKD = self.features(hidden_RD)
        if self.config.vocab_matrix == "shared":
            weight_VD, bias_V = self.vocab_matrix(0)
            # In two dimensions: with odd strides in three, a product takes a far slower path.
            flat_ND = features_RKD.flatten(0, -2).to(weight_VD.dtype)
            return F.linear(flat_ND, weight_VD, bias_V).unflatten(0, features_RKD.shape[:-1])
        return torch.stack(
            [self._own(i)(features_RKD[..., i, :]) for i in range(self.config.num_heads)], dim=-2
        )

    def _sequences(self) -> Iterator[Any]:
        return iter(self._modules.values())

    def _own(self, head: int) -> nn.Linear:
        out = self.get_submodule(f"{head}.{self.config.num_layers}")
        assert isinstance(out, nn.Linear)
        return out


def _vocabulary(target: HasVocabulary) -> tuple[Tensor, Tensor | None]:
    lm_head = target.get_output_embeddings()
    weight_VD = getattr(lm_head, "weight", None)
    if (
        not isinstance(weight_VD, Tensor)
        or weight_VD.ndim != 2
        or not weight_VD.is_floating_point()
    ):
        raise ValueError(
            "the target must have an unquantised lm_head of shape [vocab_size, hidden_size], got "
            f"{type(lm_head).__name__}: load the target with its lm_head left out of quantisation"
        )
    bias_V = getattr(lm_head, "bias", None)
    return weight_VD.detach(), None if bias_V is None else bias_V.detach()
