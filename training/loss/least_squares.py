"""What sequential heads begin with: the linear maps that come closest to the target's own states.

Head i says what the target says once it has read token t + 1 + i. The target's vocabulary matrix
reads its own state there, and so a head comes close by making that state of what it reads: h_t and
the embeddings of the tokens between. The best linear map for that needs no steps of training, only
the sums of one pass over some text (docs/benchmarks/recipes.md, "Heads that begin with least
squares").

Shapes: B batch, T tokens, R rows of the text, K heads, D hidden, X columns of hidden states with
features, C = 1 + D * (K + 1) what all that heads read has columns, E = K * D.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from medusa_heads.config import IGNORED
from medusa_heads.heads import DraftHeads, HydraHeads
from medusa_heads.training.loss.rows import supervised_rows

ROWS_A_COLUMN = 20
"""Rows of the text for each column: of four times as many a head is right at .02 more positions."""

FEWEST_ROWS_A_COLUMN = 0.5

# Ridge: columns over rows, times this, is added to each square's share of one, as for weights that
# are expected to explain about as much as they leave. Best within a factor of three from 1.3 to 80
# rows a column.
RIDGE = 0.3

NUMBERS_AT_ONCE = 1 << 26


def begins_with_least_squares(heads: DraftHeads) -> bool:
    """Whether heads have linear maps of all they read."""
    return isinstance(heads, HydraHeads)


def columns(heads: DraftHeads) -> int:
    """C: of h_t, of each token's embedding, and one that is always 1."""
    assert heads.config.hidden_size is not None
    return 1 + heads.config.hidden_size * (heads.config.num_heads + 1)


@torch.no_grad()
def fit_linear(
    heads: DraftHeads,
    batches: Iterable[tuple[Tensor, Mapping[str, Any]]],
    most_rows: float,
) -> int:
    """Let fresh heads begin with the linear maps of least squares, by the first rows of some text
    at which every head has something to learn.

    Args:
        heads: fresh ones that hand h_t on, where `begins_with_least_squares`.
        batches: of the text: the target's hidden_BTX, and the inputs that it read.
        most_rows: that are read, to within a batch.

    Returns:
        How many were read. Of fewer than FEWEST_ROWS_A_COLUMN the heads stay as they are.
    """
    assert isinstance(heads, HydraHeads)
    sums = _Sums(heads)
    for hidden_BTX, inputs in batches:
        sums.add(hidden_BTX, inputs)
        if sums.rows >= most_rows:
            break
    if sums.rows >= FEWEST_ROWS_A_COLUMN * columns(heads):
        sums.solve()
    return sums.rows


class _Sums:
    """Products of what heads read with itself [C, C], and with what they should make of it
    [C, E], summed over rows."""

    def __init__(self, heads: HydraHeads) -> None:
        first = next(heads.parameters())
        self.heads, self.rows = heads, 0
        self._width = heads.config.hidden_size or 0
        size = columns(heads)
        zeros: Any = {"device": first.device, "dtype": torch.float32}
        self._read_CC = torch.zeros(size, size, **zeros)
        self._made_CE = torch.zeros(size, self._width * heads.config.num_heads, **zeros)

    def add(self, hidden_BTX: Tensor, inputs: Mapping[str, Any]) -> None:
        """Take in a batch."""
        ids_BT, positions_BT = inputs["input_ids"], inputs.get("position_ids")
        heads = self.heads.config.num_heads
        rows = supervised_rows(ids_BT, inputs["labels"], heads, positions_BT)
        state_ND = hidden_BTX[..., -self._width :].flatten(0, 1)
        chosen_R = (rows.labels_RK != IGNORED).all(dim=1).nonzero().squeeze(1)
        ahead_K = torch.arange(1, heads + 1, device=chosen_R.device)
        self.rows += len(chosen_R)
        for part_R in chosen_R.split(max(NUMBERS_AT_ONCE // len(self._read_CC), 1)):
            tokens_RE = self.heads.embed(rows.tokens_RK[part_R]).flatten(1)
            positions_R = rows.positions_R[part_R]
            read_RX = torch.cat([state_ND[positions_R].float(), tokens_RE.float()], dim=1)
            read_RC = F.pad(read_RX, (1, 0), value=1.0)
            made_RE = state_ND[positions_R[:, None] + ahead_K].flatten(1).float()
            self._read_CC.addmm_(read_RC.T, read_RC)
            self._made_CE.addmm_(read_RC.T, made_RE)

    def solve(self) -> None:
        """Give the heads their maps. What a head reads is the beginning of what the next one reads,
        and so the triangle of the last one's sums holds those of all."""
        diagonal_C = self._read_CC.diagonal()
        diagonal_C += (diagonal_C * RIDGE * len(diagonal_C) / self.rows).clamp_min(1e-6)
        factor_CC, failed = torch.linalg.cholesky_ex(self._read_CC)
        if failed:
            return  # states that are not finite, of which training itself says more
        for i, head in enumerate(self.heads.heads()):
            linear, own = head[0].res_connection, 1 + self._width * (i + 2)
            made_ED = self._made_CE[:own, self._width * i : self._width * (i + 1)]
            map_CD = torch.cholesky_solve(made_ED, factor_CC[:own, :own])
            linear.bias.copy_(map_CD[0])
            linear.weight.copy_(map_CD[1:].T)
