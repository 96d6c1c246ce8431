"""The folder of hidden states: what is written is read, and what is damaged is named."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from medusa_heads.files import staging
from medusa_heads.training.hidden.cached_rows import RowPlan
from medusa_heads.training.hidden.store import CacheError, CacheKey, HiddenCache

WIDTH = 4
COUNTS = {"aa": 3, "bb": 2, "cc": 5}
KEY = CacheKey("weights", "settings", "bfloat16", WIDTH, "learnt", "rows")


def opened(folder: Path, **changed: Any) -> HiddenCache:
    arguments: dict[str, Any] = {"dtype": torch.bfloat16, **changed}
    return HiddenCache(folder, KEY, RowPlan(COUNTS, 3), **arguments)


def hidden(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(COUNTS[name])
    return torch.randn(COUNTS[name], WIDTH, generator=generator).bfloat16()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete cache of two shards."""
    cache = opened(tmp_path, shard_bytes=hidden("aa").nbytes + hidden("bb").nbytes)
    cache.write_index()
    for name in COUNTS:
        cache.add(name, hidden(name))
    cache.flush()
    return tmp_path


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def test_what_was_written_is_read(folder: Path) -> None:
    assert len(shards(folder)) == 2
    cache = opened(folder, dtype=None, read_only=True)
    assert cache.missing() == [] and cache.dtype == torch.bfloat16
    for name in COUNTS:
        found = cache.read(name)
        assert found is not None and torch.equal(found, hidden(name))
    assert cache.read("dd") is None and "dd" not in cache


def test_rows_wait_in_memory_until_a_shard_is_full(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    cache.write_index()
    cache.add("aa", hidden("aa"))
    assert shards(tmp_path) == [] and cache.read("aa") is not None
    assert cache.missing() == ["bb", "cc"]
    cache.flush()
    cache.flush()
    assert len(shards(tmp_path)) == 1
    assert opened(tmp_path).missing() == ["bb", "cc"]


def test_shards_may_be_read_by_whom_the_index_may(folder: Path) -> None:
    modes = {path.stat().st_mode for path in [*shards(folder), folder / "index.json"]}
    assert len(modes) == 1


def test_one_process_sees_what_another_wrote(tmp_path: Path) -> None:
    mine, other = opened(tmp_path), opened(tmp_path)
    mine.write_index()
    for cache, name in ((mine, "aa"), (other, "bb")):
        cache.add(name, hidden(name))
        cache.flush()
    assert len(shards(tmp_path)) == 2 and "bb" not in mine
    mine.refresh()
    found = mine.read("bb")
    assert found is not None and torch.equal(found, hidden("bb"))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def not_finite(path: Path) -> None:
    tensors = load_file(path)
    tensors["aa"][1, 2] = torch.nan
    save_file(tensors, path, metadata={"cache": KEY.name()})


def infinite(path: Path) -> None:
    tensors = load_file(path)
    tensors["bb"][0, 0] = -torch.inf
    save_file(tensors, path, metadata={"cache": KEY.name()})


def other_dtype(path: Path) -> None:
    tensors = {name: tensor.half() for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"cache": KEY.name()})


def other_shape(path: Path) -> None:
    tensors = load_file(path)
    tensors["aa"] = tensors["aa"][:-1].contiguous()
    save_file(tensors, path, metadata={"cache": KEY.name()})


def of_another_cache(path: Path) -> None:
    save_file(load_file(path), path, metadata={"cache": "0" * 16})


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (truncate, "is no whole shard of hidden states"),
        (empty, "is no whole shard of hidden states"),
        (not_finite, "holds hidden states that are not finite (row aa)"),
        (infinite, "holds hidden states that are not finite (row bb)"),
        (other_dtype, "holds F16 of shape [3, 4] for the row aa, expected BF16"),
        (other_shape, "holds BF16 of shape [2, 4] for the row aa, expected BF16 of shape [3, 4]"),
        (of_another_cache, "belongs to another cache"),
    ],
)
def test_a_damaged_shard_is_named_or_its_rows_are_written_again(
    damage: Callable[[Path], None], sentence: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = shards(folder)[0]
    damage(damaged)
    with pytest.raises(CacheError) as caught:
        strict = opened(folder, dtype=None, read_only=True)
        for name in COUNTS:
            strict.read(name)
    assert str(damaged) in str(caught.value) and sentence in str(caught.value)
    assert "hidden_cache auto" in str(caught.value)

    cache = opened(folder)
    lost = [name for name in COUNTS if cache.read(name) is None]
    assert lost and set(lost) <= {"aa", "bb"} and sorted(cache.missing()) == sorted(lost)
    assert str(damaged) in caplog.text
    for name in lost:
        cache.add(name, hidden(name))
    cache.flush()
    whole = opened(folder, dtype=None, read_only=True)
    for name in COUNTS:
        found = whole.read(name)
        assert found is not None and torch.equal(found, hidden(name))


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"format_version": 1}', '{"format_version": 2, "key": {}, "dtype": "bfloat16"}'],
)
def test_a_damaged_index_is_named(content: str, folder: Path) -> None:
    (folder / "index.json").write_text(content)
    with pytest.raises(CacheError, match=r"index\.json is no index of hidden states"):
        opened(folder, dtype=None, read_only=True)


@pytest.mark.parametrize("dtype", ["int64", "uint3", "nn"])
def test_an_index_with_a_strange_dtype_is_named(dtype: str, folder: Path) -> None:
    path = folder / "index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": dtype}))
    with pytest.raises(CacheError, match=r"index\.json is no index of hidden states"):
        opened(folder, dtype=None, read_only=True)


def test_beginning_anew_removes_shards_and_what_dead_writers_left(folder: Path) -> None:
    left = folder / ".0123456789abcdef.part"
    left.mkdir()
    (left / "000002-0.safetensors").write_bytes(b"half")
    (folder / "notes.txt").write_text("kept")
    cache = opened(folder)
    with staging(folder) as of_another:
        cache.remove_leftovers()
        assert not left.exists() and of_another.exists()
    cache.clear()
    assert cache.missing() == list(COUNTS) and shards(folder) == []
    assert (folder / "notes.txt").exists()


def test_hidden_states_keep_their_dtype(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.float16, torch.float64):
        folder = tmp_path / str(dtype)
        cache = opened(folder, dtype=dtype)
        cache.write_index()
        values = torch.full((3, WIDTH), 1 / 3, dtype=dtype)
        cache.add("aa", values)
        cache.flush()
        with safe_open(shards(folder)[0], framework="pt") as shard:
            assert shard.get_tensor("aa").dtype == dtype
        found = opened(folder, dtype=None, read_only=True).read("aa")
        assert found is not None and torch.equal(found, values)


def test_a_disk_that_is_full_leaves_no_half_shard(tmp_path: Path) -> None:
    cache = opened(tmp_path / "gone")
    cache.add("aa", hidden("aa"))
    with pytest.raises(OSError, match="gone"):
        cache.flush()
    assert "aa" in cache  # nothing is lost: a later flush may succeed
    cache.write_index()
    cache.flush()
    assert opened(tmp_path / "gone").missing() == ["bb", "cc"]
