"""Several documents in a row, which do not see each other.

A packed row has `position_ids` that start at 0 with each document. By those, and by the absence of
an attention mask, transformers keeps the documents apart in attention. A recurrent state runs on
into the next document; to begin it anew within a row takes kernels that few machines have. So where
a target keeps one, it reads each document in a row of its own. Whether documents really do not see
each other is measured here, never taken on trust.

Shapes: B batch, T tokens, D hidden, S documents read together, L the tokens of their longest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from uuid import uuid4

import torch
from datasets import Dataset
from torch import Tensor

from medusa_heads.target.recurrent import is_recurrent
from medusa_heads.target.target import TargetModel
from medusa_heads.training.data.tokenise import row_features

# Largest difference of a token's hidden state, relative to its length, that rounding explains.
# Documents that see each other differ by about 1.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}
_HALF_TOLERANCE = 0.1
_PROBE_LENGTHS = ((7, 12, 4), (11, 3, 9))


def best_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Put items into bins of `size`, the longest first, each where the least room is left over.

    An item longer than `size` gets a bin of its own. Bins stand in the order of their first items,
    and items, by their indices, in theirs. Best-fit decreasing needs at most 11/9 of the fewest
    bins possible, and 1 more (Johnson et al. 1974, "Worst-case performance bounds for simple
    one-dimensional packing algorithms").
    """
    bins: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(size + 1)]  # bins by the room they have
    occupied = 0  # bit r says that a bin has room r
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = min(lengths[item], size)
        fitting = occupied >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            chosen = with_room[room].pop()
            if not with_room[room]:
                occupied &= ~(1 << room)
        else:
            room, chosen = size, len(bins)
            bins.append([])
        bins[chosen].append(item)
        left = room - length
        if left:
            with_room[left].append(chosen)
            occupied |= 1 << left
    return sorted(sorted(items) for items in bins)


def pack_rows(rows: Dataset, max_length: int) -> Dataset:
    """Rows of up to `max_length` tokens, each of several of the given rows, with the columns
    `input_ids`, `labels` and `position_ids`."""
    lengths = [len(ids) for ids in rows.with_format("numpy")["input_ids"]]
    bins = Dataset.from_dict({"members": best_fit(lengths, max_length)})
    tokens = rows.select_columns(["input_ids", "labels"])
    return bins.map(
        lambda packed: _joined(tokens[packed["members"]]),
        remove_columns=["members"],
        features=row_features("position_ids"),
        load_from_cache_file=False,
        new_fingerprint=uuid4().hex,  # else all rows would be hashed for one
        desc="Packing",
    )


def pack_batch(batch: Mapping[str, Sequence[Any]], max_length: int) -> dict[str, list[Any]]:
    """The same for as many rows of a stream as are at hand."""
    lengths = [len(ids) for ids in batch["input_ids"]]
    packed = [
        _joined({name: [batch[name][i] for i in members] for name in ("input_ids", "labels")})
        for members in best_fit(lengths, max_length)
    ]
    return {name: [row[name] for row in packed] for name in row_features("position_ids")}


def _joined(rows: Mapping[str, Iterable[Sequence[int]]]) -> dict[str, list[int]]:
    """Documents one behind the other, with positions that begin anew with each."""
    return {
        "input_ids": [token for ids in rows["input_ids"] for token in ids],
        "labels": [label for labels in rows["labels"] for label in labels],
        "position_ids": [position for ids in rows["input_ids"] for position in range(len(ids))],
    }


def hidden_of(target: TargetModel, inputs: Mapping[str, Any], *, with_grad: bool = False) -> Tensor:
    """hidden_BTD of a batch that `collate` made, packed or not."""
    read = target.hidden_with_grad if with_grad else target.hidden
    ids_BT, positions_BT = inputs["input_ids"], inputs.get("position_ids")
    if positions_BT is not None and is_recurrent(target.config):
        return _read_apart(read, ids_BT, positions_BT)
    return read(ids_BT, inputs.get("attention_mask"), positions_BT)


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
    found_TD, expected_TD = found_TD.double(), expected_TD.double()
    errors_T = (found_TD - expected_TD).norm(dim=1) / expected_TD.norm(dim=1)
    return errors_T.max()
