"""What earlier versions wrote is read as they meant it, or a sentence says what it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from medusa_heads.checkpoint.checkpoint import save_heads
from medusa_heads.checkpoint.stored_heads import SIDECAR_FILE, read_stored
from medusa_heads.config import HeadsConfig
from medusa_heads.heads import new_heads
from medusa_heads.target.target import TargetModel
from medusa_heads.training.runs.resumable import with_rates_of_now
from tests.conftest import TinyLlama


def test_a_sidecar_without_a_checksum_is_told_apart_from_a_copy_that_was_cut_off(
    tiny_llama: TinyLlama, tmp_path: Path
) -> None:
    target = TargetModel(tiny_llama())
    save_heads(tmp_path, new_heads(target, HeadsConfig(num_heads=2)), target)
    sidecar = json.loads((tmp_path / SIDECAR_FILE).read_text())
    del sidecar["weights_sha256"]
    (tmp_path / SIDECAR_FILE).write_text(json.dumps(sidecar))
    with pytest.raises(ValueError, match=r"says no weights_sha256, .*: train the heads anew$"):
        read_stored(tmp_path)


def test_an_optimiser_whose_parts_stood_in_another_order() -> None:
    """torch gives each part what stands at its place, of whatever shape."""
    parts = [torch.nn.Parameter(torch.ones(*shape)) for shape in ((3,), (2, 2))]
    states = []
    for order in (parts, parts[::-1]):
        optimizer = torch.optim.AdamW(order)
        sum(part.sum() for part in parts).backward()  # type: ignore[union-attr]
        optimizer.step()
        states.append(optimizer.state_dict())
    now = torch.optim.AdamW(parts)
    schedule = LambdaLR(now, lambda _: 1.0)
    with with_rates_of_now("checkpoint-1", now, schedule):
        now.load_state_dict(states[0])
    with with_rates_of_now("checkpoint-1", now, schedule):
        now.state[parts[1]]["exp_avg"] = torch.zeros(1, 2)  # as optimisers that project keep it
    with (
        pytest.raises(
            ValueError, match=r"'checkpoint-1' was made by an earlier version: start anew"
        ),
        with_rates_of_now("checkpoint-1", now, schedule),
    ):
        now.load_state_dict(states[1])
