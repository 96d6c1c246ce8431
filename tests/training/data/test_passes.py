"""Passes over a stream: each in an order of its own, which hangs on its number alone."""

import itertools
from functools import partial

import pytest

from medusa_heads.target.target import TargetModel
from medusa_heads.training.data.stream import _pass, _Passes
from tests.training.data.streaming import first, sharded, stream


@pytest.mark.parametrize("packing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_every_pass_over_a_stream_is_mixed_anew(target: TargetModel, packing: bool) -> None:
    """By its number: what is read again from the start, or with others, has the same rows."""
    data = stream(
        target, None, sharded([0, 1, 2, 3]), eval_rows=8, shuffle_buffer=16, packing=packing
    )
    for share in (data.rows, data.rows.shard(num_shards=2, index=1)):
        read = list(itertools.islice(share, 120))
        assert list(itertools.islice(share, 120)) == read
        assert list(itertools.islice(share.skip(70), 50)) == read[70:]
    numbers = [i for row in itertools.islice(data.rows, 120) for i in row["input_ids"][::5]]
    passes = [numbers[at : at + 40] for at in (0, 40, 80)]
    assert all(sorted(each) == list(range(8, 48)) for each in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0]


def test_readers_share_every_pass() -> None:
    rows = sharded([0, 1, 2, 3], rows=6)
    make = partial(_pass, rows, 0, 8, None)
    endless = make(0).repeat(None)
    endless._ex_iterable = _Passes(endless._ex_iterable.ex_iterable, make)
    shares = [iter(endless.shard(num_shards=2, index=index)) for index in range(2)]
    orders = []
    for _ in range(3):
        seen = [[row["input_ids"][0] for row in itertools.islice(share, 12)] for share in shares]
        assert sorted(seen[0] + seen[1]) == list(range(24))
        orders.append(seen)
    assert orders[0] != orders[1] != orders[2]


def test_the_first_pass_is_as_datasets_mixes_it(target: TargetModel) -> None:
    data = stream(target, None, sharded([0, 1, 2, 3]), eval_rows=8, shuffle_buffer=16)
    assert data.one_pass is not None
    mixed = data.one_pass.shuffle(seed=0, buffer_size=16)
    assert data.first_pass is not None and list(data.first_pass) == list(mixed)
    assert first(data, 40) == [row["input_ids"] for row in mixed]
    part, whole = (rows.shard(num_shards=2, index=1) for rows in (data.rows, mixed))
    expected = list(whole)
    assert list(itertools.islice(part, len(expected))) == expected
