"""Least squares where each head reads something for itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from medusa_heads.config import HeadsConfig
from medusa_heads.heads import DraftHeads, new_heads
from medusa_heads.target.target import TargetModel
from medusa_heads.training.data.pack import hidden_of
from medusa_heads.training.loss.beside import RIDGE
from medusa_heads.training.loss.least_squares import fit_linear
from tests.conftest import TinyLlama

K, WIDTH, LENGTH, PROMPT = 3, 64, 40, 5
KINDS: dict[str, dict[str, Any]] = {"hydra": {"kind": "hydra"}, "medusa": {"linear_shortcut": True}}


@pytest.fixture
def target(tiny_llama: TinyLlama) -> TargetModel:
    target = TargetModel(tiny_llama())
    target.freeze()
    return target


def text() -> dict[str, Tensor]:
    """Rows whose later half is much like the earlier one."""
    generator = torch.Generator().manual_seed(0)
    once_BT = torch.randint(0, 199, (12, LENGTH // 2), generator=generator)
    ids_BT = torch.cat([once_BT, once_BT], dim=1)
    ids_BT[:, ::7] = torch.randint(0, 199, ids_BT[:, ::7].shape, generator=generator)
    labels_BT = ids_BT.clone()
    labels_BT[:, :PROMPT] = -100
    return {"input_ids": ids_BT, "labels": labels_BT}


def fresh(target: TargetModel, kind: str) -> DraftHeads:
    return new_heads(target, HeadsConfig(num_heads=K, induction=True, **KINDS[kind]))


@torch.no_grad()
def expected_map(target: TargetModel, heads: DraftHeads, head: int, ids_BT: Tensor) -> Tensor:
    """By ridge regression of augmented rows, which shares nothing with sums and their triangles:
    of 1, h_t, the tokens that the head or the layer before it reads, and what followed."""
    read, made = [], []
    for ids_T in ids_BT:
        hidden_TD = target.hidden(ids_T[None])[0]
        following_TD = heads.embed(F.pad(ids_T[1:], (0, 1)))
        own_TV = heads.prefix.followed(hidden_TD[None], following_TD[None])[0, :, head]
        for t in range(PROMPT - 1, LENGTH - K - 1):
            tokens = ids_T[t + 1 : t + 2 + head * heads.reads_drafts]
            parts = torch.ones(1), hidden_TD[t], heads.embed(tokens).flatten(), own_TV[t]
            read.append(torch.cat(parts))
            made.append(hidden_TD[t + 1 + head])
    read_RC, made_RD = torch.stack(read).double(), torch.stack(made).double()
    columns = read_RC.shape[1]
    ridge_C = (read_RC.square().sum(dim=0) * RIDGE * columns / len(read_RC)).sqrt()
    zeros_CD = torch.zeros(columns, WIDTH, dtype=torch.float64)
    rows = torch.cat([read_RC, ridge_C.diag()]), torch.cat([made_RD, zeros_CD])
    solution: Tensor = torch.linalg.lstsq(*rows).solution
    return solution


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_maps_are_those_of_ridge_regression(
    target: TargetModel, kind: str, packed: bool
) -> None:
    heads, whole = fresh(target, kind), text()
    given = whole
    if packed:
        given = {name: part_BT.reshape(6, 2 * LENGTH) for name, part_BT in whole.items()}
        given["position_ids"] = torch.arange(LENGTH).repeat(6, 2)
    rows = 12 * (LENGTH - K - PROMPT)
    assert fit_linear(heads, [(hidden_of(target, given), given)]) == rows
    for i, head in enumerate(heads.heads()):
        expected_CD = expected_map(target, heads, i, whole["input_ids"])
        linear = head[0].res_connection
        read = linear.in_features
        near: Any = {"rtol": 2e-3, "atol": 2e-4}
        torch.testing.assert_close(linear.weight.double().T, expected_CD[1 : 1 + read], **near)
        torch.testing.assert_close(linear.bias.double(), expected_CD[0], **near)
        own_VD = heads.prefix.matrices[i].double()
        torch.testing.assert_close(own_VD, expected_CD[-2 * WIDTH :], **near)
        assert float(own_VD.abs().max()) > 0.01


def test_texts_with_states_that_are_not_finite_are_left_out(target: TargetModel) -> None:
    heads, whole = fresh(target, "hydra"), text()
    hidden_BTD = hidden_of(target, whole)
    hidden_BTD[3, 20] = torch.inf
    assert fit_linear(heads, [(hidden_BTD, whole)]) == 11 * (LENGTH - K - PROMPT)
    assert all(parameter.isfinite().all() for parameter in heads.parameters())
