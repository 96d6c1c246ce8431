"""The folder of hidden states: what is written is read, and what is damaged is named."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from medusa_heads.training.hidden.layout import CacheError, CacheKey, Index, Layout, shard_name
from medusa_heads.training.hidden.store import HiddenCache, decode, encode, seal, write_shard
from tests.killed import dies

WIDTH = 4
COUNTS = [3, 2, 5, 0, 1]
NAMES = [b"a" * 16, b"b" * 16, b"c" * 15 + b"\0", b"d" * 16, b"\0" * 16]
KEY = CacheKey("weights", "settings", "bfloat16", WIDTH, [], "learnt", "auto", 5, 20, "rows")


def index_of(key: CacheKey = KEY, dtype: str = "bfloat16", rows_per_shard: int = 2) -> Index:
    starts = np.concatenate([[0], np.cumsum(COUNTS)])
    return Index(key, Layout(len(COUNTS), 1, rows_per_shard, None, dtype), starts=starts)


def hidden(place: int, dtype: torch.dtype = torch.bfloat16, width: int = WIDTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(place)
    return torch.randn(COUNTS[place], width, generator=generator, dtype=torch.float64).to(dtype)


def fill(folder: Path, index: Index) -> None:
    index.write(folder)
    for shard in range(index.layout.shards):
        rows = [
            (NAMES[place], hidden(place, index.computed, index.key.hidden_size))
            for place in index.layout.places(shard)
        ]
        write_shard(folder, index, shard, rows)
    seal(folder, Index.read(folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete cache of three shards."""
    fill(tmp_path / "cache", index_of())
    return tmp_path / "cache"


def test_what_was_written_is_read(folder: Path) -> None:
    cache = HiddenCache(folder, KEY)
    for again in (cache, pickle.loads(pickle.dumps(cache))):
        for place, name in enumerate(NAMES):
            found = again.read(name)
            assert found is not None and found.dtype == torch.bfloat16
            assert torch.equal(found, hidden(place))
        assert again.read(b"e" * 16) is None
    assert cache.size == sum(COUNTS) * WIDTH * 2


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_hidden_states_keep_their_dtype(dtype: str, tmp_path: Path) -> None:
    index = index_of(dtype=dtype)
    fill(tmp_path, index)
    found = HiddenCache(tmp_path, KEY).read_place(2)
    assert torch.equal(found, hidden(2, index.computed))


def test_fp8_has_a_scale_for_every_position_and_layer(tmp_path: Path) -> None:
    key = replace(KEY, features=[0], hidden_size=2 * WIDTH, stored_in="float8_e4m3fn")
    index = index_of(key, "float32")
    states = torch.tensor([[1.0, -2.0, 0.5, 3.0], [0.0, 0.0, 0.0, 0.0], [1e-5, 0.0, 2e-5, 3e-5]])
    wide = torch.cat([states, 1000 * states], dim=1)
    found = decode(*encode(wide, index), index)
    assert found.dtype == torch.float32 and found.shape == wide.shape
    torch.testing.assert_close(found, wide, rtol=2**-4, atol=0)
    assert encode(wide, index)[0].nbytes == wide.numel()
    fill(tmp_path, index)
    cache = HiddenCache(tmp_path, key)
    whole = hidden(2, torch.float32, 2 * WIDTH)
    torch.testing.assert_close(cache.read_place(2), whole, rtol=2**-4, atol=2**-9)
    assert cache.size == sum(COUNTS) * 2 * (WIDTH + 4)


def test_shards_may_be_read_by_whom_the_index_may(folder: Path) -> None:
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def of_another_cache(path: Path) -> None:
    other = path.parent.parent / "other"
    fill(other, index_of(replace(KEY, rows_sha256="others")))
    path.write_bytes((other / path.name).read_bytes())


def of_another_place(path: Path) -> None:
    path.write_bytes((path.parent / shard_name(1)).read_bytes())


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (truncate, "bytes, expected"),
        (flip_a_bit, "is damaged (row 0)"),
        (empty, "is no shard of this cache"),
        (of_another_cache, "is no shard of this cache"),
        (of_another_place, "is no shard of this cache"),
    ],
)
def test_a_damaged_shard_is_named(
    damage: Callable[[Path], None], sentence: str, folder: Path
) -> None:
    damaged = folder / shard_name(0)
    content = bytearray(damaged.read_bytes())
    damage(damaged)
    if damage is flip_a_bit:  # in the states of its first row, not in what fills them up
        content[int(index_of().shape(0).states)] ^= 1
        damaged.write_bytes(content)
    cache = HiddenCache(folder, KEY)
    with pytest.raises(CacheError) as caught:
        cache.read(NAMES[0])
    assert str(damaged) in str(caught.value) and sentence in str(caught.value)
    assert "remove it, and medusa-heads prepare-hidden writes it again" in str(caught.value)
    assert cache.read(NAMES[4]) is not None


def test_a_missing_shard_is_noticed_at_the_start(folder: Path) -> None:
    (folder / shard_name(1)).unlink()
    with pytest.raises(CacheError, match="not complete, 1 of 3 shards are missing: go on"):
        HiddenCache(folder, KEY)


@pytest.mark.parametrize("place", [0, 9, 20, 40, -1])
def test_a_damaged_index_is_named(place: int, folder: Path) -> None:
    path = folder / "index.bin"
    content = bytearray(path.read_bytes())
    if place < 0:
        content = content[: len(content) // 2]
    else:
        content[place] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(CacheError, match=r"index\.bin is no index of hidden states"):
        HiddenCache(folder, KEY)


@pytest.mark.parametrize("wrong", [[1, 0, 2, 3, 4], [5, 1, 2, 3, 4], [-1, 1, 2, 3, 4]])
def test_a_row_is_never_taken_for_another(wrong: list[int], folder: Path) -> None:
    """Not by an index of which bits have flipped, whose header alone is read."""
    path, places = folder / "index.bin", Index.read(folder).places
    content = path.read_bytes()
    assert content.count(places.tobytes()) == 1
    damaged = places[wrong] if min(wrong) == 0 else np.array([*wrong], "<i8")
    path.write_bytes(content.replace(places.tobytes(), damaged.tobytes()))
    cache = HiddenCache(folder, KEY)
    caught = 0
    for place, name in enumerate(NAMES):
        try:
            found = cache.read(name)
            assert found is not None and torch.equal(found, hidden(place))
        except CacheError as error:
            assert "is damaged" in str(error)
            caught += 1
    assert caught


@pytest.mark.parametrize("cut", ["index.bin", shard_name(0)])
def test_a_file_that_is_cut_while_it_is_read_is_named(cut: str, folder: Path) -> None:
    """In a process of its own, which the system kills where it reads what is no longer there."""

    def read() -> None:
        cache = HiddenCache(folder, KEY)
        cache.read(NAMES[0])
        os.truncate(folder / cut, 0)
        with pytest.raises(CacheError, match="was cut short while it was read: remove it") as told:
            cache.read(NAMES[1])
        assert str(folder / cut) in str(told.value)

    assert not dies(read)


@pytest.mark.parametrize("content", [b"", b"[]", b"\0" * 100])
def test_another_file_is_no_index(content: bytes, folder: Path) -> None:
    (folder / "index.bin").write_bytes(content)
    with pytest.raises(CacheError, match=r"index\.bin is no index of hidden states"):
        HiddenCache(folder, KEY)


def test_the_index_of_another_cache_is_refused(folder: Path) -> None:
    with pytest.raises(CacheError, match="describes another cache"):
        HiddenCache(folder, replace(KEY, rows_sha256="others"))


def test_a_row_that_cannot_be_computed_leaves_no_half_shard(tmp_path: Path) -> None:
    index = index_of()
    index.write(tmp_path)

    def rows() -> Iterator[tuple[bytes, torch.Tensor]]:
        yield NAMES[0], hidden(0)
        raise ValueError("the target's hidden states are not finite")

    with pytest.raises(ValueError, match="not finite"):
        write_shard(tmp_path, index, 0, rows())
    assert [path.name for path in tmp_path.iterdir()] == ["index.bin"]


opened: list[str] = []
watching = False


def watch(event: str, args: tuple[Any, ...]) -> None:
    if watching and event == "open":
        opened.append(os.fspath(args[0]))


def test_a_cache_of_many_shards_is_opened_by_its_index_alone(tmp_path: Path) -> None:
    """Every rank opens it: what that costs must not grow with the shards."""
    global watching
    fill(tmp_path / "cache", index_of(rows_per_shard=1))
    sys.addaudithook(watch)  # which lasts as long as the process
    watching = True
    try:
        cache = HiddenCache(tmp_path / "cache", KEY)
        at_start = list(opened)
        cache.read(NAMES[2])
    finally:
        watching = False
    assert [Path(path).name for path in at_start] == ["index.bin"]
    assert [Path(path).name for path in opened[len(at_start) :]] == [shard_name(2)]
