"""What heads with linear shortcuts begin with: the maps that come closest to the target's states.

Head i says what the target says once it has read token t + 1 + i. The target's vocabulary matrix
reads its own state there, and so a head comes close by making that state of what it reads: h_t and
the embeddings of the tokens between. The best linear map for that needs no steps of training, only
the sums of one pass over some text (docs/benchmarks/recipes.md, "Heads that begin with least
squares").

Shapes: B batch, T tokens, N = B * T positions, R of them that teach all heads, K heads, S = K + 1,
D hidden, X columns of hidden states with features, C columns of all that heads read (one that is
always 1, h_t, embeddings), E = K * D.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
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

RIDGE_OF_TOKEN = 0.01

NUMBERS_AT_ONCE = 1 << 26


def begins_with_least_squares(heads: DraftHeads) -> bool:
    """Whether heads have linear maps of all they read."""
    return isinstance(heads, HydraHeads) or heads.config.linear_shortcut


def columns(heads: DraftHeads) -> int:
    """C: of h_t, of each token's embedding that any head or the layer before it reads, and one."""
    assert heads.config.hidden_size is not None
    return 1 + heads.config.hidden_size * (1 + _tokens(heads))


def _tokens(heads: DraftHeads) -> int:
    """How many tokens behind t the heads read, through a prefix layer the first."""
    return heads.config.num_heads if heads.reads_drafts else int(heads.prefix is not None)


@torch.no_grad()
def fit_linear(heads: DraftHeads, batches: Iterable[tuple[Tensor, Mapping[str, Any]]]) -> int:
    """Let fresh heads begin with the linear maps of least squares, by the rows of some text at
    which every head has something to learn. Processes each read their part of it.

    Args:
        heads: fresh ones, where `begins_with_least_squares`.
        batches: of the text: the target's hidden_BTX, and the inputs that it read.

    Returns:
        By how many rows; 0 where heads stay as they are: there were fewer than
        FEWEST_ROWS_A_COLUMN, or no such maps of them.
    """
    sums = _Sums(heads)
    for hidden_BTX, inputs in batches:
        sums.add(hidden_BTX, inputs)
    rows = sums.join()
    enough = rows >= FEWEST_ROWS_A_COLUMN * columns(heads)
    return rows if enough and sums.solve(rows) else 0


class _Sums:
    """Products of what heads read with itself [C, C], and with what they should make of it
    [C, E], summed over rows."""

    def __init__(self, heads: DraftHeads) -> None:
        self.heads, size = heads, columns(heads)
        self._width = heads.config.hidden_size or 0
        device = next(heads.parameters()).device
        self._read_CC = torch.zeros(size, size, device=device)
        self._made_CE = torch.zeros(size, self._width * heads.config.num_heads, device=device)
        self._rows = torch.zeros((), device=device)
        self._at_once = max(NUMBERS_AT_ONCE // sum(self._made_CE.shape), 1)

    def add(self, hidden_BTX: Tensor, inputs: Mapping[str, Any]) -> None:
        """Take in a batch, but for rows with states that are not finite."""
        ids_BT, positions_BT = inputs["input_ids"], inputs.get("position_ids")
        heads, tokens = self.heads.config.num_heads, _tokens(self.heads)
        rows = supervised_rows(ids_BT, inputs["labels"], heads, positions_BT)
        whole_R = (rows.labels_RK != IGNORED).all(dim=1)
        state_ND = hidden_BTX[..., -self._width :].flatten(0, 1)
        places_RS = rows.positions_R[whole_R, None] + torch.arange(heads + 1, device=whole_R.device)
        finite_N = state_ND.sum(dim=1, dtype=torch.float32).isfinite()
        known_R = finite_N[places_RS].all(dim=1)
        places_RS, tokens_RK = places_RS[known_R], rows.tokens_RK[whole_R][known_R]
        self._rows += len(places_RS)
        for part_RS, drafted_RK in zip(
            places_RS.split(self._at_once), tokens_RK.split(self._at_once), strict=True
        ):
            parts = [state_ND[part_RS[:, 0]].float()]
            if tokens:
                parts.append(self.heads.embed(drafted_RK[:, :tokens]).flatten(1).float())
            read_RC = F.pad(torch.cat(parts, dim=1), (1, 0), value=1.0)
            self._read_CC.addmm_(read_RC.T, read_RC)
            self._made_CE.addmm_(read_RC.T, state_ND[part_RS[:, 1:]].flatten(1).float())

    def join(self) -> int:
        """Add up those of all processes; how many rows they are."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            for sums in (self._read_CC, self._made_CE, self._rows):
                dist.all_reduce(sums)
        return int(self._rows)

    def solve(self, rows: int) -> bool:
        """Give the heads their maps; whether there are such. What a head reads is the beginning of
        what the next one reads, and so the triangle of the last one's sums holds those of all."""
        diagonal_C = self._read_CC.diagonal()
        diagonal_C += (diagonal_C * RIDGE * len(diagonal_C) / rows).clamp_min(1e-6)
        factor_CC, failed = torch.linalg.cholesky_ex(self._read_CC)
        del self._read_CC
        if failed:
            return False
        linears, maps = [head[0].res_connection for head in self.heads.heads()], []
        for made_CD, linear in zip(self._made_CE.split(self._width, dim=1), linears, strict=True):
            own = 1 + linear.in_features if self.heads.reads_drafts else len(factor_CC)
            maps.append(torch.cholesky_solve(made_CD[:own], factor_CC[:own, :own]))
        if not all(bool(map_CD.isfinite().all()) for map_CD in maps):
            return False
        for linear, map_CD in zip(linears, maps, strict=True):
            linear.bias.copy_(map_CD[0])
            linear.weight.copy_(map_CD[1 : 1 + linear.in_features].T)
        if self.heads.prefix is not None and not self.heads.reads_drafts:
            self._share_token([map_CD[1:].chunk(2) for map_CD in maps])
        return True

    def _share_token(self, maps: Sequence[Sequence[Tensor]]) -> None:
        """What heads should make of token t + 1, and a layer reads for all of them: what comes
        closest to that behind their maps of h_t."""
        of_state_DX = torch.cat([of_state_DD for of_state_DD, _ in maps], dim=1)
        of_token_DX = torch.cat([of_token_DD for _, of_token_DD in maps], dim=1)
        products_DD = of_state_DX @ of_state_DX.T
        diagonal_D = products_DD.diagonal()
        diagonal_D += RIDGE_OF_TOKEN * diagonal_D.mean()
        wanted_DD = torch.linalg.solve(products_DD, of_state_DX @ of_token_DX.T)
        self.heads.prefix.token.weight.copy_(wanted_DD)
