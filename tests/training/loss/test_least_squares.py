"""Linear shortcuts begin with the maps that a solver finds for all pairs written out by hand."""

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
from medusa_heads.training.loss.beside import RIDGE
from medusa_heads.training.loss.heads import batch_loss
from medusa_heads.training.loss.least_squares import (
    DECAY,
    RIDGE_OF_SHARED,
    begins_with_least_squares,
    columns,
    fit_linear,
)
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


PartsOf = Callable[[Tensor], list[Tensor]]


def states(hidden_TD: Tensor) -> list[Tensor]:
    return [hidden_TD]


def pairs(
    target: TargetModel,
    heads: DraftHeads,
    head: int,
    tokens: int,
    documents: list[Tensor],
    parts_of: PartsOf,
) -> tuple[Tensor, Tensor]:
    """What a head reads and what it should make of it, position by position, of whole documents
    whose first five tokens are a prompt."""
    read, made = [], []
    for ids_T in documents:
        hidden_TD = target.hidden(ids_T[None])[0]
        parts = parts_of(hidden_TD)
        for t in range(4, len(ids_T) - K - 1):
            row = [torch.ones(1), *(part_TD[t] for part_TD in parts)]
            if tokens:
                row.append(heads.embed(ids_T[t + 1 : t + 1 + tokens]).flatten())
            read.append(torch.cat(row))
            made.append(hidden_TD[t + 1 + head])
    return torch.stack(read).double(), torch.stack(made).double()


def expected_maps(
    target: TargetModel,
    heads: DraftHeads,
    tokens: list[int],
    documents: list[Tensor],
    parts_of: PartsOf = states,
) -> list[Tensor]:
    """Of each head by ridge regression of augmented rows, which shares nothing with sums and their
    triangles: the map of 1, of h_t and what else is there at t, and of as many tokens as it reads,
    [C, D]."""
    maps = []
    for i, read_tokens in enumerate(tokens):
        read_RC, made_RD = pairs(target, heads, i, read_tokens, documents, parts_of)
        most = read_RC.shape[1] + WIDTH * (max(tokens) - read_tokens)
        ridge_CC = (read_RC.square().sum(dim=0) * RIDGE * most / len(read_RC)).sqrt().diag()
        zeros_CD = torch.zeros(len(ridge_CC), WIDTH, dtype=torch.float64)
        augmented = torch.cat([read_RC, ridge_CC]), torch.cat([made_RD, zeros_CD])
        maps.append(torch.linalg.lstsq(*augmented).solution)
    return maps


def shared(maps: list[Tensor], of_other: slice) -> Tensor:
    """The weight of what a layer adds to h_t, by which the heads' maps of that come closest to
    their maps of something else, [D, D]."""
    stacked_XD = torch.cat([map_CD[1 : 1 + WIDTH].T for map_CD in maps])
    ridge = (RIDGE_OF_SHARED * stacked_XD.square().sum() / WIDTH).sqrt()
    stacked_XD = torch.cat([stacked_XD, ridge * torch.eye(WIDTH, dtype=torch.float64)])
    wanted = [map_CD[of_other].T for map_CD in maps] + [torch.zeros(WIDTH, WIDTH).double()]
    return torch.linalg.lstsq(stacked_XD, torch.cat(wanted)).solution


def behind_attention(
    target: TargetModel, heads: DraftHeads, tokens: list[int], documents: list[Tensor]
) -> tuple[Tensor, PartsOf]:
    """What attention's output begins with [D, D], and h_t with what it adds to that: nothing, where
    maps of one half of the documents make less of the other half with what is mixed."""

    def with_mixed(hidden_TD: Tensor) -> list[Tensor]:
        with torch.no_grad():
            mixed_BATE = heads.prefix.mix(hidden_TD[None])
        return [hidden_TD, mixed_BATE[0].transpose(0, 1).flatten(1)]

    halves, errors = (documents[::2], documents[1::2]), []
    for parts_of in (with_mixed, states):
        error = 0.0
        for learnt, other in (halves, halves[::-1]):
            (map_CD,) = expected_maps(target, heads, [1], learnt, parts_of)
            read_RC, made_RD = pairs(target, heads, 0, 1, other, parts_of)
            error += float((read_RC @ map_CD - made_RD).square().sum())
        errors.append(error)
    out_DD = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    if errors[0] < errors[1]:
        maps = expected_maps(target, heads, tokens, documents, with_mixed)
        counted = [DECAY**i * map_CD for i, map_CD in enumerate(maps)]
        out_DD = shared(counted, slice(1 + WIDTH, 1 + 2 * WIDTH))

    def added(hidden_TD: Tensor) -> list[Tensor]:
        state_TD, mixed_TD = with_mixed(hidden_TD)
        return [state_TD + mixed_TD @ out_DD.T.float()]

    return out_DD, added


def check(target: TargetModel, heads: DraftHeads, documents: list[Tensor]) -> None:
    tokens = [1, 2, 3]
    parts_of: PartsOf = states
    if heads.prefix is not None:
        out_DD, parts_of = behind_attention(target, heads, tokens, documents)
        assert_near(heads.prefix.attention_out.weight.double(), out_DD)
    for i, expected_CD in enumerate(expected_maps(target, heads, tokens, documents, parts_of)):
        assert_near(found_map(heads, i), expected_CD)


def found_map(heads: DraftHeads, head: int) -> Tensor:
    linear = list(heads.heads())[head][0].res_connection
    return torch.cat([linear.bias[None], linear.weight.T]).double()


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("settings", [{}, {"prefix_attention": True}, {"features": [1]}])
def test_the_maps_are_those_of_ridge_regression(
    target: TargetModel, settings: dict[str, Any]
) -> None:
    torch.manual_seed(4)  # to what the layer attends: of one in three such nothing tells more
    heads, whole = fresh(target, **settings), text()
    reads = target.with_features(heads.config.features)
    halves = [{name: part_BT[at] for name, part_BT in whole.items()} for at in HALVES]
    assert fit_linear(heads, [read(reads, half) for half in halves]) == 12 * (32 - K - 5)
    assert heads.prefix is None or heads.prefix.attention_out.weight.any()
    check(target, heads, list(whole["input_ids"]))


@pytest.mark.parametrize("prefix_attention", [False, True])
def test_medusa_heads_get_their_share(target: TargetModel, prefix_attention: bool) -> None:
    """Without a layer before them maps of h_t alone. With one, maps of h_t beside token t + 1; what
    they should make of the token, the layer hands to all of them as well as it can. What attention
    mixes of this text tells nothing."""
    settings: Any = {"linear_shortcut": True, "prefix_attention": prefix_attention}
    heads, whole = new_heads(target, HeadsConfig(num_heads=K, **settings)), text(60)
    fit_linear(heads, [read(target, whole)])
    tokens, documents = [int(prefix_attention)] * K, list(whole["input_ids"])
    parts_of: PartsOf = states
    if prefix_attention:
        out_DD, parts_of = behind_attention(target, heads, tokens, documents)
        assert not out_DD.any() and not heads.prefix.attention_out.weight.any()
    maps = expected_maps(target, heads, tokens, documents, parts_of)
    for i, expected_CD in enumerate(maps):
        assert_near(found_map(heads, i), expected_CD[: 1 + WIDTH])
    if prefix_attention:
        token_DD = shared(maps, slice(1 + WIDTH, None))
        assert_near(heads.prefix.token.weight.double(), token_DD)


def test_heads_without_a_shortcut_have_no_such_beginning(target: TargetModel) -> None:
    for config in (HeadsConfig(), HeadsConfig(kind="eagle3"), HeadsConfig(kind="block")):
        assert not begins_with_least_squares(new_heads(target, config))


def test_no_pair_crosses_from_one_packed_document_into_the_next(target: TargetModel) -> None:
    heads, whole = fresh(target), text()
    packed = {name: part_BT.reshape(6, 64) for name, part_BT in whole.items()}
    packed["position_ids"] = torch.arange(32).repeat(6, 2)
    fit_linear(heads, [(hidden_of(target, packed), packed)])
    check(target, heads, list(whole["input_ids"]))


def test_states_that_are_not_finite_are_left_out(target: TargetModel) -> None:
    """A row reads one state and is taught K: none of them may be lost."""
    heads, whole = fresh(target), text()
    hidden_BTD, _ = read(target, whole)
    hidden_BTD[3, 20], hidden_BTD[8, -2] = torch.nan, torch.inf
    rows = 12 * (32 - K - 5)
    assert fit_linear(heads, [(hidden_BTD, whole)]) == rows - (K + 1) - 1
    assert all(parameter.isfinite().all() for parameter in heads.parameters())


def test_fitted_heads_know_more_than_fresh_ones(target: TargetModel) -> None:
    heads, whole = fresh(target), text(40)
    hidden_BTD = target.hidden(whole["input_ids"])
    before = batch_loss(heads, hidden_BTD, whole, objective=LossConfig())
    fit_linear(heads, [(hidden_BTD, whole)])
    assert batch_loss(heads, hidden_BTD, whole, objective=LossConfig()) < before


def test_little_text_leaves_heads_as_they_are(target: TargetModel) -> None:
    heads = fresh(target)
    assert columns(heads) / 2 > 4 * 24
    assert fit_linear(heads, [read(target, text(4))]) == 0
    before = fresh(target).state_dict()
    assert all(torch.equal(found, before[name]) for name, found in heads.state_dict().items())


def test_training_begins_with_them(
    target: TargetModel, make_rows: Callable[..., Dataset], tmp_path: Path
) -> None:
    """By a run whose rate moves nothing: its heads are those that all of its rows make."""
    run: dict[str, Any] = {
        "max_steps": 24,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-12,
    }
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
    assert fit_linear(expected, [read(target, inputs)]) == 40 * 17
    for name, tensor in heads.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], rtol=1e-3, atol=1e-4)
