"""Several documents in a row, which do not see each other.

A packed row has `position_ids` that start at 0 with each document. By those, and by the absence of
an attention mask, transformers keeps the documents apart in attention. A recurrent state runs on
into the next document; to begin it anew within a row takes kernels that few machines have. So where
a target keeps one, it reads each document in a row of its own. Whether documents really do not see
each other is measured here, never taken on trust.

Shapes: B batch, T tokens, D hidden, S documents read together, L the tokens of their longest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset
from torch import Tensor

from medusa_heads.machine.devices import in_float64
from medusa_heads.target.recurrent import is_recurrent
from medusa_heads.target.target import TargetModel
from medusa_heads.training.data.columns import flat

# Largest difference of a token's hidden state, relative to its length, that rounding explains.
# Documents that see each other differ by about 1.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}
_HALF_TOLERANCE = 0.1
_PROBE_LENGTHS = ((7, 12, 4), (11, 3, 9))


def best_fit(lengths: Any, size: int) -> pa.ListArray:
    """Put items of at least 1 into bins of `size`, the longest first, each where the least room is
    left over; the items of each bin, by their indices. An item longer than `size` gets a bin of its
    own. Bins stand in the order of their first items, and items, by their indices, in theirs.
    Best-fit decreasing needs at most 11/9 of the fewest bins possible, and 1 more (Johnson et al.
    1974, "Worst-case performance bounds for simple one-dimensional packing algorithms")."""
    lengths = np.minimum(np.asarray(lengths, np.int32), size)
    # In the least width, in which numpy sorts by counting.
    order = np.argsort((size - lengths).astype(np.min_scalar_type(size)), kind="stable")
    ends = np.flatnonzero(np.diff(lengths[order], append=-1)) + 1
    bin_of = np.empty(len(lengths), np.int32)
    with_room: list[list[Any]] = [[] for _ in range(size + 1)]  # stacks of bins, by their room
    occupied = count = place = 0  # bit r of `occupied` says that a bin has room r
    for end in ends.tolist():
        length = int(lengths[order[place]])
        while place < end:  # items of one length, which fill one bin after the other
            fitting = occupied >> length
            room = length + (fitting & -fitting).bit_length() - 1 if fitting else size
            each = room // length
            wanted = -(-(end - place) // each)
            if fitting:
                bins = _popped(with_room[room], wanted)
                occupied ^= (not with_room[room]) << room
            else:
                bins = np.arange(count, count + wanted, dtype=np.int32)
                count += wanted
            taken = order[place : place + len(bins) * each][: end - place]
            bin_of[taken] = np.repeat(bins, each)[: len(taken)]
            place += len(taken)
            full, rest = divmod(len(taken), each)
            for some, items in ((bins[:full], each), (bins[full:], rest)):
                if len(some) and (left := room - items * length):
                    with_room[left].append(some)
                    occupied |= 1 << left
    first = np.empty(count, np.int32)
    first[bin_of[::-1]] = np.arange(len(lengths), dtype=np.int32)[::-1]
    rank = np.empty(count, np.int32)
    rank[np.argsort(first)] = np.arange(count, dtype=np.int32)
    bin_of = rank[bin_of]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(bin_of, minlength=count))])
    members = np.argsort(bin_of, kind="stable")
    return pa.ListArray.from_arrays(*(pa.array(part, pa.int32()) for part in (offsets, members)))


def _popped(stack: list[Any], count: int) -> Any:
    """Up to so many bins from the top of a stack, the topmost first."""
    popped = []
    while stack and count:
        top = stack.pop()
        if len(top) > count:
            stack.append(top[:-count])
        popped.append(top[::-1][:count])
        count -= len(popped[-1])
    return np.concatenate(popped)


def fill_bins(lengths: Any, size: int) -> pa.Table:
    """What `best_fit` puts into each bin (`members`), and how full it is (`tokens`)."""
    members = best_fit(lengths, size)
    of_members = np.asarray(lengths)[members.flatten()]
    tokens = np.add.reduceat(of_members, members.offsets[:-1], dtype=np.int32)
    return pa.table({"members": members, "tokens": tokens})


def pack_rows(rows: Dataset, bins: Dataset) -> Dataset:
    """Rows of several of the given rows each, those of a bin of `fill_bins`, with `input_ids`,
    `labels` and `position_ids`, each an array. They are joined as they are read."""
    tokens = rows.select_columns(["input_ids", "labels"]).with_format("arrow")
    return bins.with_transform(partial(_members_joined, tokens))


def _members_joined(tokens: Dataset, packed: Mapping[str, Any]) -> dict[str, list[Any]]:
    bins: list[list[int]] = packed["members"]
    return _joined(tokens[list(chain.from_iterable(bins))], list(map(len, bins)))


def pack_batch(batch: Mapping[str, Sequence[Any]], max_length: int) -> dict[str, list[Any]]:
    """The same for as many rows of a stream as are at hand, in rows of up to `max_length`."""
    kinds = pa.schema([(name, pa.list_(pa.int32())) for name in ("input_ids", "labels")])
    rows = pa.table({name: batch[name] for name in kinds.names}, kinds)
    bins = best_fit(pc.list_value_length(rows["input_ids"]), max_length)
    joined = _joined(rows.take(bins.flatten()), pc.list_value_length(bins).to_pylist())
    return {name: [values.tolist() for values in column] for name, column in joined.items()}


def _joined(documents: pa.Table, counts: Sequence[int]) -> dict[str, list[Any]]:
    """So many documents one behind the other in each row, with positions that begin anew with
    each."""
    ids, lengths = flat(documents["input_ids"])
    ends = np.cumsum(lengths)
    columns = {
        "input_ids": ids.astype(np.int32),  # a copy, which may be written to
        "labels": flat(documents["labels"])[0].astype(np.int32),
        "position_ids": np.arange(len(ids), dtype=np.int32) - np.repeat(ends - lengths, lengths),
    }
    cuts = ends[np.cumsum(counts) - 1][:-1]
    return {name: np.split(column, cuts) for name, column in columns.items()}


def hidden_of(target: TargetModel, inputs: Mapping[str, Any], *, with_grad: bool = False) -> Tensor:
    """hidden_BTD of a batch that `collate` made, packed or not. Raises ValueError: a worker could
    not read its images."""
    if "unseen" in inputs:
        raise ValueError(inputs["unseen"])
    read = target.hidden_with_grad if with_grad else target.hidden
    # Pixels in the target's dtype, as whoever asks it to write hands them over.
    media = {
        name: value.to(target.dtype) if value.is_floating_point() else value
        for name, value in inputs.get("media", {}).items()
    }
    ids_BT, positions_BT = inputs["input_ids"], inputs.get("position_ids")
    if positions_BT is not None and is_recurrent(target.config):
        return _read_apart(read, ids_BT, positions_BT)
    return read(ids_BT, inputs.get("attention_mask"), positions_BT, **media)


def _read_apart(read: Callable[..., Tensor], ids_BT: Tensor, positions_BT: Tensor) -> Tensor:
    """The documents in rows of their own, those of like lengths together."""
    assert not positions_BT[:, 0].any(), "a row begins with a document"
    ids, starts = ids_BT.flatten(), (positions_BT.flatten() == 0).nonzero().flatten()
    lengths = starts.diff(append=starts.new_tensor([len(ids)]))
    parts, places = [], []
    for group in _of_like_lengths(lengths.tolist()):
        steps_L = torch.arange(int(lengths[group[0]]), device=ids.device)
        inside_SL = steps_L < lengths[group, None]
        place_SL = starts[group, None] + steps_L * inside_SL
        parts.append(read(ids[place_SL], inside_SL.long())[inside_SL])
        places.append(place_SL[inside_SL])
    return torch.cat(parts)[torch.cat(places).argsort()].view(*ids_BT.shape, -1)


def _of_like_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Items in groups, the longest first, whose shortest is at least half as long."""
    groups: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not groups or 2 * lengths[item] < lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(item)
    return groups


@torch.no_grad()
def check_packing(target: TargetModel, read: Callable[..., Tensor] = hidden_of) -> None:
    """Compare hidden states of packed documents with those of each document alone; a ValueError
    where the target lets packed documents see each other, as it is read."""
    generator = torch.Generator().manual_seed(0)
    documents = [
        [torch.randint(0, target.vocab_size, (n,), generator=generator) for n in lengths]
        for lengths in _PROBE_LENGTHS
    ]
    input_ids_BT = torch.stack([torch.cat(row) for row in documents]).to(target.device)
    positions = [torch.cat([torch.arange(n) for n in lengths]) for lengths in _PROBE_LENGTHS]
    position_ids_BT = torch.stack(positions).to(target.device)
    together_BTD = read(target, {"input_ids": input_ids_BT, "position_ids": position_ids_BT})
    errors = [
        _relative_error(part_TD, target.hidden(ids[None].to(target.device))[0])
        for row_TD, row in zip(together_BTD, documents, strict=True)
        for part_TD, ids in zip(row_TD.split([len(ids) for ids in row]), row, strict=True)
    ]
    tolerance = _TOLERANCE.get(target.dtype, _HALF_TOLERANCE)
    worst = float(torch.stack(errors).max())
    if not worst <= tolerance:  # so that NaN is refused as well
        raise ValueError(
            f"packed documents would see each other in this target ({target.config.model_type}, "
            f"attention {target.config._attn_implementation!r}: hidden states differ by "
            f"{worst:.1e} of their length): leave packing off"
        )


def _relative_error(found_TD: Tensor, expected_TD: Tensor) -> Tensor:
    found_TD, expected_TD = in_float64(found_TD), in_float64(expected_TD)
    errors_T = (found_TD - expected_TD).norm(dim=1) / expected_TD.norm(dim=1)
    return errors_T.max()
