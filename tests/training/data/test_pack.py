"""Packed rows: full, and in nothing different from their documents alone."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, RwkvConfig, TrainingArguments

from medusa_heads.config import HeadsConfig
from medusa_heads.heads import new_heads
from medusa_heads.target.target import TargetModel
from medusa_heads.training.data import pack
from medusa_heads.training.data.columns import collate
from medusa_heads.training.data.pack import (
    best_fit,
    check_packing,
    hidden_of,
    pack_batch,
)
from medusa_heads.training.runs.heads_trainer import HeadsTrainer
from tests.elsewhere import WithoutFloat64
from tests.inference.recurrent import KINDS, tiny_target
from tests.pairs import alternately, with_slow
from tests.training.packing import packed_rows

Rows = Callable[..., Dataset]

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": 6,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def small(kind: str, **changed: Any) -> TargetModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SMALL, **changed})
    model = AutoModelForCausalLM.from_config(config, dtype="float32")
    target = TargetModel(model)
    target.freeze()
    return target


def uneven_rows(make_rows: Rows) -> Dataset:
    return Dataset.from_list(
        [
            row
            for i, length in enumerate((9, 5, 21, 14, 3, 30, 7))
            for row in make_rows(1, length, 2, i)
        ]
    )


def test_items_go_where_the_least_room_is_left() -> None:
    # 7 and 6 open bins of 10; 4 fits the second exactly, 3 the first exactly, then 2 opens a third.
    assert best_fit([4, 7, 2, 6, 3], 10).to_pylist() == [[0, 3], [1, 4], [2]]
    assert best_fit([12, 3, 10], 10).to_pylist() == [[0], [1], [2]]
    assert best_fit([], 10).to_pylist() == []


def test_every_item_is_packed_once_and_bins_are_nearly_full() -> None:
    draw = random.Random(0)
    lengths = [draw.randint(1, 400) for _ in range(2000)]
    bins = best_fit(lengths, 512).to_pylist()
    assert sorted(item for items in bins for item in items) == list(range(2000))
    assert all(sum(lengths[item] for item in items) <= 512 for items in bins)
    assert sum(lengths) / (len(bins) * 512) > 0.99


def test_positions_begin_anew_with_each_document() -> None:
    rows = Dataset.from_list(
        [
            {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "document": 0},
            {"input_ids": [4, 5], "labels": [4, 5], "document": 1},
            {"input_ids": [6, 7, 8, 9], "labels": [6, 7, 8, 9], "document": 2},
        ]
    )
    packed = packed_rows(rows, 5)
    assert [{name: values.tolist() for name, values in row.items()} for row in packed] == [
        {
            "input_ids": [1, 2, 3, 4, 5],
            "labels": [-100, 2, 3, 4, 5],
            "position_ids": [0, 1, 2, 0, 1],
        },
        {"input_ids": [6, 7, 8, 9], "labels": [6, 7, 8, 9], "position_ids": [0, 1, 2, 3]},
    ]
    columns = {name: rows[name][:] for name in ("input_ids", "labels")}
    again = {name: [v.tolist() for v in column] for name, column in packed[:].items()}
    assert pack_batch(columns, 5) == again


def at_once(target: TargetModel, inputs: dict[str, Tensor]) -> Tensor:
    """Packed rows as transformers alone would keep their documents apart."""
    return target.hidden(inputs["input_ids"], None, inputs["position_ids"])


# Their layers are of kinds that others have too.
ALIKE = ("qwen2", "qwen3", "bamba", "granitemoehybrid", "olmo_hybrid", "qwen3_5_text")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind in ALIKE else ())
        for kind in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "gpt2", *KINDS)
    ],
)
def test_hidden_states_are_those_of_each_document_alone(kind: str, make_rows: Rows) -> None:
    target = tiny_target(kind) if kind in KINDS else small(kind)
    check_packing(target)
    rows = uneven_rows(make_rows)
    packed = packed_rows(rows, 40)
    assert len(packed) == 3
    batch = collate(list(packed))
    hidden_BTD = hidden_of(target, batch)
    found = {}
    for b, row in enumerate(packed):
        starts = [t for t, position in enumerate(row["position_ids"]) if position == 0]
        for start, end in zip(starts, [*starts[1:], len(row["input_ids"])], strict=True):
            found[tuple(row["input_ids"][start:end])] = hidden_BTD[b, start:end]
    for row in rows:
        alone_BTD = target.hidden(torch.tensor([row["input_ids"]]))
        torch.testing.assert_close(
            found[tuple(row["input_ids"])], alone_BTD[0], rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("kind", with_slow(KINDS[3::4], KINDS[:3] + KINDS[4:7]))
def test_a_state_that_runs_on_into_the_next_document_is_caught(kind: str) -> None:
    with pytest.raises(
        ValueError, match=rf"see each other in this target \({kind}, .*leave packing"
    ):
        check_packing(tiny_target(kind), at_once)


def test_a_target_that_keeps_its_state_by_itself_is_refused_by_name() -> None:
    torch.manual_seed(0)
    config = RwkvConfig(vocab_size=61, hidden_size=16, num_hidden_layers=2, context_length=64)
    target = TargetModel(AutoModelForCausalLM.from_config(config))
    with pytest.raises(ValueError, match=r"see each other in this target \(rwkv, "):
        check_packing(target)


def test_documents_of_all_lengths_are_read_with_little_padding() -> None:
    target, read = tiny_target("qwen3_5_text"), []
    lengths = [[40, 1, 3, 20], [19, 30, 15], [64]]
    positions_BT = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    ids_BT = torch.randint(1, 190, positions_BT.shape)

    class Counting(TargetModel):
        def hidden(self, input_ids_BT: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            read.append(tuple(input_ids_BT.shape))
            return super().hidden(input_ids_BT, *args, **kwargs)

    view = Counting(target.model)
    hidden_BTD = hidden_of(view, {"input_ids": ids_BT, "position_ids": positions_BT})
    assert read == [(2, 64), (4, 30), (1, 3), (1, 1)]  # no row is more than half padding
    for b, row in enumerate(lengths):
        for ids, found in zip(ids_BT[b].split(row), hidden_BTD[b].split(row), strict=True):
            torch.testing.assert_close(found, target.hidden(ids[None])[0], rtol=1e-4, atol=1e-4)


def test_half_precision_is_not_taken_for_a_leak() -> None:
    target = small("llama")
    target.model.bfloat16()
    check_packing(target)


class Seeing(TargetModel):
    """Passes a mask of ones, by which transformers takes a row for one document."""

    def hidden(self, input_ids_BT: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().hidden(input_ids_BT, torch.ones_like(input_ids_BT), *args[1:], **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_leak_is_not_taken_for_half_precision(dtype: torch.dtype) -> None:
    model: Any = small("llama").model
    model.to(dtype)
    check_packing(TargetModel(model))
    with pytest.raises(ValueError, match="packed documents would see each other"):
        check_packing(Seeing(model))


@pytest.mark.parametrize(
    ("kind", "of"),
    alternately(("medusa", "hydra", "prefix", "block", "eagle3"), ("qwen3_5_text", "llama")),
)
def test_training_on_packed_rows_is_training_on_their_documents(
    kind: str, of: str, make_rows: Rows, tmp_path: Path
) -> None:
    """The same loss and gradients, in one batch of fewer rows."""
    target = small("llama") if of == "llama" else tiny_target(of)
    rows = uneven_rows(make_rows)
    config = HeadsConfig(
        kind="hydra" if kind == "prefix" else kind,  # type: ignore[arg-type]
        num_heads=3,
        vocab_matrix="own",
        prefix_attention=kind == "prefix",
    )
    args = TrainingArguments(
        output_dir=str(tmp_path), report_to="none", use_cpu=True, remove_unused_columns=False
    )
    outcomes = []
    for table in (rows, packed_rows(rows, 40)):
        torch.manual_seed(0)
        heads = new_heads(target, config)
        with torch.no_grad():  # fresh heads start where nothing depends on the context
            for parameter in heads.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        trainer = HeadsTrainer(heads, target, args, rows)
        loss = trainer.compute_loss(trainer.model_wrapped, collate(list(table)))
        loss.backward()
        grads = {name: parameter.grad for name, parameter in heads.named_parameters()}
        outcomes.append((loss, grads))
    (loose, loose_grads), (packed, packed_grads) = outcomes
    torch.testing.assert_close(packed, loose, rtol=1e-5, atol=1e-6)
    for name, grad in loose_grads.items():
        assert grad is not None and grad.abs().max() > 0, name
        torch.testing.assert_close(packed_grads[name], grad, rtol=1e-4, atol=1e-6)


def test_hidden_states_are_compared_where_no_device_has_double_precision() -> None:
    states_TD = torch.ones(3, 4, device="meta")
    with WithoutFloat64():
        assert pack._relative_error(states_TD, states_TD).device.type == "cpu"
