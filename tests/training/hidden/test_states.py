"""Training from the cache: the same weights, without the target."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import get_worker_info

from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.hidden import states as hidden_states
from medusa_heads.training.hidden.store import HiddenCache
from medusa_heads.training.runs.trainer import TaughtTrainer
from tests.training.cache_runs import SHAPES, Runs, same
from tests.training.packing import packed_rows


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_bitwise_the_same_and_the_target_does_not_run(shape: str, runs: Runs) -> None:
    runs.shape = SHAPES[shape]
    plain = runs("off")
    plain_loss = runs.eval_loss
    # Which cache a run takes has nothing to do with what it reads of it.
    for mode in ("write", "auto", "read") if shape == "medusa" else ("write", "read"):
        assert same(plain, runs(mode)), mode
        assert runs.eval_loss == plain_loss
        scaled = shape in ("block", "eagle3")  # by a row of the held-out text
        assert runs.forwards == {"write": 5 + 3 + 1 + scaled, "auto": 1, "read": 0}[mode]


@pytest.mark.parametrize("head_weights", ["decay", "acceptance"])
def test_the_target_teaches_from_the_cache(head_weights: Any, runs: Runs) -> None:
    runs.objective = LossConfig({"forward_kl": 1.0, "acceptance": 0.5}, head_weights=head_weights)
    plain = runs("off")
    assert same(plain, runs("auto")) and same(plain, runs("read"))
    assert runs.forwards == 0


def test_from_the_second_epoch_the_target_does_not_run(runs: Runs) -> None:
    three: dict[str, Any] = {"num_train_epochs": 3}
    plain = runs("off", **three)
    judged = 4  # batches of the first steps, by which the text is judged
    assert runs.forwards == 3 * (5 + 3) + 3 + 1 + judged
    for mode in ("write", "auto"):
        shutil.rmtree(runs.folder / "cache", ignore_errors=True)
        cached = runs(mode, **three)
        assert runs.forwards == 5 + 3 + 1  # batches of both sets once, and a token for the dtype
        for name, tensor in plain.items():
            torch.testing.assert_close(cached[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_bf16_target_is_kept_in_bf16(runs: Runs) -> None:
    runs.target.model.to(torch.bfloat16)  # type: ignore[arg-type]
    plain = runs("off")
    assert same(plain, runs("auto")) and same(plain, runs("read"))
    indexes = [json.loads(path.read_text()) for path in runs.folder.glob("cache/*/index.json")]
    assert [index["dtype"] for index in indexes] == ["bfloat16"] * 2
    kept = sum(index["kept_positions"] for index in indexes)
    assert kept == 9 * 20 - 6 + 6 * 20 + 3 * 20 + 2 * 29
    size = sum(path.stat().st_size for path in runs.shards())
    assert 0 < size - kept * 16 * 2 < 8192  # a header for each shard


def test_other_batches_and_orders_find_the_same_rows(runs: Runs) -> None:
    runs("auto")
    plain = runs("off", per_device_train_batch_size=3, seed=5)
    cached = runs("read", per_device_train_batch_size=3, seed=5)
    for name, tensor in plain.items():
        torch.testing.assert_close(cached[name], tensor, rtol=1e-4, atol=1e-5)


def test_packed_rows(runs: Runs) -> None:
    from medusa_heads.training.data.prepare import TrainingData
    from medusa_heads.training.data.row_facts import check_rows

    known, held_out = runs.texts
    facts = check_rows(known, runs.target, name="set", heads_reached=1)
    data = TrainingData(packed_rows(known, 48), held_out, known, facts, facts, [])
    runs.texts = (data, held_out)
    runs.objective = LossConfig({"cross_entropy": 0.5, "forward_kl": 0.5})
    plain = runs("off")
    assert same(plain, runs("auto")) and same(plain, runs("read"))
    assert runs.forwards == 0


def test_workers_read_ahead(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = runs("off")
    assert same(plain, runs("auto", further={"dataloader_num_workers": 2}))
    assert runs.forwards == 5 + 3 + 1
    read, by_main = hidden_states.read_batch, []

    def watched(*args: Any) -> Any:
        if get_worker_info() is None:
            by_main.append(args)
        return read(*args)

    monkeypatch.setattr(hidden_states, "read_batch", watched)
    assert same(plain, runs("read", further={"dataloader_num_workers": 2}))
    assert len(by_main) == 1  # the calibration, which has no data loader


def test_a_checkpoint_comes_after_the_hidden_states_that_it_has_seen(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run that goes on from it would compute them again, in other batches."""
    there = []

    def save(trainer: TaughtTrainer, *_: Any) -> None:
        cache = trainer.hidden_states.caches[0]  # type: ignore[attr-defined]
        there.append(len(HiddenCache(cache.folder, cache.key, cache.plan).missing()))

    monkeypatch.setattr(TaughtTrainer, "_save_checkpoint", save)
    runs("write", save_steps=1, eval_steps=4, load_best_model_at_end=False)
    assert there == [12, 8, 4, 1, 0]


def test_a_row_of_two_sets_that_only_one_cache_holds_comes_into_the_other(runs: Runs) -> None:
    """As where a run is killed after it wrote the first of two."""
    shared = Dataset.from_list([*runs.texts[1], runs.texts[0][0]])
    runs.texts = (runs.texts[0], shared)
    plain = runs("write")
    of_held_out = min(runs.shards(), key=lambda path: path.stat().st_size)
    of_held_out.unlink()
    assert same(plain, runs("auto")) and same(plain, runs("read"))


def test_an_interrupted_run_leaves_what_it_wrote(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = runs("off")
    hidden, after = runs.target.hidden, 4

    def interrupted(*args: Any, **kwargs: Any) -> Tensor:
        if runs.forwards == after:
            raise KeyboardInterrupt
        return hidden(*args, **kwargs)

    monkeypatch.setattr(runs.target, "hidden", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runs("write")
    monkeypatch.setattr(runs.target, "hidden", hidden)
    assert len(runs.shards()) == 1
    with pytest.raises(ValueError, match=r"lacks 4 of 15 rows: fill it with hidden_cache auto"):
        runs("read")
    assert same(plain, runs("auto"))
    assert runs.forwards == (5 + 3 + 1) - (after - 1)
    assert same(plain, runs("read"))
