"""Honest probabilities: how often heads are right where they say so, a temperature for each that
mends it, and what dynamic trees gain by them.

Shapes: B batch, T tokens, R supervised rows, S measured positions, K heads, G temperatures tried,
D hidden, V vocabulary.
Source: Guo et al. 2017, "On calibration of modern neural networks", arXiv:1706.04599, section 2
(reliability diagrams, the expected calibration error of equation 3) and section 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import send_to_device
from datasets import Dataset
from torch import Tensor

from medusa_heads.config import IGNORED
from medusa_heads.heads import DraftHeads, Eagle3Heads
from medusa_heads.heads.base import After
from medusa_heads.training.data.columns import row_lengths
from medusa_heads.training.hidden.states import Batch, HiddenStates, refuse_not_finite
from medusa_heads.training.loss.rows import SupervisedRows, read_rows
from medusa_heads.training.measure.metrics import head_ranks, ranks_of
from medusa_heads.trees.dynamic_tree import (
    DYNAMIC_RANKS,
    DYNAMIC_SIZES,
    DYNAMIC_WIDTH,
    Ranking,
    accepted_by_size,
    best_first_tree,
    guesses,
    same_guesses,
)
from medusa_heads.trees.on_host import best_first_on_host
from medusa_heads.trees.statistics import MAX_RANK, HeadStatistics

TEMPERATURES = tuple(0.5 * 1.1**step for step in range(18))  # 0.5 to 2.5
_GRID = (*TEMPERATURES, 1.0)
MAX_POSITIONS = 4096  # enough for one number a head, and a few seconds' work
_ROWS = 256  # that they are from, of long ones; so many differ enough
_SEQUENTIAL_POSITIONS = 1024  # at which trees of sequential heads, which cost more, are built
_WELL_SO_FAR = 2  # a head's draft is looked at where the heads before it held the truth this high
_BATCH = 8  # rows that the target reads at once, at most
_TOKENS_AT_ONCE = 1 << 14  # where nobody says how many rows fit: its memory grows with these
_LOGITS_AT_ONCE = 1 << 24
BINS = 15

Watch = Callable[[Sequence[range]], Iterable[range]]
"""Is given the batches of rows, and hands them on one by one: a progress bar."""


def reliability(confidence_S: Tensor, right_S: Tensor, bins: int = BINS) -> dict[str, Any]:
    """Guesses, right or not, in bins of equal width by confidence, with their means, empty bins
    left out; and the expected calibration error: the mean gap between the two, 0 to 1."""
    place_S = (confidence_S.double() * bins).long().clamp(0, bins - 1)
    found = []
    for in_S in (place_S == place for place in place_S.unique()):
        means = (float(of_S[in_S].double().mean()) for of_S in (confidence_S, right_S))
        names = ("count", "confidence", "accuracy")
        found.append(dict(zip(names, (int(in_S.sum()), *means), strict=True)))
    gaps = (part["count"] * abs(part["confidence"] - part["accuracy"]) for part in found)
    return {"expected_error": sum(gaps) / max(len(place_S), 1), "bins": found}


@torch.no_grad()
def measure_heads(
    heads: DraftHeads, hidden_states: HiddenStates, text: Dataset, *, watch: Watch = iter
) -> tuple[HeadStatistics, list[dict[str, Any]]]:
    """Everything that is known of heads after their training, of heads from anywhere: statistics,
    calibrated, and how honest each head is. Every position of the text (columns `input_ids` and
    `labels`) is measured; the target reads it once, long rows by fewer at a time, and `watch` shows
    how far. Raises ValueError: no position has a true token for every head, or the target's hidden
    states are not finite."""
    longest = int(row_lengths(text).max(initial=1))
    read = _Read(hidden_states, text, min(_BATCH, max(_TOKENS_AT_ONCE // longest, 1)))
    found = _positions(heads, read, watch=watch)
    refuse_not_finite(found.hidden_SD)
    rows = SupervisedRows(torch.arange(len(found.hidden_SD)), found.labels_SK, found.tokens_SK)
    statistics = HeadStatistics.from_ranks(head_ranks(heads, found.hidden_SD, rows, MAX_RANK))
    return statistics, _calibrate(statistics, heads, found, read)


@torch.no_grad()
def calibrate(
    statistics: HeadStatistics,
    heads: DraftHeads,
    hidden_states: HiddenStates,
    held_out: Dataset,
    batch_size: int = _BATCH,
) -> list[dict[str, Any]]:
    """Fit the temperatures by held-out likelihood, and measure dynamic trees with them; both are
    written into `statistics`. Returns how honest each head is. Only positions with a true token for
    every head count (without any, nothing is done). Rows are drawn until they have MAX_POSITIONS,
    at least _ROWS of them: each gives its positions evenly, and the target reads no others, and at
    most `batch_size` at once, as in the run's evaluations."""
    drawn = np.random.default_rng(0).permutation(len(held_out))
    drawn[:_ROWS].sort()  # a small text is read as it stands
    text = held_out.select(drawn)
    supervised = sum((np.asarray(labels) != IGNORED).sum() for labels in text[:_ROWS]["labels"])
    every = -(-int(supervised) // MAX_POSITIONS)
    read = _Read(hidden_states, text, min(batch_size, _BATCH))
    found = _positions(heads, read, every=every, enough=MAX_POSITIONS)
    if not len(found.hidden_SD):
        return []
    return _calibrate(statistics, heads, found, read)


def calibration_figures(calibrations: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What `calibrate` returns, as figures for trackers."""
    return {
        f"eval_head{entry['head']}_{name}": value
        for entry in calibrations
        for name, value in (
            ("temperature", entry["temperature"]),
            ("calibration_error", entry["before"]["expected_error"]),
            ("calibration_error_at_temperature", entry["after"]["expected_error"]),
        )
    }


class _Positions(NamedTuple):
    """Where every head has a true token: what heads read there, the tokens that sequential ones
    see, the labels, and where it is: the batch's first row, and the place among its B * T."""

    hidden_SD: Tensor
    tokens_SK: Tensor
    labels_SK: Tensor
    start_S: Tensor
    place_S: Tensor

    def part(self, which: Any) -> _Positions:
        return _Positions(*(of_S[which] for of_S in self))

    def split(self, step: int) -> Iterable[_Positions]:
        return (self.part(slice(i, i + step)) for i in range(0, len(self.start_S), step))


class _Read(NamedTuple):
    """A text that the target reads, so many rows at once."""

    hidden_states: HiddenStates
    text: Dataset
    batch_size: int

    def rows(self, start: int) -> range:
        """Those of the batch that begins there."""
        return range(start, min(start + self.batch_size, len(self.text)))

    def __call__(self, start: int) -> tuple[Tensor, Batch]:
        """That batch, with the target's hidden states of it."""
        batch = self.hidden_states.collate([self.text[i] for i in self.rows(start)])
        batch = send_to_device(batch, self.hidden_states.target.device)
        return self.hidden_states.of(batch), batch


def _positions(
    heads: DraftHeads,
    read: _Read,
    *,
    every: int = 1,
    enough: float = math.inf,
    watch: Watch = iter,
) -> _Positions:
    parts: list[_Positions] = []
    for chosen in watch([*map(read.rows, range(0, len(read.text), read.batch_size))]):
        hidden_BTD, batch = read(chosen.start)
        hidden_RD, rows = read_rows(heads, hidden_BTD, batch)
        taken_R = (rows.labels_RK != IGNORED).all(dim=1).nonzero().flatten()[::every]
        start_R = torch.full_like(rows.positions_R, chosen.start)
        found = _Positions(hidden_RD, rows.tokens_RK, rows.labels_RK, start_R, rows.positions_R)
        parts.append(found.part(taken_R))
        if chosen.stop >= _ROWS and sum(len(part.start_S) for part in parts) >= enough:
            break
    return _Positions(*map(torch.cat, zip(*parts, strict=True)))


def _calibrate(
    statistics: HeadStatistics,
    heads: DraftHeads,
    found: _Positions,
    read: _Read,
) -> list[dict[str, Any]]:
    """A head's node is reached only where the heads before it were right, and there it is surer
    than elsewhere. Its temperature is therefore fitted on positions where the true tokens were
    among the earlier heads' best two. Tokens that the heads cannot draft say nothing of their
    temperature."""
    step = max(1, _LOGITS_AT_ONCE // (heads.config.num_heads * heads.config.num_candidates))
    parts = [
        _measure(heads(part.hidden_SD, part.tokens_SK).float(), heads.draft_ids(part.labels_SK))
        for part in found.split(step)
    ]
    true_SK, best_SK, ranks_SK, totals_SKG = map(torch.cat, zip(*parts, strict=True))
    grid_G = torch.tensor(_GRID, device=true_SK.device)
    losses_SKG = totals_SKG - true_SK[:, :, None] / grid_G
    confidence_SKG = (best_SK[:, :, None] / grid_G - totals_SKG).exp().cpu()
    calibrations: list[dict[str, Any]] = []
    for head in range(ranks_SK.shape[1]):
        reached_S = _reached(ranks_SK[:, : head + 1])
        # Where none of the true tokens can be drafted, there is nothing to fit: it stays 1.
        chosen = (
            int(losses_SKG[reached_S, head, :-1].mean(dim=0).argmin()) if reached_S.any() else -1
        )
        reached_S, right_S = reached_S.cpu(), (ranks_SK[reached_S, head] == 0).cpu()
        honest: dict[str, Any] = {
            moment: reliability(confidence_SKG[reached_S, head, g], right_S)
            for moment, g in (("before", -1), ("after", chosen))
        }
        calibrations.append({"head": head, "temperature": _GRID[chosen], **honest})
    statistics.temperatures = [calibration["temperature"] for calibration in calibrations]
    if heads.sequential:
        every = -(-len(found.labels_SK) // _SEQUENTIAL_POSITIONS)
        found = found.part(slice(None, None, every))
        step = max(1, step // DYNAMIC_WIDTH)
    statistics.dynamic_tokens_per_step = _dynamic_tokens_per_step(
        heads, statistics.temperatures, found, step, read
    )
    return calibrations


def _measure(logits_RKV: Tensor, labels_RK: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each row: the true token's logit, the largest one, the true token's rank, each [R, K]
    (IGNORED where it cannot be drafted), and the log-normaliser at each temperature and at 1
    [R, K, G + 1]."""
    true_RK = logits_RKV.gather(2, labels_RK.clamp_min(0)[:, :, None])[..., 0]
    ranks_RK = ranks_of(logits_RKV, labels_RK).where(labels_RK != IGNORED, IGNORED)
    totals_RKG = torch.stack([(logits_RKV / t).logsumexp(dim=-1) for t in _GRID], dim=-1)
    return true_RK, logits_RKV.amax(dim=-1), ranks_RK, totals_RKG


def _reached(ranks_SK: Tensor) -> Tensor:
    """Where to fit the last of these heads: it can draft the truth, and the heads before it did
    well, if that leaves enough."""
    known_S = ranks_SK[:, -1] != IGNORED
    well_S = known_S & ((ranks_SK[:, :-1] >= 0) & (ranks_SK[:, :-1] < _WELL_SO_FAR)).all(dim=1)
    return well_S if well_S.sum() >= 64 else known_S


def _dynamic_tokens_per_step(
    heads: DraftHeads,
    temperatures: list[float],
    found: _Positions,
    step: int,
    read: _Read,
) -> dict[int, float]:
    """1 + the mean number of accepted nodes of dynamic trees at the measured positions, by size, as
    far as the tokens that can be drafted fill one."""
    ranking, ranks = Ranking(heads, temperatures), min(DYNAMIC_RANKS, heads.config.num_candidates)
    width = DYNAMIC_WIDTH if heads.sequential else None
    most = sum(ranks ** (level + 1) for level in range(heads.config.num_heads))
    sizes = [size for size in DYNAMIC_SIZES if size <= most]
    if not sizes:
        return {}
    accepted = torch.zeros(len(sizes), dtype=torch.long)
    for part, after in _followed(heads, found, step, read):
        if after is None:
            guess = same_guesses(ranking, part.hidden_SD, ranks)
        else:
            guess = guesses(ranking, after, ranks)
        roots_B = part.tokens_SK[:, 0]
        limits = sizes[-1], heads.config.num_heads, width
        grow = best_first_on_host if roots_B.device.type == "cpu" else best_first_tree
        tree = grow(roots_B, guess, *limits)
        accepted += torch.tensor(accepted_by_size(tree, part.labels_SK, sizes))
    counts = zip(sizes, accepted.tolist(), strict=True)
    return {size: 1 + count / len(found.start_S) for size, count in counts}


def _followed(
    heads: DraftHeads, found: _Positions, step: int, read: _Read
) -> Iterable[tuple[_Positions, After | None]]:
    """The positions in parts, and what sequential heads say behind drafts there. Those that go on
    from their own output see the text before, which is read again for them."""
    if not isinstance(heads, Eagle3Heads):
        for part in found.split(step):
            yield part, heads.after_paths(part.hidden_SD) if heads.sequential else None
        return
    for start in found.start_S.unique().tolist():
        hidden_BTD, batch = read(start)
        text = hidden_BTD, batch["input_ids"], batch.get("position_ids")
        for part in found.part(found.start_S == start).split(step):
            yield part, heads.after_text(*text, part.place_S)
