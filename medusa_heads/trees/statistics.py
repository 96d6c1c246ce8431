"""What was measured of a set of heads: at which rank each head held the true token.

Shapes: B sequences, T tokens, S supervised positions, K heads, N nodes of a tree, R ranks.
Rank 0 is a head's top-1 token. Positions are counted in arrays: a text may have millions.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from medusa_heads.config import RankPath

MAX_RANK = 16  # deeper ranks are too rare to enter any tree that pays
MAX_NODES = 256  # the largest tree a checkpoint's statistics describe
_MOST = 1e12  # of what is no count; more is damage, and no float holds every integer
PRIOR_POSITIONS = 400  # a few texts' worth: what decoding itself shows soon outweighs the prior
_PRIOR_TOP_1 = 0.6  # of the first head; published Medusa heads and those of the demo are near it
_PRIOR_DECLINE = 0.78  # a head's top-1 rate over that of the head before
_PRIOR_SECOND = 0.25  # of what a head's first candidate misses, the share that its second holds
_PRIOR_FALL = 1.3  # the shares of later candidates fall with this power of the rank


@dataclass
class HeadStatistics:
    """Joint counts of the heads' ranks along real text, and the trees they imply.

    A path (r_0, .., r_d) names a tree node: rank r_i among head i's candidates, for i = 0 .. d. Its
    count says at how many positions the heads' ranks began with exactly that path, so
    `count / positions` is the chance that the node is accepted. A node's count is never above its
    parent's: the n most counted paths form a tree, the one with the largest expected number of
    accepted tokens among all trees of n nodes."""

    num_heads: int  # K
    positions: int  # S, the positions measured
    # For each head, how often the true token was among its top 1, 2, .. MAX_RANK.
    top_k_hits: list[list[int]]
    paths: list[tuple[RankPath, int]]  # the most counted paths with their counts, best first
    # By which each head's logits are divided so that its probabilities are honest on held-out text;
    # by default 1.0.
    temperatures: list[float] = field(default_factory=list)
    # By tree size, 1 + expected accepted nodes of trees built anew at every position from those
    # probabilities; empty where not measured.
    dynamic_tokens_per_step: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.temperatures = self.temperatures or [1.0] * self.num_heads
        self.dynamic_tokens_per_step = dict(sorted(self.dynamic_tokens_per_step.items()))

    @classmethod
    def from_ranks(cls, ranks_SK: Tensor) -> HeadStatistics:
        """Count ranks; a negative rank marks a position or head without a true token. Raises
        ValueError: no position has all K true tokens."""
        complete_SK = ranks_SK[ranks_SK.amin(dim=1) >= 0].cpu()
        if not len(complete_SK):
            raise ValueError(
                "head statistics need at least one position with a true token for every head, got "
                "none: use longer held-out text"
            )
        top_k_hits = [
            torch.bincount(ranks_S.clamp(max=MAX_RANK), minlength=MAX_RANK + 1)[:-1].cumsum(0)
            for ranks_S in complete_SK.T
        ]
        hits = [hits_R.tolist() for hits_R in top_k_hits]
        return cls(complete_SK.shape[1], len(complete_SK), hits, _most_counted(complete_SK))

    def top_k_accuracy(self, k: int) -> list[float]:
        """For each head, the share of positions whose true token was among its top k."""
        return [hits[k - 1] / self.positions for hits in self.top_k_hits]

    def choices(self, num_nodes: int) -> list[RankPath]:
        """Paths of the best static tree of `num_nodes` nodes (the root not counted), best first.

        Fewer are returned where the measured text never went further. Raises ValueError:
        `num_nodes` below one or above MAX_NODES."""
        if not 1 <= num_nodes <= MAX_NODES:
            raise ValueError(f"a tree has 1 to {MAX_NODES} nodes, got {num_nodes}")
        return [path for path, _ in self.paths[:num_nodes]]

    def expected_tokens_per_step(self, num_nodes: int) -> float:
        """1 + expected accepted nodes at a random position, for the best tree of that size."""
        return 1 + sum(count for _, count in self.paths[:num_nodes]) / self.positions

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint's sidecar."""
        by_size = {str(nodes): tokens for nodes, tokens in self.dynamic_tokens_per_step.items()}
        paths = [[list(path), count] for path, count in self.paths]
        return vars(self) | {"paths": paths, "dynamic_tokens_per_step": by_size}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HeadStatistics:
        """Read what `to_dict` wrote. Raises ValueError: a part is missing, or the paths are not a
        tree."""
        num_heads, positions = (_count(values.get(key), key) for key in ("num_heads", "positions"))
        hits = values.get("top_k_hits")
        if not _is_list(hits, num_heads) or not all(_is_list(each, MAX_RANK) for each in hits):
            raise ValueError(
                f"head statistics need top_k_hits of {num_heads} heads, {MAX_RANK} numbers each"
            )
        temperatures = values.get("temperatures")
        if not _is_list(temperatures, num_heads) or not all(
            isinstance(t, int | float) and 0 < t < _MOST for t in temperatures
        ):
            raise ValueError(
                f"head statistics need one temperature above 0 for each of {num_heads} heads, "
                f"got {temperatures!r}"
            )
        top_k_hits = [[_count(hit, "top_k_hits", least=0) for hit in each] for each in hits]
        if any(each != sorted(each) or each[-1] > positions for each in top_k_hits):
            raise ValueError(
                f"head statistics need top_k_hits that rise to at most the {positions} positions"
            )
        return cls(
            num_heads,
            positions,
            top_k_hits,
            _read_paths(values.get("paths"), num_heads, positions),
            [float(t) for t in temperatures],
            _read_dynamic(values.get("dynamic_tokens_per_step") or {}),
        )


def _most_counted(ranks_SK: Tensor) -> list[tuple[RankPath, int]]:
    """The MAX_NODES paths with which most positions begin, and at how many, best first. What goes
    on from a path is never met more often, and so is counted only where the path is among them."""
    best: list[tuple[RankPath, int]] = []
    paths: list[RankPath] = [()]
    path_S = torch.zeros(len(ranks_SK), dtype=torch.int32)  # it began with; len(paths): with none
    for ranks_S in ranks_SK.T:
        longer_S = path_S * (MAX_RANK + 1) + ranks_S.clamp(max=MAX_RANK)
        counts = torch.bincount(longer_S, minlength=(len(paths) + 1) * (MAX_RANK + 1))
        counts_PR = counts.view(-1, MAX_RANK + 1)[:-1, :-1].tolist()
        longer = {
            (*path, rank): (p, rank)
            for p, path in enumerate(paths)
            for rank, count in enumerate(counts_PR[p])
            if count
        }
        best += ((path, counts_PR[p][rank]) for path, (p, rank) in longer.items())
        # Among equal counts the shallower and more probable path first: parents before children.
        best = heapq.nsmallest(MAX_NODES, best, key=lambda item: (-item[1], len(item[0]), item[0]))
        paths = [path for path, _ in best if path in longer]
        place_PR = torch.full((len(counts_PR) + 1, MAX_RANK + 1), len(paths), dtype=torch.int32)
        for place, path in enumerate(paths):
            place_PR[longer[path]] = place
        path_S = place_PR.flatten().index_select(0, longer_S)
    return best


def prior_statistics(num_heads: int, num_candidates: int = MAX_RANK) -> HeadStatistics:
    """What to expect of heads that nobody has measured, with the weight of PRIOR_POSITIONS.

    A head's top-1 rate falls from head to head, its later candidates by a power of their rank, and
    the heads are right independently of one another; no path has a rank that is not among
    `num_candidates`. Such trees branch near the root. The heads' temperatures are 1, and trees
    built anew at every position count as not measured. Raises ValueError: no head, or no candidate.
    """
    if num_heads < 1 or num_candidates < 1:
        raise ValueError(
            f"a prior needs at least one head and one candidate, got {num_heads} and "
            f"{num_candidates}"
        )
    ranks = range(1, min(num_candidates, MAX_RANK))
    rates = []  # for each head, of each rank
    for head in range(num_heads):
        top_1 = _PRIOR_TOP_1 * _PRIOR_DECLINE**head
        rates.append([top_1, *((1 - top_1) * _PRIOR_SECOND / rank**_PRIOR_FALL for rank in ranks)])
    paths: list[tuple[RankPath, int]] = []
    frontier: list[tuple[float, RankPath]] = [(-1.0, ())]
    while frontier and len(paths) <= MAX_NODES:
        chance, path = heapq.heappop(frontier)
        count = round(-chance * PRIOR_POSITIONS)
        if not count:
            break
        paths.append((path, count))
        if len(path) < num_heads:
            for rank, rate in enumerate(rates[len(path)]):
                heapq.heappush(frontier, (chance * rate, (*path, rank)))
    hits = [
        [round(sum(rate[:k]) * PRIOR_POSITIONS) for k in range(1, MAX_RANK + 1)] for rate in rates
    ]
    return HeadStatistics(num_heads, PRIOR_POSITIONS, hits, paths[1:])  # without the root


def _read_dynamic(stored: Any) -> dict[int, float]:
    if not isinstance(stored, dict) or not all(
        isinstance(tokens, int | float) and 1 <= tokens < _MOST for tokens in stored.values()
    ):
        raise ValueError(
            "head statistics need dynamic_tokens_per_step to map sizes to numbers of at least 1, "
            f"got {stored!r}"
        )
    if not all(str(nodes).isdecimal() and 0 < len(str(nodes)) < 10 for nodes in stored):
        raise ValueError(
            "head statistics need dynamic_tokens_per_step by numbers of nodes, got "
            f"{sorted(map(str, stored))}"
        )
    return {int(nodes): float(tokens) for nodes, tokens in stored.items()}


def _read_paths(stored: Any, num_heads: int, positions: int) -> list[tuple[RankPath, int]]:
    if not isinstance(stored, list):
        raise ValueError(f"head statistics need a list of paths, got {stored!r}")
    known: dict[RankPath, int] = {(): positions}
    paths = []
    for entry in stored:
        if not _is_list(entry, 2) or not _is_list(entry[0]):
            raise ValueError(f"head statistics hold {entry!r}, expected a path and its count")
        path = tuple(_count(rank, "a path's rank", least=0) for rank in entry[0])
        if path in known or path[:-1] not in known or len(path) > num_heads:
            raise ValueError(f"head statistics hold the path {list(path)} without its parent")
        known[path] = _count(entry[1], "a path's count", least=0)
        if known[path] > known[path[:-1]]:
            raise ValueError(
                f"head statistics count the path {list(path)} more often than the one it continues"
            )
        paths.append((path, known[path]))
    return paths


def _count(value: Any, name: str, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(
            f"head statistics need {name} to be an integer of at least {least}, got {value!r}"
        )
    return value


def _is_list(value: Any, length: int | None = None) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and length in (None, len(value))


def simulate_tokens_per_step(ranks_BTK: Tensor, choices: Sequence[RankPath]) -> float:
    """`tokens_per_step` of `simulate_steps`."""
    return tokens_per_step(simulate_steps(ranks_BTK, choices))


def tokens_per_step(steps: Sequence[int]) -> float:
    """Of steps that accepted 0, 1, .. drafts and committed one token more; 0.0 without any step."""
    tokens = sum((accepted + 1) * count for accepted, count in enumerate(steps))
    return tokens / sum(steps) if tokens else 0.0


def simulate_steps(ranks_BTK: Tensor, choices: Sequence[RankPath]) -> list[int]:
    """How many steps of a static tree would have accepted 0, 1, .., K drafts on measured sequences.

    Each stretch of a sequence in which every head has a true token is walked as decoding would walk
    it: at a position, descend while the path of ranks is in the tree, commit that many tokens plus
    the target's own, move on."""
    complete_BT = ranks_BTK.amin(dim=2) >= 0
    edges = F.pad(complete_BT.int(), (1, 1)).diff().flatten()
    lengths = (edges < 0).nonzero()[:, 0] - (edges > 0).nonzero()[:, 0]
    end = lengths.cumsum(0)
    at = end - lengths
    accepted_S = _accepted(ranks_BTK[complete_BT], choices)
    steps_K = torch.zeros(ranks_BTK.shape[2] + 1, dtype=torch.long)
    while len(at):  # a step in every stretch that has not come to its end
        steps_K += torch.bincount(accepted_S[at], minlength=len(steps_K))
        at = at + 1 + accepted_S[at]
        at, end = at[at < end], end[at < end]
    return [int(count) for count in steps_K]


def _accepted(ranks_SK: Tensor, choices: Sequence[RankPath]) -> Tensor:
    """How many drafts of the tree are accepted at each position, [S]."""
    nodes: dict[RankPath, int] = {path: node for node, path in enumerate([(), *choices])}
    outside, far = len(nodes), 1 + max((rank for path in choices for rank in path), default=0)
    child_NR = torch.full((outside + 1, far + 1), outside, dtype=torch.int32)
    for path in choices:
        child_NR[nodes[path[:-1]], path[-1]] = nodes[path]
    node_S, accepted_S = torch.zeros(2, len(ranks_SK), dtype=torch.int32)
    for ranks_S in ranks_SK.T[: max(map(len, choices), default=0)]:
        child_S = node_S * (far + 1) + ranks_S.clamp(max=far)
        node_S = child_NR.flatten().index_select(0, child_S)
        accepted_S += node_S != outside
    return accepted_S
