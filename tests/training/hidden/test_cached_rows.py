"""What the cache keeps of a row, and under which name."""

import torch
import torch.nn.functional as F
from datasets import Dataset

from medusa_heads.training.hidden.cached_rows import (
    collate_named,
    kept_counts,
    kept_positions,
    row_name,
)
from medusa_heads.training.loss.rows import supervised_rows
from tests.training.packing import packed_rows


def test_kept_is_all_that_heads_and_the_target_as_their_teacher_need() -> None:
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(1, 50, (64, 12), generator=generator)
    labels_BT = ids_BT.where(torch.rand(64, 12, generator=generator) < 0.6, -100)
    starts_BT = torch.rand(64, 12, generator=generator) < 0.15
    starts_BT[:, 0] = True
    last_start_BT = torch.where(starts_BT, torch.arange(12), 0).cummax(dim=1).values
    position_ids_BT = torch.arange(12) - last_start_BT
    heads = 3
    kept_BT = torch.stack(
        [torch.from_numpy(kept_positions({"labels": row.tolist()}, "learnt")) for row in labels_BT]
    )
    for packed in (None, position_ids_BT):
        rows = supervised_rows(ids_BT, labels_BT, heads, packed)
        teaching_RK = rows.positions_R[:, None] + 1 + torch.arange(heads)
        needed = torch.cat([rows.positions_R, teaching_RK[rows.labels_RK != -100]])
        assert len(needed) > 100
        assert kept_BT.flatten()[needed].all()
        if packed is None:
            # Nor is anything kept without need, but before a token that stands alone.
            unneeded_BT = kept_BT.flatten().clone()
            unneeded_BT[needed] = False
            own_BT, next_BT, later_BT = (
                F.pad(labels_BT != -100, (0, ahead))[:, ahead:] for ahead in range(3)
            )
            own_BT[:, 0] = False  # which no position before it drafts
            assert torch.equal(unneeded_BT.view_as(kept_BT), next_BT & ~own_BT & ~later_BT)


def test_a_name_is_of_tokens_positions_and_what_is_kept() -> None:
    row = {"input_ids": [3, 4, 5, 6], "labels": [-100, -100, 5, 6]}
    name = row_name(row, "learnt")
    assert name == row_name({**row, "document": 7}, "learnt")
    others = [
        {**row, "input_ids": [3, 4, 5, 7]},
        {**row, "labels": [-100, 4, 5, 6]},
        {**row, "position_ids": [0, 1, 0, 1]},
    ]
    assert len({name, *(row_name(other, "learnt") for other in others)}) == 4
    # Whole rows are the same whatever is learnt from them.
    assert row_name(row, "all") == row_name(others[1], "all") != name


def test_counts_are_those_of_the_kept_positions() -> None:
    rows = [
        {"input_ids": [3, 4, 5, 6], "labels": [-100, -100, 5, 6]},
        {"input_ids": [3, 4, 5], "labels": [3, 4, 5]},
        {"input_ids": [3], "labels": [3]},
        {"input_ids": [3, 4, 5], "labels": [-100] * 3},
    ]
    table = Dataset.from_list(rows)
    packed = packed_rows(table, 7)
    assert len(packed) < len(table)
    for data in (table, packed, table.select([2, 0])):
        for kept in ("learnt", "all"):
            masks = [kept_positions(row, kept) for row in data]
            counts = kept_counts(data, kept)
            assert counts.tolist() == [int(mask.sum()) for mask in masks]
    assert kept_counts(table, "learnt").tolist() == [2, 2, 0, 0]


def test_batches_carry_names_and_kept_positions() -> None:
    rows = [
        {"input_ids": [3, 4, 5, 6], "labels": [-100, -100, 5, 6]},
        {"input_ids": [3, 4], "labels": [3, 4]},
    ]
    batch = collate_named(rows, "learnt")
    assert batch["kept"].tolist() == [[False, True, True, False], [True, False, False, False]]
    assert collate_named(rows, "all")["kept"].tolist() == [[True] * 4, [True, True, False, False]]
    packed = [{**row, "position_ids": range(len(row["labels"]))} for row in rows]
    assert "position_ids" in collate_named(packed, "learnt")
