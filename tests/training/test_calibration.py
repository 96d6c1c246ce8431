"""Calibration: the true temperature is found, dynamic trees are counted as they are walked."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from medusa_heads import HeadsConfig, MedusaHeads, TargetModel
from medusa_heads.statistics import HeadStatistics
from medusa_heads.training.calibration import calibrate
from medusa_heads.training.hidden_states import HiddenStates
from tests.conftest import TinyLlama


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
