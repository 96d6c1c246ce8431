"""What heads read beside the target's last hidden state: what came out of some of its layers.

A low, a middle and a high layer know what the last one, which is to name the next token alone, has
dropped. Each is brought to unit scale, and one product of all of them is added to the last hidden
state.

Source: the fused features of EAGLE-3 (Li et al. 2025, arXiv:2503.01840, section 3.1).

Shapes: R rows (any leading dimensions), D hidden, N features, X = (N + 1) * D.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Fusion(nn.Module):
    """`h + W [norm(f_0), norm(f_1), ..]`: the last hidden state alone while W is zero, as it
    starts. The norms have no weights of their own, which W makes up for."""

    def __init__(self, hidden_size: int, num_features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_features * hidden_size, hidden_size, bias=False)
        nn.init.zeros_(self.linear.weight)

    def forward(self, hidden_RX: Tensor) -> Tensor:
        features_RND, last_RD = self.split(hidden_RX.to(self.linear.weight.dtype))
        normed_RND = F.rms_norm(features_RND, features_RND.shape[-1:])
        return last_RD + self.linear(normed_RND.flatten(-2))

    def split(self, hidden_RX: Tensor) -> tuple[Tensor, Tensor]:
        """The features as the target has them, (..., N, D), and its last hidden state."""
        width = self.linear.out_features
        assert hidden_RX.shape[-1] == self.linear.in_features + width, "see target.with_features"
        parts_RND = hidden_RX.unflatten(-1, (-1, width))
        return parts_RND[..., :-1, :], parts_RND[..., -1, :]
