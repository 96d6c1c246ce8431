"""In which order rows are learnt: that of a pass hangs on its number and the seed alone."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderShard,
    prepare_data_loader,
    skip_first_batches,
)
from accelerate.state import GradientState
from torch.utils.data import DataLoader, RandomSampler
from transformers.trainer_pt_utils import LengthGroupedSampler

from medusa_heads.training.hidden.layout import Layout
from medusa_heads.training.hidden.states import DrawnOrder, ShardLocalOrder
from medusa_heads.training.runs.resumable import last_rows, with_order


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("shards", [None, 1, 4])
def test_rows_come_in_accelerates_order_also_where_a_later_pass_is_resumed(
    processes: int, shards: int | None
) -> None:
    """In one shard, and without a cache, it is that of accelerate's own sampler."""
    PartialState()
    torch.manual_seed(3)
    rows = 16

    def order(count: int, seed: int) -> DrawnOrder:
        if shards is None:
            return DrawnOrder(count, seed)
        return ShardLocalOrder(Layout(count, 1, count // shards, seed, "float32"), seed)

    def loader(*, own: bool) -> Any:
        numbers: Any = list(range(rows))
        plain: Any = DataLoader(numbers, batch_size=2, sampler=RandomSampler(numbers))
        made = prepare_data_loader(
            plain,
            num_processes=processes,
            process_index=0,
            use_seedable_sampler=True,
            put_on_device=False,
        )
        return with_order(made, order, 0) if own else made

    def read(loader: Any, number: int) -> list[list[int]]:
        loader.set_epoch(number)
        return [batch.tolist() for batch in loader]

    whole = loader(own=True)
    passes = [read(whole, number) for number in range(3)]
    if shards != 4:
        plain = loader(own=False)
        assert passes == [read(plain, number) for number in range(3)]
    resumed = loader(own=True)
    assert read(skip_first_batches(resumed, 2), 1) == passes[1][2:] != passes[0][2:]
    assert read(resumed, 2) == passes[2]


def test_rows_that_are_grouped_by_length_are_dealt_out_once_and_come_again_in_a_resumed_pass() -> (
    None
):
    """Whatever each process draws besides, as for a dropout."""
    PartialState()
    lengths = torch.randint(1, 9, (64,), generator=torch.Generator().manual_seed(0)).tolist()

    def loader(process: int) -> Any:
        plain: Any = DataLoader(
            range(64),  # type: ignore[arg-type]
            batch_size=2,
            sampler=LengthGroupedSampler(4, lengths=lengths),
        )
        made = prepare_data_loader(
            plain, num_processes=2, process_index=process, put_on_device=False
        )
        return with_order(made, DrawnOrder, 3)

    def read(loader: Any, number: int) -> list[list[int]]:
        torch.rand(len(read_so_far))
        loader.set_epoch(number)
        read_so_far.append(number)
        return [batch.tolist() for batch in loader]

    read_so_far: list[int] = []
    both = loader(0), loader(1)
    passes = [[read(each, number) for each in both] for number in range(2)]
    for parts in passes:
        assert sorted(row for part in parts for batch in part for row in batch) == list(range(64))
    assert passes[0] != passes[1]
    assert all(lengths[batch[0]] >= lengths[batch[1]] for part in passes[1] for batch in part)
    assert read(skip_first_batches(loader(0), 2), 1) == passes[1][0][2:]


class OwnBatches:
    """Batches of no one size, in each pass in another order, as `batch_rebalance` makes them."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        batches = [[0, 1, 2], [3, 4], [5, 6, 7, 8], [9]]
        return iter(batches[self.epoch :] + batches[: self.epoch])


def test_batches_of_no_one_size_come_again_in_a_resumed_pass_and_none_is_filled_up() -> None:
    PartialState()
    shard: Any = BatchSamplerShard(OwnBatches(), num_processes=1, even_batches=False)
    whole = with_order(DataLoaderShard(range(10), batch_sampler=shard), DrawnOrder, 3)
    loader = skip_first_batches(whole, 2)
    loader.set_epoch(1)
    place = GradientState()
    assert [(last_rows(place), batch.tolist()) for batch in loader] == [(-1, [9]), (-1, [0, 1, 2])]
