"""What everything that drafts has in common, and what it may remember of a text.

Shapes: B active rows, N nodes, P fresh positions (the most of any row), F tokens read at once, S
cache slots, D hidden; G keys and values, A attention heads, E their width, O what a layer gives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from medusa_heads.inference.adapt.clock import USUAL_AGAIN
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.target.attention import TreeMask
from medusa_heads.trees.tree import TokenTree

if TYPE_CHECKING:
    from medusa_heads.inference.engine.device_state import DeviceState

_numbers = count()
_ROOM = 512  # slots beside twice the longest text, which are kept


class Drafter(ABC):
    """Proposes a token tree from the decoding state, and never touches the target's cache."""

    num_nodes: int  # the most nodes that a proposed tree has, the root included
    reads_prompt = False  # whether the first proposal needs the hidden states of the whole prompt
    # How deep its trees are at most, where all have as many nodes and are made of the state's
    # tensors alone, without a question to the host; else None.
    levels: int | None = None
    # Of such trees, numbers of drafted nodes of which every step may verify another, the likeliest
    # ones by the trees' own log-probabilities; none where all nodes are verified.
    sizes: Sequence[int] = ()

    @cached_property
    def number(self) -> int:
        """By which a text's memories are found, other than any other drafter's: of a key that is an
        object of a class of its own not every torch makes a graph."""
        return next(_numbers)

    @cached_property
    def memories(self) -> WeakKeyDictionary[DecodingState, dict[Any, Any]]:
        """What it keeps between steps that are one graph, by the state that these go on from: of
        fixed shapes, for text after text, as long as both live."""
        return WeakKeyDictionary()

    @abstractmethod
    def propose(self, state: DecodingState) -> TokenTree:
        """A tree for every active row; node 0 holds `state.roots_B`."""

    def prepare(self, state: DecodingState) -> None:
        """Make all that is kept of a text, before steps that are one graph."""
        self.propose(state)

    def most_again(self, rows: int) -> int:
        """How many tokens of each of so many rows a target with a recurrent state reads again in
        front of a tree; where there are more, the row reads them in a step without drafts."""
        return USUAL_AGAIN

    def rest(self, state: DecodingState) -> None:  # noqa: B027
        """The next step goes without drafts, and nothing is observed or learnt of it."""

    def observe(self, tree: TokenTree, logits_BNV: Tensor) -> None:  # noqa: B027
        """Learn from what the target says of every node; called after every verification."""

    def learn_seconds(self, nodes: int, seconds: float) -> None:  # noqa: B027
        """Learn from how long a step took, its drafting left out; `nodes` are those drafted in each
        row, spare ones included."""


class Text(Protocol):
    """A row of the batch, or what a drafter reads instead of it."""

    @property
    def length(self) -> int:
        """Tokens so far, padding included."""

    def ids_1T(self) -> Tensor:
        """The tokens so far, padding included."""

    def behind(self, length: int) -> list[int]:
        """The tokens after the first `length`."""


def unread(state: DecodingState) -> tuple[Tensor, Tensor, list[int]]:
    """What was committed since this was last asked: the target's hidden states [B, P, D] and the
    tokens behind them [B, P], and how many are each row's own. A row with fewer repeats its last
    hidden state."""
    return along_paths(state, *state.fresh())


def along_paths(
    state: DecodingState, hidden_BND: Tensor, nodes: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor, list[int]]:
    """The same of these nodes, which end with those of every row's last tokens."""
    device, counts = hidden_BND.device, [len(path) for path in nodes]
    longest = max(counts)
    if min(counts) == hidden_BND.shape[1]:  # all of them are every row's own
        hidden_BPD = hidden_BND
    else:
        index = [[*path, *[path[-1]] * (longest - len(path))] for path in nodes]
        batch_B1 = torch.arange(len(nodes), device=device)[:, None]
        hidden_BPD = hidden_BND[batch_B1, torch.tensor(index, device=device)]
    # A row that has ended, and stays in a compiled batch, may have fewer tokens than steps.
    following = [
        (row.last(count) + [0] * longest)[:longest]
        for row, count in zip(state.rows, counts, strict=True)
    ]
    return hidden_BPD, torch.tensor(following, device=device), counts


def behind_texts(
    lengths: Sequence[int],
    offsets_B1: Tensor,
    sees_BFP: Tensor,
    positions_BF: Tensor,
    written_BP: Tensor | None,
    starts_B1: Tensor | None = None,
) -> TreeMask:
    """What F new tokens see that stand in the slots behind the longest text and behind P - F that
    were written there before, whose positions are `written_BP`. They see their own text, whose
    token at position p lies in slot p + offset, up to its length; and of the P tokens behind the
    texts, their own last, what `sees_BFP` says. A text begins where position 0 lies, or at the slot
    `starts_B1`: images may take fewer positions than slots."""
    new, past = sees_BFP.shape[1], max(lengths)
    slots_S = torch.arange(past, device=offsets_B1.device)
    ends_B1 = torch.tensor(lengths, device=offsets_B1.device)[:, None]
    begun_BS = slots_S >= (offsets_B1 if starts_B1 is None else starts_B1)
    held_BS = begun_BS & (slots_S < ends_B1)
    visible_BFS = torch.cat([held_BS[:, None].expand(-1, new, -1), sees_BFP], dim=2)
    first = past + sees_BFP.shape[2] - new
    return TreeMask(
        visible_BFS, positions_BF, first, offsets_B1[:, 0], written_positions_BP=written_BP
    )


class Memory:
    """What a drafter keeps of the texts between two steps, in `state.memories`.

    Attributes:
        rows: whose texts they are.
        lengths: of each text, how many tokens the drafter knew; padding included.
        beside: slots that a step takes behind what is held of the texts.
    """

    beside = 0

    def __init__(self, rows: Sequence[Text]) -> None:
        self.rows = list(rows)
        self.lengths = [row.length for row in rows]

    @property
    def most_slots(self) -> int:
        """Slots to keep room for where rows have left: one of these may have been far longer than
        the others are."""
        return 2 * max(self.lengths, default=0) + _ROOM

    def committed(self) -> list[list[int]]:
        """What each text went on with since."""
        return [row.behind(known) for row, known in zip(self.rows, self.lengths, strict=True)]

    def follow(self, rows: Sequence[Text]) -> list[int] | None:
        """Keep these rows, in this order; returns their places so far, None where nothing changes.
        A row that has joined takes another's place, at which it knows nothing: its length is 0."""
        if list(rows) == self.rows:
            return None
        known = {row: i for i, row in enumerate(self.rows)}
        self.lengths = [self.lengths[known[row]] if row in known else 0 for row in rows]
        self.rows = list(rows)
        return [known.get(row, 0) for row in rows]


class OnDevice:
    """What a drafter keeps of the texts between steps that are one graph.

    Attributes:
        beside: slots that a step takes behind what is held of the texts.
    """

    beside = 0

    def follow(self, state: DeviceState, most: int) -> None:
        """A step has committed at most so many tokens of each row. By default they are taken in
        where the next drafts are made."""


class MemoryOnDevice(OnDevice):
    """What a layer of heads keeps of the texts between steps that are one graph: keys and values,
    at a place of its own for each position of a row. What stands behind a row's text is never seen.

    Args:
        heads: whose layer it is.
        like_GBASE: such keys and values, of as many rows.
        capacity: of positions.
        beside: slots behind them, for what a step drafts.

    Attributes:
        out_BO: what was read at the texts' ends.
    """

    out_BO: Tensor | None = None

    def __init__(self, heads: Any, like_GBASE: Tensor, capacity: int, beside: int = 0) -> None:
        self._heads, self._capacity, self.beside = heads, capacity, beside
        groups, batch, attending, _, width = like_GBASE.shape
        with torch.inference_mode(False):
            held = like_GBASE.new_zeros(groups, batch, attending, capacity + beside, width)
            self._lengths_B = torch.zeros(batch, dtype=torch.long, device=held.device)
        self._held_GBASE = held
        for kept in (self._held_GBASE, self._lengths_B):
            torch._dynamo.mark_static_address(kept)

    def begin(self, memory: Any) -> None:
        """Go on with what was read of this text; its last position is read again."""
        known = min(memory.held.shape[3], self._held_GBASE.shape[3])
        self._held_GBASE[:, :, :, :known] = memory.held[:, :, :, :known]
        lengths = [length - 1 for length in memory.lengths]
        self._lengths_B.copy_(torch.tensor(lengths, device=self._lengths_B.device))

    def _hand_on(self, out_BO: Tensor) -> None:
        """Keep what was read at the texts' ends, for the next drafts."""
        if self.out_BO is None:  # before the first step
            with torch.inference_mode(False):
                self.out_BO = torch.empty_like(out_BO)
            torch._dynamo.mark_static_address(self.out_BO)
        self.out_BO.copy_(out_BO)

    def _write(self, fresh_GBAPE: Tensor, positions_BP: Tensor) -> None:
        """Keys and values of positions of each row."""
        batch_B1 = torch.arange(len(positions_BP), device=positions_BP.device)[:, None]
        self._held_GBASE[:, batch_B1, :, positions_BP] = fresh_GBAPE.permute(1, 3, 0, 2, 4)
