"""Training from the cache: the same weights, without the target."""

from __future__ import annotations

import math
import shutil
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils.data import get_worker_info

from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.hidden import prepare
from medusa_heads.training.hidden import states as hidden_states
from medusa_heads.training.hidden.layout import Index, Layout, drawn_order
from medusa_heads.training.hidden.states import ShardLocalOrder
from tests.training.cache_runs import SHAPES, Runs, same
from tests.training.packing import packed_rows

ONCE = 5 + 3 + 1  # batches of both sets, and a token for the dtype
KEPT = 9 * 20 - 6 + 6 * 20 + 3 * 20 + 2 * 29


# Features are read packed, and in fp8, below.
ALIKE = tuple(name for name in SHAPES if name != "medusa")


@pytest.mark.parametrize(
    "shape",
    [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in SHAPES],
)
def test_weights_are_bitwise_the_same_and_the_target_does_not_run(shape: str, runs: Runs) -> None:
    runs.shape = SHAPES[shape]
    plain = runs("off")
    plain_loss = runs.eval_loss
    # A second "auto" finds all there, whatever the shape is.
    again = [("auto", 1)] if shape == "medusa" else []
    for mode, forwards in (("auto", ONCE), *again, ("read", 0)):
        assert same(plain, runs(mode)), mode
        assert runs.eval_loss == plain_loss
        assert runs.forwards == forwards


def test_weights_are_bitwise_the_same_from_many_shards(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = runs("off")
    monkeypatch.setattr(prepare, "SHARD_BYTES", 20 * 16 * 4 * 4)  # about a batch
    assert same(plain, runs("auto")) and same(plain, runs("read"))
    assert len(runs.shards()) == 5 + 2


@pytest.mark.parametrize(
    "head_weights", [pytest.param("decay", marks=pytest.mark.slow), "acceptance"]
)
def test_the_target_teaches_from_the_cache(head_weights: Any, runs: Runs) -> None:
    runs.objective = LossConfig({"forward_kl": 1.0, "acceptance": 0.5}, head_weights=head_weights)
    plain = runs("off")
    assert same(plain, runs("auto")) and same(plain, runs("read"))
    assert runs.forwards == 0


@pytest.mark.slow
def test_no_epoch_runs_the_target(runs: Runs) -> None:
    three: dict[str, Any] = {"num_train_epochs": 3}
    plain = runs("off", **three)
    judged = 4  # batches of the first steps, by which the text is judged
    assert runs.forwards == 3 * (5 + 3) + 3 + 3 + judged  # also evaluated and calibrated once
    cached = runs("auto", **three)
    assert runs.forwards == ONCE
    for name, tensor in plain.items():
        torch.testing.assert_close(cached[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_bf16_target_is_kept_in_bf16(runs: Runs) -> None:
    runs.target.model.to(torch.bfloat16)  # type: ignore[arg-type]
    plain = runs("off")
    assert same(plain, runs("auto")) and same(plain, runs("read"))
    indexes = [Index.read(path.parent) for path in runs.folder.glob("cache/*/index.bin")]
    assert [index.stored for index in indexes] == [torch.bfloat16] * 2
    size = sum(path.stat().st_size for path in runs.shards())
    assert 0 < size - KEPT * 16 * 2 < 1024  # a header for each shard, 20 bytes for each row


@pytest.mark.parametrize("shape", [pytest.param("medusa", marks=pytest.mark.slow), "features"])
def test_fp8_takes_a_byte_and_changes_the_loss_little(shape: str, runs: Runs) -> None:
    runs.shape = SHAPES[shape]
    layers = 1 + len(runs.shape.features or ())
    plain = runs("off", num_train_epochs=3)
    loss = runs.eval_loss
    cached = runs("auto", num_train_epochs=3, stored_in="float8_e4m3fn")
    assert not same(plain, cached)
    assert math.isclose(runs.eval_loss, loss, rel_tol=5e-3)
    size = sum(path.stat().st_size for path in runs.shards())
    assert 0 < size - KEPT * (16 + 4) * layers < 1024
    with pytest.raises(ValueError, match=r"differs in stored_in\)"):
        runs("read")


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
    facts, of_held_out = (
        check_rows(part, runs.target, name="set", heads_reached=1) for part in runs.texts
    )
    data = TrainingData(packed_rows(known, 48), held_out, known, facts, of_held_out, [])
    runs.texts = (data, held_out)
    runs.objective = LossConfig({"cross_entropy": 0.5, "forward_kl": 0.5})
    plain = runs("off")
    assert same(plain, runs("auto")) and same(plain, runs("read"))
    assert runs.forwards == 0
    runs.texts = (TrainingData(packed_rows(known, 64), *runs_parts(data)), held_out)
    with pytest.raises(ValueError, match=r"differs in rows and rows_sha256\)"):
        runs("read")


def runs_parts(data: Any) -> tuple[Any, ...]:
    return data.held_out, data.known_rows, data.facts, data.held_out_facts, []


@pytest.mark.slow
def test_workers_read_ahead(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = runs("off")
    assert same(plain, runs("auto", further={"dataloader_num_workers": 2}))
    assert runs.forwards == ONCE
    read, by_main = hidden_states.read_batch, []

    def watched(*args: Any) -> Any:
        if get_worker_info() is None:
            by_main.append(args)
        return read(*args)

    monkeypatch.setattr(hidden_states, "read_batch", watched)
    assert same(plain, runs("read", further={"dataloader_num_workers": 2}))
    assert len(by_main) == 3  # the calibration, which has no data loader


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(runs: Runs) -> None:
    saved: dict[str, Any] = {"num_train_epochs": 2, "save_steps": 3, "save_total_limit": None}
    whole = runs("auto", output="kept", **saved)
    for number in (6, 9, 10):
        shutil.rmtree(runs.folder / "kept" / f"checkpoint-{number}")
    assert same(whole, runs("read", output="kept", resume="last", **saved))


@pytest.mark.parametrize("rows_per_shard", [4, 7, 40])
def test_each_pass_reads_shard_after_shard(rows_per_shard: int) -> None:
    layout = Layout(40, 1, rows_per_shard, seed=3, dtype="float32")
    place_of = {row: place for place, row in enumerate(layout.order().tolist())}
    order = ShardLocalOrder(layout, seed=3)
    passes = []
    for epoch in range(3):
        order.set_epoch(epoch)
        passes.append(list(order))
        shards = [place_of[row] // rows_per_shard for row in passes[-1]]
        assert sorted(passes[-1]) == list(range(40)) and len(order) == 40
        assert sum(a != b for a, b in pairwise(shards)) == layout.shards - 1
    assert passes[0] == layout.order().tolist()
    assert passes[1] != passes[2] != passes[0]
    if rows_per_shard == 40:  # in one shard it is the order of a run without a cache
        assert passes[1] == drawn_order(40, 4).tolist()
