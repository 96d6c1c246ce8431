"""Which cache belongs to a run, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset

from medusa_heads.training.arguments.cache import CacheArguments
from medusa_heads.training.arguments.data import DataArguments
from medusa_heads.training.arguments.training import OptimisationArguments, to_training_arguments
from medusa_heads.training.runs.heads import train_heads
from medusa_heads.training.runs.resumable import find_checkpoint
from tests.training.cache_runs import SHAPES, Runs, same

Rows = Callable[..., Dataset]


def test_damage_is_named_and_a_shard_that_was_removed_is_written_again(runs: Runs) -> None:
    plain = runs("auto")
    damaged = max(runs.shards(), key=lambda path: path.stat().st_size)
    content = bytearray(damaged.read_bytes())
    content[-100] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(ValueError, match=r"is damaged \(row \d+\): remove it") as caught:
        runs("read")
    assert str(damaged) in str(caught.value)
    damaged.unlink()
    with pytest.raises(ValueError, match="not complete, 1 of 1 shards are missing"):
        runs("read")
    assert same(plain, runs("auto")) and runs.forwards == 5 + 1
    assert same(plain, runs("read"))


def test_another_target_text_or_kind_is_another_cache(runs: Runs) -> None:
    with pytest.raises(ValueError, match="holds no hidden states of this target and text: write"):
        runs("read")
    runs("auto")
    runs.shape = SHAPES["prefix"]
    with pytest.raises(ValueError, match=r"differs in positions\): write them"):
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
    with pytest.raises(ValueError, match=r"differs in rows, tokens and rows_sha256\)"):
        runs("read")
    with torch.no_grad():
        next(runs.target.model.parameters())[0, 0] += 1
    runs.texts = (runs.texts[0], runs.texts[0])
    with pytest.raises(ValueError, match=r"differs in target_weights_sha256, rows, tokens"):
        runs("read")


def test_settings_of_the_forward_count_and_where_it_was_loaded_from_does_not(runs: Runs) -> None:
    runs("auto")
    config = runs.target.model.config
    config._name_or_path = "elsewhere"
    runs("read")
    config.rope_parameters = {**config.rope_parameters, "rope_theta": 500.0}
    with pytest.raises(ValueError, match=r"differs in target_settings_sha256\)"):
        runs("read")


def test_another_adapter_of_the_same_target_is_another_cache(runs: Runs) -> None:
    """All weights are there either way, and which of them count is said by no weight."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(runs.target.model, lora, adapter_name="first")
    model.add_adapter("second", lora)
    model.set_adapter("first")
    runs("auto")
    model.set_adapter("second")
    with pytest.raises(ValueError, match=r"differs in target_settings_sha256\)"):
        runs("read")


def test_the_size_is_said_and_a_small_disk_refused(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def disk(free: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))

    states = (9 * 20 - 6 + 6 * 20 + 3 * 20 + 2 * 29) * 16 * 4
    disk(states)
    with pytest.raises(
        ValueError, match=r"take 2\d\.\d kB and .* has 26\.4 kB free: give a hidden"
    ):
        runs("auto")
    assert not runs.shards()
    disk(states + 1024)  # names and checksums, too
    runs("auto")
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("Hidden states: 0 bytes in") and " kB to be written" in line
    disk(0)
    runs("auto")
    printed = capsys.readouterr().out
    assert " kB in" in printed and "beside" not in printed
    # What another run writes in may go at any moment: here, between its name and a look at it.
    for shard in runs.shards():
        (shard.parent / ".0123456789abcdef.part").symlink_to("gone")
    runs.texts = runs.texts[0].select(range(6)), runs.texts[1]
    with pytest.raises(
        ValueError, match=r"free, beside 2\d\.\d kB of other texts or targets: give"
    ):
        runs("auto")


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
    with pytest.raises(ValueError, match=r"hidden_cache true .* leaves open which: give read or"):
        CacheArguments(True)  # type: ignore[arg-type]
    assert CacheArguments(False).hidden_cache == "off"  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="hidden_cache_dir is given but hidden_cache is off"):
        CacheArguments(hidden_cache_dir="somewhere").check(joint=False)
    with pytest.raises(ValueError, match="hidden_cache_dtype is given but hidden_cache is off"):
        CacheArguments(hidden_cache_dtype="bfloat16").check(joint=False)


def test_a_home_that_is_written_short_is_no_folder_of_that_name(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a YAML file, or behind `--output_dir=`, where no shell writes it out."""
    home, here = tmp_path / "home", tmp_path / "here"
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    given = OptimisationArguments("~/run", num_train_epochs=1, training_args={"use_cpu": True})
    assert given.output_dir == str(home / "run")
    told: dict[str, Any] = {
        "config": runs.shape,
        "hidden_cache": CacheArguments("auto", "~/states"),
    }
    told |= {"training_args": to_training_arguments(given, "shared")}
    texts = runs.texts
    train_heads(runs.target, texts[0], eval_dataset=texts[1], output_dir="~/run", **told)
    assert (home / "run" / "metrics.json").is_file() and any((home / "states").iterdir())
    assert not any(here.iterdir())
    (checkpoint,) = (home / "run").glob("checkpoint-*")
    assert find_checkpoint(f"~/run/{checkpoint.name}", home / "run") == str(checkpoint)
    (home / "chat.jinja").write_text("{{ messages }}")
    assert DataArguments(chat_template="~/chat.jinja").template_text() == "{{ messages }}"
