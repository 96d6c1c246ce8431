"""Sequential heads begin with the maps that a solver finds for all pairs written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from medusa_heads.config import IGNORED, HeadsConfig
from medusa_heads.heads import DraftHeads, new_heads
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.arguments.training import OptimisationArguments, to_training_arguments
from medusa_heads.training.data.pack import hidden_of
from medusa_heads.training.loss.heads import batch_loss
from medusa_heads.training.loss.least_squares import RIDGE, columns, fit_linear
from medusa_heads.training.runs.heads import train_heads
from tests.conftest import TinyLlama

K, WIDTH = 3, 64
HALVES = (slice(0, 5), slice(5, 12))


@pytest.fixture
def target(tiny_llama: TinyLlama) -> TargetModel:
    target = TargetModel(tiny_llama())
    target.freeze()
    return target


def fresh(target: TargetModel, **settings: Any) -> DraftHeads:
    return new_heads(target, HeadsConfig(kind="hydra", num_heads=K, **settings))


def text(rows: int = 12, length: int = 32) -> dict[str, Tensor]:
    """Rows of a prompt and what is learnt behind it."""
    ids_BT = torch.randint(0, 199, (rows, length), generator=torch.Generator().manual_seed(0))
    labels_BT = ids_BT.clone()
    labels_BT[:, :5] = IGNORED
    return {"input_ids": ids_BT, "labels": labels_BT}


def read(target: TargetModel, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    return target.hidden(inputs["input_ids"]), inputs


def pairs(target: TargetModel, heads: DraftHeads, head: int, documents: list[Tensor]) -> Any:
    """What a head reads and what it should make of it, position by position, of whole documents
    whose first five tokens are a prompt."""
    read, made = [], []
    for ids_T in documents:
        hidden_TD = target.hidden(ids_T[None])[0]
        embedded_TD = heads.embed(ids_T)
        for t in range(4, len(ids_T) - K - 1):
            tokens = embedded_TD[t + 1 : t + 2 + head].flatten()
            read.append(torch.cat([torch.ones(1), hidden_TD[t], tokens]))
            made.append(hidden_TD[t + 1 + head])
    return torch.stack(read).double(), torch.stack(made).double()


def check(target: TargetModel, heads: DraftHeads, documents: list[Tensor]) -> None:
    """Ridge regression by augmented rows, which shares nothing with sums and their triangles."""
    for i, head in enumerate(heads.heads()):
        read_RC, made_RD = pairs(target, heads, i, documents)
        share = RIDGE * columns(heads) / len(read_RC)
        ridge_CC = (read_RC.square().sum(dim=0) * share).sqrt().diag()
        zeros_CD = torch.zeros(len(ridge_CC), WIDTH, dtype=torch.float64)
        expected_CD = torch.linalg.lstsq(
            torch.cat([read_RC, ridge_CC]), torch.cat([made_RD, zeros_CD])
        ).solution
        linear = head[0].res_connection
        found_CD = torch.cat([linear.bias[None], linear.weight.T]).double()
        torch.testing.assert_close(found_CD, expected_CD, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("settings", [{}, {"prefix_attention": True}, {"features": [1]}])
def test_the_maps_are_those_of_ridge_regression(
    target: TargetModel, settings: dict[str, Any]
) -> None:
    heads, whole = fresh(target, **settings), text()
    reads = target.with_features(heads.config.features)
    halves = [{name: part_BT[at] for name, part_BT in whole.items()} for at in HALVES]
    assert fit_linear(heads, [read(reads, half) for half in halves], 10_000) == 12 * (32 - K - 5)
    check(target, heads, list(whole["input_ids"]))


def test_no_pair_crosses_from_one_packed_document_into_the_next(target: TargetModel) -> None:
    heads, whole = fresh(target), text()
    packed = {name: part_BT.reshape(6, 64) for name, part_BT in whole.items()}
    packed["position_ids"] = torch.arange(32).repeat(6, 2)
    fit_linear(heads, [(hidden_of(target, packed), packed)], 10_000)
    check(target, heads, list(whole["input_ids"]))


def test_text_is_read_until_there_is_enough(target: TargetModel) -> None:
    batches = [read(target, text(4))] * 5
    assert fit_linear(fresh(target), batches, 4 * 24 + 1) == 2 * 4 * 24


def test_fitted_heads_know_more_than_fresh_ones(target: TargetModel) -> None:
    heads, whole = fresh(target), text(40)
    hidden_BTD = target.hidden(whole["input_ids"])
    before = batch_loss(heads, hidden_BTD, whole, objective=LossConfig())
    fit_linear(heads, [(hidden_BTD, whole)], 10_000)
    assert batch_loss(heads, hidden_BTD, whole, objective=LossConfig()) < before


def test_little_text_leaves_heads_as_they_are(target: TargetModel) -> None:
    heads = fresh(target)
    assert fit_linear(heads, [read(target, text(4))], 10_000) == 4 * 24 < columns(heads) / 2
    before = fresh(target).state_dict()
    assert all(torch.equal(found, before[name]) for name, found in heads.state_dict().items())


def test_training_begins_with_them(
    target: TargetModel, make_rows: Callable[..., Dataset], tmp_path: Path
) -> None:
    """By a run whose rate moves nothing: its heads are those that all of its rows make."""
    run = {"max_steps": 24, "per_device_train_batch_size": 8, "learning_rate": 1e-12}
    args = OptimisationArguments(**run, output_dir=str(tmp_path), training_args={"use_cpu": True})
    heads = train_heads(
        target,
        make_rows(40),
        eval_dataset=make_rows(8, seed=7),
        config=HeadsConfig(kind="hydra", num_heads=K),
        output_dir=tmp_path,
        training_args=to_training_arguments(args, "shared"),
    )
    expected, rows = fresh(target), make_rows(40).with_format("torch")
    inputs = {name: rows[:][name] for name in ("input_ids", "labels")}
    assert fit_linear(expected, [read(target, inputs)], 10_000) == 40 * 17
    for name, tensor in heads.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], rtol=1e-3, atol=1e-4)
