"""Calibration: the true temperature is found, dynamic trees are counted as they are walked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import TrainingArguments

from medusa_heads import HeadsConfig, MedusaHeads, TargetModel, train_heads
from medusa_heads.checkpoint.stored_heads import read_sidecar
from medusa_heads.config import HeadsKind
from medusa_heads.heads import new_heads
from medusa_heads.training.hidden.states import HiddenStates
from medusa_heads.training.measure import calibration
from medusa_heads.training.measure.calibration import calibrate, measure_heads
from medusa_heads.trees.statistics import HeadStatistics
from tests.conftest import TinyLlama
from tests.pairs import alternately, with_slow


@pytest.mark.parametrize("temperature", [0.7, 1.6])
def test_the_true_temperature_is_found(tiny_llama: TinyLlama, temperature: float) -> None:
    """The head's predictions are constant, and the text is drawn from them at a temperature."""
    model = tiny_llama(vocab_size=32)
    target = TargetModel(model)
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=1, vocab_matrix="own"))
    generator = torch.Generator().manual_seed(1)
    logits_V = torch.randn(32, generator=generator) * 1.5
    with torch.no_grad():
        heads.get_parameter("0.1.weight").zero_()
        heads.get_submodule("0.1").bias = torch.nn.Parameter(logits_V.clone())
    probs_V = (logits_V / temperature).softmax(-1)
    ids = torch.multinomial(probs_V, 120 * 40, replacement=True, generator=generator).view(120, 40)
    rows = Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()})
    statistics = HeadStatistics.from_ranks(torch.zeros(4, 1, dtype=torch.long))
    calibrate(statistics, heads, HiddenStates(target), rows)
    assert statistics.temperatures[0] == pytest.approx(temperature, rel=0.12)


def test_of_equally_likely_tokens_one_is_drafted_first(tiny_llama: TinyLlama) -> None:
    """In bf16 many logits are equal. A head that takes two tokens for equally likely, which they
    are, is right every second time, and not always."""
    target = TargetModel(tiny_llama(vocab_size=32))
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=1, vocab_matrix="own"))
    logits_V = torch.full((32,), -30.0)
    logits_V[[5, 9]] = 1.0
    with torch.no_grad():
        heads.get_parameter("0.1.weight").zero_()
        heads.get_submodule("0.1").bias = torch.nn.Parameter(logits_V)
    some = torch.randint(2, (8, 64), generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([5, 9])[some].tolist()
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
    statistics, (honest,) = measure_heads(heads, HiddenStates(target), rows)
    (found,) = honest["before"]["bins"]
    assert found["accuracy"] == pytest.approx(statistics.top_k_accuracy(1)[0])
    assert honest["before"]["expected_error"] < 0.1


def test_a_child_that_ignores_its_parent_is_not_calibrated(tiny_llama: TinyLlama) -> None:
    """Each token says which two may follow it. Heads that know are honest; the same heads, asked
    without the token before, are not."""
    target = TargetModel(tiny_llama(vocab_size=32))
    config = HeadsConfig(num_heads=2, vocab_matrix="own", correction_rank=32)
    heads = MedusaHeads.from_target(target, config)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(32, (1, 600), generator=generator).expand(8, -1).clone()
    for t in range(1, ids.shape[1]):
        other = torch.rand(8, generator=generator) > math.e / (1 + math.e)
        ids[:, t] = (3 * ids[:, t - 1] + other) % 32
    rows = Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()})
    follows_VV = torch.zeros(32, 32)
    for token in range(32):
        follows_VV[(3 * token + torch.arange(2)) % 32, token] = torch.tensor([9.0, 8.0])
    assert heads.correction is not None
    with torch.no_grad():
        for head in ("0.1", "1.1"):
            heads.get_parameter(f"{head}.weight").zero_()
        heads.correction.before.weight.copy_(torch.eye(32))
        heads.correction.after.weight.copy_(follows_VV)

    def error() -> float:
        _, calibrations = measure_heads(heads, HiddenStates(target), rows)
        return max(honest["after"]["expected_error"] for honest in calibrations)

    assert error() < 0.03
    with torch.no_grad():  # the same chances, of another token's children
        heads.correction.before.weight.copy_(torch.eye(32).roll(1, dims=0))
    assert error() > 0.1


@pytest.mark.parametrize("kind", with_slow(["block"], ["medusa", "hydra", "eagle3"]))
def test_measured_from_anywhere_as_after_training(
    tiny_llama: TinyLlama, kind: HeadsKind, tmp_path: Path
) -> None:
    """`measure_heads` finds what a run of training stores for the same held-out rows."""
    target = TargetModel(tiny_llama())
    ids = torch.randint(199, (12, 30), generator=torch.Generator().manual_seed(0)).tolist()
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
    config = HeadsConfig(kind=kind, num_heads=2)
    args = TrainingArguments(str(tmp_path), max_steps=1, report_to="none", use_cpu=True)
    heads = train_heads(
        target, rows, eval_dataset=rows, config=config, output_dir=tmp_path, training_args=args
    )
    stored = read_sidecar(tmp_path)["statistics"]
    batches: list[range] = []

    def watch(given: Sequence[range]) -> Sequence[range]:
        batches.extend(given)
        return given

    measured, calibrations = measure_heads(heads, HiddenStates(target), rows, watch=watch)
    assert measured.to_dict() == stored
    assert [calibration["temperature"] for calibration in calibrations] == measured.temperatures
    assert batches == [range(0, 8), range(8, 12)]


def test_the_target_reads_no_more_rows_than_positions_are_kept(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are drawn from all of the text, the same ones every time."""
    target = TargetModel(tiny_llama())
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
    read: list[list[int]] = []

    class Watched(HiddenStates):
        def of(self, inputs: Mapping[str, Any]) -> Tensor:
            read.append(inputs["input_ids"][:, 0].tolist())
            return super().of(inputs)

    def calibrated(rows: int, *, most: int, positions: int, length: int) -> set[int]:
        monkeypatch.setattr(calibration, "_ROWS", most)
        monkeypatch.setattr(calibration, "MAX_POSITIONS", positions)
        ids = [[row, *[row % 7] * (length - 1)] for row in range(rows)]
        text = Dataset.from_dict({"input_ids": ids, "labels": ids})
        read.clear()
        for _ in range(2):
            statistics = HeadStatistics.from_ranks(torch.zeros(4, 2, dtype=torch.long))
            calibrate(statistics, heads, Watched(target), text)
        assert read[: len(read) // 2] == read[len(read) // 2 :]
        return {row for batch in read for row in batch}

    # Of long rows as many as should be looked at, ..
    of_long = calibrated(199, most=16, positions=100, length=20)
    assert len(of_long) == 24  # 320 labels in 16: every fourth position, 34 from 8 rows
    assert min(of_long) < 66 and max(of_long) > 132
    # .. of short ones as many as have enough positions, and of a small text all.
    assert len(calibrated(199, most=16, positions=100, length=6)) == 40  # 24 from 8
    assert len(calibrated(20, most=16, positions=100, length=6)) == 20


@pytest.mark.parametrize(
    ("size", "kind"),
    alternately([(1, 1), (1, 2), (2, 1)], ["medusa", "hydra", "block", "eagle3"]),
)
def test_heads_too_few_for_a_dynamic_tree(
    tiny_llama: TinyLlama, kind: HeadsKind, size: tuple[int, int]
) -> None:
    target, (num_heads, tokens) = TargetModel(tiny_llama(vocab_size=32)), size
    config = HeadsConfig(kind=kind, num_heads=num_heads, draft_vocab_size=tokens)
    heads = new_heads(target, config, torch.arange(tokens))
    ids = torch.randint(3, (4, 9), generator=torch.Generator().manual_seed(0)).tolist()
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
    statistics, _ = measure_heads(heads, HiddenStates(target), rows)
    assert statistics.dynamic_tokens_per_step == {}


def test_heads_that_can_draft_nothing_of_a_text(tiny_llama: TinyLlama) -> None:
    target = TargetModel(tiny_llama(vocab_size=32))
    heads = new_heads(target, HeadsConfig(num_heads=2, draft_vocab_size=4), torch.arange(4))
    rows = Dataset.from_dict({"input_ids": [list(range(5, 30))], "labels": [list(range(5, 30))]})
    statistics, _ = measure_heads(heads, HiddenStates(target), rows)
    assert statistics.temperatures == [1.0, 1.0]


def test_hidden_states_that_are_no_numbers(tiny_llama: TinyLlama) -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    target = TargetModel(model)
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=1))
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3, 4]], "labels": [[1, 2, 3, 4]]})
    with pytest.raises(ValueError, match=r"not finite in torch\.float32"):
        measure_heads(heads, HiddenStates(target), rows)


def test_no_more_rows_at_once_than_an_evaluation_reads(
    tiny_llama: TinyLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of long rows more may not fit, after all of the training; a few short ones always do."""
    target = TargetModel(tiny_llama())
    shapes: list[tuple[int, int]] = []
    read = HiddenStates.of

    def watched(states: HiddenStates, inputs: Mapping[str, Any]) -> Tensor:
        shapes.append(tuple(inputs["input_ids"].shape))
        return read(states, inputs)

    monkeypatch.setattr(HiddenStates, "of", watched)
    ids = torch.randint(199, (12, 30), generator=torch.Generator().manual_seed(0)).tolist()
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
    sizes: Any = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 2}
    args = TrainingArguments(str(tmp_path), max_steps=1, report_to="none", use_cpu=True, **sizes)
    config = HeadsConfig(kind="eagle3", num_heads=2)
    heads = train_heads(
        target, rows, eval_dataset=rows, config=config, output_dir=tmp_path, training_args=args
    )
    assert max(rows for rows, _ in shapes) == 2
    monkeypatch.setattr(calibration, "_TOKENS_AT_ONCE", 100)
    shapes.clear()
    statistics, _ = measure_heads(heads, HiddenStates(target), rows)
    assert {rows for rows, _ in shapes} == {3}
    assert statistics.to_dict() == read_sidecar(tmp_path)["statistics"]
