"""Honest probabilities: a temperature for each head, and what dynamic trees gain by them.

Shapes: B batch, T tokens, R supervised rows, S measured positions, H heads looked at, K heads, G
temperatures tried, D hidden, V vocabulary.
Source: Guo et al. 2017, "On calibration of modern neural networks", arXiv:1706.04599, section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from medusa_heads.config import IGNORED
from medusa_heads.heads import DraftHeads
from medusa_heads.training.hidden.states import HiddenStates, refuse_not_finite
from medusa_heads.training.loss.rows import SupervisedRows, encode_rows, supervised_rows
from medusa_heads.training.measure.ranks import head_ranks
from medusa_heads.training.measure.reliability import HeadCalibration, reliability
from medusa_heads.trees.dynamic_tree import (
    DYNAMIC_RANKS,
    DYNAMIC_SIZES,
    DYNAMIC_WIDTH,
    accepted_by_size,
    best_first_tree,
    guesses,
)
from medusa_heads.trees.statistics import MAX_RANK, HeadStatistics

if TYPE_CHECKING:
    from datasets import Dataset

TEMPERATURES = tuple(0.5 * 1.1**step for step in range(18))  # 0.5 to 2.5
MAX_POSITIONS = 4096  # enough for one number a head, and a few seconds' work
_SEQUENTIAL_POSITIONS = 1024  # at which trees of sequential heads, which cost more, are built
_WELL_SO_FAR = 2  # a head's draft is looked at where the heads before it held the truth this high
_BATCH = 8
_LOGITS_AT_ONCE = 1 << 24


Watch = Callable[[Sequence[range]], Iterable[range]]
"""Is given the batches of rows, and hands them on one by one: a progress bar."""


@torch.no_grad()
def measure_heads(
    heads: DraftHeads,
    hidden_states: HiddenStates,
    text: Dataset,
    *,
    watch: Watch = iter,
) -> tuple[HeadStatistics, list[HeadCalibration]]:
    """Everything that is known of heads after their training, of heads from anywhere.

    The target reads the text once.

    Args:
        heads: on their target.
        hidden_states: of that target.
        text: columns `input_ids` and `labels`; every position of it is measured.
        watch: shows how far the target has read.

    Returns:
        The statistics, calibrated, and how honest each head is.

    Raises:
        ValueError: no position has a true token for every head, or the target's hidden states are
            not finite.
    """
    hidden_SD, tokens_SK, labels_SK = _positions(heads, hidden_states, text, watch=watch)
    refuse_not_finite(hidden_SD)
    rows = SupervisedRows(torch.arange(len(hidden_SD)), labels_SK, tokens_SK)
    statistics = HeadStatistics.from_ranks(head_ranks(heads, hidden_SD, rows, MAX_RANK))
    return statistics, _calibrate(statistics, heads, hidden_SD, tokens_SK, labels_SK)


@torch.no_grad()
def calibrate(
    statistics: HeadStatistics, heads: DraftHeads, hidden_states: HiddenStates, held_out: Dataset
) -> list[HeadCalibration]:
    """Fit the temperatures by held-out likelihood, and measure dynamic trees with them.

    Both are written into `statistics`. Only positions with a true token for every head count; where
    there are more than MAX_POSITIONS, they are taken evenly from all of the text.

    Returns:
        How honest each head is there; nothing where no position has all true tokens.
    """
    supervised = sum(sum(label != IGNORED for label in row) for row in held_out["labels"])
    found = _positions(heads, hidden_states, held_out, every=-(-supervised // MAX_POSITIONS))
    return _calibrate(statistics, heads, *found) if len(found[0]) else []


def _positions(
    heads: DraftHeads,
    hidden_states: HiddenStates,
    text: Dataset,
    *,
    every: int = 1,
    watch: Watch = iter,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of positions where every head has a true token: hidden_SD, tokens_SK, labels_SK."""
    starts = range(0, len(text), _BATCH)
    parts = []
    for chosen in watch([range(start, min(start + _BATCH, len(text))) for start in starts]):
        batch = hidden_states.collate([text[i] for i in chosen])
        batch = {name: tensor.to(hidden_states.target.device) for name, tensor in batch.items()}
        packed_BT = batch.get("position_ids")
        rows = supervised_rows(
            batch["input_ids"], batch["labels"], heads.config.num_heads, packed_BT
        )
        hidden_RD = encode_rows(heads, hidden_states.of(batch), batch, rows)
        taken_R = (rows.labels_RK != IGNORED).all(dim=1).nonzero().flatten()[::every]
        parts.append((hidden_RD[taken_R], rows.tokens_RK[taken_R], rows.labels_RK[taken_R]))
    hidden_SD, tokens_SK, labels_SK = (torch.cat(part) for part in zip(*parts, strict=True))
    return hidden_SD, tokens_SK, labels_SK


def _calibrate(
    statistics: HeadStatistics,
    heads: DraftHeads,
    hidden_SD: Tensor,
    tokens_SK: Tensor,
    labels_SK: Tensor,
) -> list[HeadCalibration]:
    """Temperatures and dynamic trees, written into `statistics`.

    A head's node is reached only where the heads before it were right, and there it is surer than
    elsewhere. Its temperature is therefore fitted on positions where the true tokens were among the
    earlier heads' best two. Tokens that the heads cannot draft say nothing of their temperature.
    """
    size = heads.config.num_heads * heads.config.num_candidates
    step = max(1, _LOGITS_AT_ONCE // size)
    parts = [
        _measure(heads(hidden, tokens).float(), heads.draft_ids(labels))
        for hidden, tokens, labels in zip(
            hidden_SD.split(step), tokens_SK.split(step), labels_SK.split(step), strict=True
        )
    ]
    true_SK, best_SK, ranks_SK, totals_SKG = (torch.cat(p) for p in zip(*parts, strict=True))
    grid_G = torch.tensor((*TEMPERATURES, 1.0), device=true_SK.device)
    losses_SKG = totals_SKG - true_SK[:, :, None] / grid_G
    confidence_SKG = (best_SK[:, :, None] / grid_G - totals_SKG).exp()
    calibrations = []
    for head in range(ranks_SK.shape[1]):
        reached_S = _reached(ranks_SK[:, : head + 1])
        chosen = int(losses_SKG[reached_S, head, :-1].mean(dim=0).argmin())
        right_S = ranks_SK[reached_S, head] == 0
        before, after = (
            reliability(confidence_SKG[reached_S, head, g].cpu(), right_S.cpu())
            for g in (-1, chosen)
        )
        calibrations.append(HeadCalibration(TEMPERATURES[chosen], before, after))
    statistics.temperatures = [calibration.temperature for calibration in calibrations]
    if heads.sequential:
        every = -(-len(labels_SK) // _SEQUENTIAL_POSITIONS)
        hidden_SD, tokens_SK, labels_SK = hidden_SD[::every], tokens_SK[::every], labels_SK[::every]
        step = max(1, step // DYNAMIC_WIDTH)
    statistics.dynamic_tokens_per_step = _dynamic_tokens_per_step(
        heads, statistics.temperatures, hidden_SD, tokens_SK, labels_SK, step
    )
    return calibrations


def _dynamic_tokens_per_step(
    heads: DraftHeads,
    temperatures: list[float],
    hidden_SD: Tensor,
    tokens_SK: Tensor,
    labels_SK: Tensor,
    chunk: int,
) -> dict[int, float]:
    """1 + the mean number of accepted nodes of dynamic trees at the measured positions, by size."""
    ranks = min(DYNAMIC_RANKS, heads.config.num_candidates)
    width = DYNAMIC_WIDTH if heads.sequential else None
    most = sum(ranks ** (level + 1) for level in range(heads.config.num_heads))
    sizes = [size for size in DYNAMIC_SIZES if size <= most]
    accepted = [0] * len(sizes)
    for hidden_BD, tokens_BK, true_BK in zip(
        hidden_SD.split(chunk), tokens_SK.split(chunk), labels_SK.split(chunk), strict=True
    ):
        guess = guesses(heads, hidden_BD, ranks, temperatures)
        tree = best_first_tree(tokens_BK[:, 0], guess, sizes[-1], heads.config.num_heads, width)
        counts = accepted_by_size(tree, true_BK, sizes)
        accepted = [a + b for a, b in zip(accepted, counts, strict=True)]
    return {size: 1 + a / len(labels_SK) for size, a in zip(sizes, accepted, strict=True)}


def _reached(ranks_SH: Tensor) -> Tensor:
    """The positions to fit the last of these heads on: it can draft the truth, and the heads before
    it did well, if that leaves enough."""
    known_S = ranks_SH[:, -1] != IGNORED
    well_S = known_S & ((ranks_SH[:, :-1] >= 0) & (ranks_SH[:, :-1] < _WELL_SO_FAR)).all(dim=1)
    return well_S if well_S.sum() >= 64 else known_S


def _measure(logits_RKV: Tensor, labels_RK: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each row: the true token's logit, the largest one, the true token's rank, each [R, K]
    (IGNORED where it cannot be drafted), and the log-normaliser at each temperature and at 1
    [R, K, G + 1]."""
    known_RK = labels_RK != IGNORED
    true_RK = logits_RKV.gather(2, labels_RK.clamp_min(0)[:, :, None])[..., 0]
    ranks_RK = (logits_RKV > true_RK[..., None]).sum(dim=-1).where(known_RK, IGNORED)
    grid = (*TEMPERATURES, 1.0)
    totals_RKG = torch.stack([(logits_RKV / t).logsumexp(dim=-1) for t in grid], dim=-1)
    return true_RK, logits_RKV.amax(dim=-1), ranks_RK, totals_RKG
