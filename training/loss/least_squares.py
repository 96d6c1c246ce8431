"""What heads with linear shortcuts begin with: the maps that come closest to the target's states.

Head i says what the target says once it has read token t + 1 + i. The target's vocabulary matrix
reads its own state there, and so a head comes close by making that state of what it reads: h_t and
the embeddings of the tokens between; with a prefix layer also what its attention mixes of the text,
and with induction, each head for itself, what followed like places.
The best linear map for that needs no steps of training, only the sums of one pass over some text
(docs/benchmarks/recipes.md, "Heads that begin with least squares").

Shapes: B batch, T tokens, N = B * T positions, R of them that teach all heads, K heads, S = K + 1,
D hidden, X columns of hidden states with features, C columns of all that heads read (one that is
always 1, h_t, what is mixed, embeddings), L of them up to token t + 1, E = K * D.
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
from medusa_heads.heads.text.prefix import PrefixLayer
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.loss.beside import SumsBeside, ridged
from medusa_heads.training.loss.rows import supervised_rows

ROWS_A_COLUMN = 20
"""Rows of the text for each column: of four times as many a head is right at .02 more positions."""

FEWEST_ROWS_A_COLUMN = 0.5

RIDGE_OF_SHARED = 0.01

DECAY = LossConfig().decay
"""Of what each further head counts for the layer before all of them: as it will by default."""

NUMBERS_AT_ONCE = 1 << 26


def begins_with_least_squares(heads: DraftHeads) -> bool:
    """Whether heads have linear maps of all they read."""
    return isinstance(heads, HydraHeads) or heads.config.linear_shortcut


def columns(heads: DraftHeads) -> int:
    """Of h_t, of each token's embedding that any head or the layer before it reads, and one: what
    attention mixes is read where there is text enough for that as well."""
    assert heads.config.hidden_size is not None
    return 1 + heads.config.hidden_size * (1 + _tokens(heads))


def _mixes(heads: DraftHeads) -> bool:
    return isinstance(heads.prefix, PrefixLayer)


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
        self.heads, self._width = heads, heads.config.hidden_size or 0
        size = columns(heads) + self._width * _mixes(heads)
        device = next(heads.parameters()).device
        self._read_CC = torch.zeros(size, size, device=device)
        self._made_CE = torch.zeros(size, self._width * heads.config.num_heads, device=device)
        self._rows = torch.zeros((), device=device)
        # Of every second text alone, what the first head and the layer read, and should make of it.
        lead = 1 + 3 * self._width if _mixes(heads) else 0
        self._half_LL = torch.zeros(lead, lead, device=device)
        self._half_LD = torch.zeros(lead, self._width, device=device)
        self._half_rows = torch.zeros((), device=device)
        self._beside = None
        if heads.config.induction:
            sizes = heads.config.num_heads, size, heads.prefix.held_per_token, self._width
            self._beside = SumsBeside(*sizes, like=self._read_CC)
        self._batches = 0
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
        mixed_ND = self._mixed(hidden_BTX[..., -self._width :], positions_BT)
        own_NKV = self._followed(hidden_BTX[..., -self._width :], inputs)
        known_R = finite_N[places_RS].all(dim=1)
        for read_N in (mixed_ND, own_NKV):
            if read_N is not None:
                known_R &= read_N.flatten(1).sum(dim=1)[places_RS[:, 0]].isfinite()
        places_RS, tokens_RK = places_RS[known_R], rows.tokens_RK[whole_R][known_R]
        self._rows += len(places_RS)
        self._batches += 1
        half_R = (places_RS[:, 0] // ids_BT.shape[1] + self._batches) % 2 == 0
        self._half_rows += half_R.sum()
        for part_RS, drafted_RK, of_half_R in zip(
            *(each.split(self._at_once) for each in (places_RS, tokens_RK, half_R)), strict=True
        ):
            parts = [state_ND[part_RS[:, 0]].float()]
            if mixed_ND is not None:
                parts.append(mixed_ND[part_RS[:, 0]])
            if tokens:
                parts.append(self.heads.embed(drafted_RK[:, :tokens]).flatten(1).float())
            read_RC = F.pad(torch.cat(parts, dim=1), (1, 0), value=1.0)
            self._read_CC.addmm_(read_RC.T, read_RC)
            made_RE = state_ND[part_RS[:, 1:]].flatten(1).float()
            self._made_CE.addmm_(read_RC.T, made_RE)
            if own_NKV is not None and self._beside is not None:
                self._beside.add(read_RC, own_NKV[part_RS[:, 0]], made_RE)
            if lead := len(self._half_LL):
                read_RL = read_RC[of_half_R, :lead]
                self._half_LL.addmm_(read_RL.T, read_RL)
                self._half_LD.addmm_(read_RL.T, made_RE[of_half_R, : self._width])

    def _followed(self, state_BTD: Tensor, inputs: Mapping[str, Any]) -> Tensor | None:
        """What each head reads by induction at each position [N, K, V]."""
        if self._beside is None:
            return None
        following_BTD = self.heads.embed(F.pad(inputs["input_ids"][:, 1:], (0, 1)))
        positions_BT = inputs.get("position_ids")
        return self.heads.prefix.followed(state_BTD, following_BTD, positions_BT).flatten(0, 1)

    def _mixed(self, state_BTD: Tensor, positions_BT: Tensor | None) -> Tensor | None:
        """What the attention of a layer before the heads mixes at each position [N, D]."""
        if not _mixes(self.heads):
            return None
        layer: PrefixLayer = self.heads.prefix
        mixed_BATE = layer.mix(state_BTD.to(layer.dtype), positions_BT)
        return mixed_BATE.transpose(1, 2).flatten(2).flatten(0, 1).float()

    def join(self) -> int:
        """Add up those of all processes; how many rows they are."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            halves = self._half_LL, self._half_LD, self._half_rows
            beside = () if self._beside is None else self._beside.parts()
            for sums in (self._read_CC, self._made_CE, self._rows, *halves, *beside):
                dist.all_reduce(sums)
        return int(self._rows)

    def solve(self, rows: int) -> bool:
        """Give the heads their maps; whether there are such."""
        if not _mixes(self.heads):
            return self._solve(rows)
        if self._attend(rows) and self._solve(rows):
            return True
        self.heads.prefix.attention_out.weight.zero_()
        return False

    def _attend(self, rows: int) -> bool:
        """Let the layer hand to all heads what they should make of what it mixes, where that tells
        anything, and count its sums to those of h_t; whether there are maps of it."""
        state, mixed = slice(1, 1 + self._width), slice(1 + self._width, 1 + 2 * self._width)
        if self._mixed_tells(rows):
            maps = self._maps(rows)
            if maps is None:
                return False
            counted = [map_CD * DECAY**i for i, map_CD in enumerate(maps)]
            out_DD = _shared([each[state] for each in counted], [each[mixed] for each in counted])
            self.heads.prefix.attention_out.weight.copy_(out_DD)
            self._read_CC[state] += out_DD @ self._read_CC[mixed]
            self._read_CC[:, state] += self._read_CC[:, mixed] @ out_DD.T
            self._made_CE[state] += out_DD @ self._made_CE[mixed]
        rest_C = self._without_mixed(len(self._read_CC))
        self._read_CC = self._read_CC[rest_C[:, None], rest_C]
        self._made_CE = self._made_CE[rest_C]
        return True

    def _without_mixed(self, size: int) -> Tensor:
        """Of so many columns, the others."""
        places_C = torch.arange(size, device=self._read_CC.device)
        return torch.cat([places_C[: 1 + self._width], places_C[1 + 2 * self._width :]])

    def _mixed_tells(self, rows: int) -> bool:
        """Whether the first head, by each half of the texts, makes more of the next state in the
        other half with what is mixed than without. Of little text, or of a target whose attention
        tells nothing more, it learns its text by heart."""
        width, lead, in_half = self._width, len(self._half_LL), int(self._half_rows)
        halves = (
            (self._half_LL, self._half_LD, in_half),
            (
                self._read_CC[:lead, :lead] - self._half_LL,
                self._made_CE[:lead, :width] - self._half_LD,
                rows - in_half,
            ),
        )
        errors = []
        for kept_L in (torch.arange(lead, device=self._half_LL.device), self._without_mixed(lead)):
            error = 0.0
            for (read_LL, made_LD, count), (other_LL, other_LD, _) in (halves, halves[::-1]):
                factor_LL, failed = ridged(read_LL[kept_L][:, kept_L], max(count, 1))
                if failed:
                    return False
                map_LD = torch.cholesky_solve(made_LD[kept_L], factor_LL)
                squares_LD = other_LL[kept_L][:, kept_L] @ map_LD - 2 * other_LD[kept_L]
                error += float((map_LD * squares_LD).sum())
            errors.append(error)
        return errors[0] < errors[1]

    def _solve(self, rows: int) -> bool:
        maps = self._maps(rows)
        if maps is None:
            return False
        linears = [head[0].res_connection for head in self.heads.heads()]
        if self._beside is not None:
            own = self.heads.prefix.held_per_token
            self.heads.prefix.matrices.copy_(torch.stack([map_CD[-own:] for map_CD in maps]))
            maps = [map_CD[:-own] for map_CD in maps]
        for linear, map_CD in zip(linears, maps, strict=True):
            linear.bias.copy_(map_CD[0])
            linear.weight.copy_(map_CD[1 : 1 + linear.in_features].T)
        if self.heads.prefix is not None and not self.heads.reads_drafts:
            of_state, of_token = zip(*(map_CD[1:].chunk(2) for map_CD in maps), strict=True)
            self.heads.prefix.token.weight.copy_(_shared(of_state, of_token))
        return True

    def _maps(self, rows: int) -> list[Tensor] | None:
        """Of all that each head reads, [C, D], what it reads for itself behind the rest; None where
        there are no such. What a head reads is the beginning of what the next one reads, and so the
        triangle of the last one's sums holds those of all."""
        columns, of_each = len(self._read_CC), self._width * self.heads.reads_drafts
        shared_by_all = columns - of_each * (self.heads.config.num_heads - 1)
        if self._beside is None:
            factor_CC, failed = ridged(self._read_CC, rows)
            if failed:
                return None
        maps: list[Tensor] = []
        for i, made_CD in enumerate(self._made_CE.split(self._width, dim=1)):
            own = shared_by_all + i * of_each
            map_CD: Tensor | None
            if self._beside is None:
                map_CD = torch.cholesky_solve(made_CD[:own], factor_CC[:own, :own])
            else:
                read_CC = self._read_CC[:own, :own]
                map_CD = self._beside.map_of(i, read_CC, made_CD[:own], rows)
            if map_CD is None or not bool(map_CD.isfinite().all()):
                return None
            maps.append(map_CD)
        return maps


def _shared(of_state: Sequence[Tensor], of_other: Sequence[Tensor]) -> Tensor:
    """The weight [D, D] of what a layer adds to h_t, so that heads make of it by their maps of h_t
    what comes closest to their maps of something else, each [D, D]."""
    of_state_DX, of_other_DX = torch.cat([*of_state], dim=1), torch.cat([*of_other], dim=1)
    products_DD = of_state_DX @ of_state_DX.T
    diagonal_D = products_DD.diagonal()
    diagonal_D += RIDGE_OF_SHARED * diagonal_D.mean()
    return torch.linalg.solve(products_DD, of_state_DX @ of_other_DX.T)
