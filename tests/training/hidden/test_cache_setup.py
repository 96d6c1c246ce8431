"""Which cache belongs to a run, and what is refused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, IterableDataset

from medusa_heads.training.arguments.cache import CacheArguments
from tests.training.cache_runs import SHAPES, Runs, same

Rows = Callable[..., Dataset]


def test_write_begins_anew_but_not_where_a_run_is_resumed(runs: Runs) -> None:
    runs("auto")
    before = runs.shards()
    whole = runs("write", output="kept", save_steps=2, save_total_limit=None)
    assert not set(before) & set(runs.shards()) and runs.forwards == 5 + 3 + 1
    shutil.rmtree(runs.folder / "kept" / "checkpoint-5")
    shutil.rmtree(runs.folder / "kept" / "checkpoint-4")
    before = runs.shards()
    resumed = runs("write", output="kept", save_steps=2, save_total_limit=None, resume="last")
    assert same(whole, resumed) and runs.shards() == before and runs.forwards == 1


def test_damage_is_named_by_read_and_mended_by_auto(runs: Runs) -> None:
    plain = runs("auto")
    damaged = runs.shards()[0]
    os.truncate(damaged, damaged.stat().st_size // 2)
    with pytest.raises(ValueError) as caught:
        runs("read")
    assert str(damaged) in str(caught.value) and "write it again" in str(caught.value)
    assert same(plain, runs("auto")) and runs.forwards > 1
    assert same(plain, runs("read"))


def test_another_target_text_or_kind_is_another_cache(runs: Runs) -> None:
    with pytest.raises(ValueError, match="holds no hidden states of this target and text: write"):
        runs("read")
    runs("auto")
    runs.shape = SHAPES["prefix"]
    with pytest.raises(ValueError, match=r"differs in positions and rows_sha256\): write them"):
        runs("read")
    runs.shape = SHAPES["features"]
    with pytest.raises(ValueError, match=r"differs in hidden_size and features\): write them"):
        runs("read")
    runs("auto")
    runs.shape = replace(runs.shape, features=[1])
    with pytest.raises(ValueError, match=r"differs in features\): write them"):
        runs("read")
    runs.shape = SHAPES["medusa"]
    assert runs("read")  # which lies where it lay
    runs.texts = (runs.texts[0].select(range(10)), runs.texts[1])
    with pytest.raises(ValueError, match=r"differs in rows_sha256\)"):
        runs("read")
    with torch.no_grad():
        next(runs.target.model.parameters())[0, 0] += 1
    runs.texts = (runs.texts[0], runs.texts[0])
    with pytest.raises(ValueError, match=r"differs in target_weights_sha256 and rows_sha256\)"):
        runs("read")


def test_settings_of_the_forward_count_and_where_it_was_loaded_from_does_not(runs: Runs) -> None:
    runs("auto")
    config = runs.target.model.config
    config._name_or_path = "elsewhere"
    runs("read")
    config.rope_parameters = {**config.rope_parameters, "rope_theta": 500.0}
    with pytest.raises(ValueError, match=r"differs in target_settings_sha256\)"):
        runs("read")


def test_the_size_is_said_and_a_small_disk_refused(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def disk(free: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))

    kept = 9 * 20 - 6 + 6 * 20 + 3 * 20 + 2 * 29
    disk(kept * 16 * 4 - 1)
    with pytest.raises(ValueError, match=r"of 20 rows take 26\.4 kB and .* has 26\.4 kB free"):
        runs("auto")
    assert not (runs.folder / "cache").exists()
    disk(kept * 16 * 4)
    runs("auto")
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("Hidden states: 0 bytes in") and "about 26.4 kB to be written" in line
    disk(0)
    runs("auto")
    assert "26.4 kB in" in capsys.readouterr().out
    shutil.rmtree(runs.folder / "cache")
    # A short run needs no room for rows that it never sees.
    disk(round(kept * 16 * 4 * 0.9))
    runs("auto", max_steps=1)
    with pytest.raises(ValueError, match="give a hidden_cache_dir on a larger disk"):
        runs("write", num_train_epochs=2)


def test_hidden_states_that_are_not_finite_are_refused(runs: Runs) -> None:
    with torch.no_grad():
        runs.target.get_input_embeddings().weight[7, 3] = torch.inf
    with pytest.raises(ValueError, match=r"not finite in torch\.float32: load it in another"):
        runs("auto")
    assert not runs.shards()


def test_a_stream_is_refused(runs: Runs, make_rows: Rows) -> None:
    stream = IterableDataset.from_generator(lambda: iter(make_rows(8)))
    runs.texts = (stream, runs.texts[1])
    with pytest.raises(ValueError, match="which a stream does not: leave streaming or hidden_c"):
        runs("auto", max_steps=1)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="hidden_cache must be one of"):
        CacheArguments("on")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="hidden_cache_dir is given but hidden_cache is off"):
        CacheArguments(hidden_cache_dir="somewhere")
