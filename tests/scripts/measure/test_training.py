"""The measurement of training: what it times and counts on a target that takes no time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from medusa_heads.training.arguments.loss_config import LossConfig
from scripts.measure.training import MeasureArguments, Training, main, peak_alone
from tests.conftest import Refused

SMALL = ["--random_target", "32x2x4", "--vocabulary", "64", "--batch_size", "2", "--length", "16"]


@pytest.mark.parametrize("loss", ["cross_entropy", "acceptance"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rates_are_of_the_same_tokens(
    loss: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "numbers.json"
    flags = [*SMALL, "--measure", "rate", "--repeats", "2", "--loss", loss, "--dtype", dtype]
    assert main([*flags, "--output", str(output)]) == 0
    rate = json.loads(output.read_text())["rate"]
    speeds = rate["tokens_per_second"]
    # One turn is left after the warming up, so that medians are that turn's values.
    for name in ("forward", "hidden"):
        ratio = speeds["training"] / speeds[name]
        assert rate[f"training_over_{name}"] == pytest.approx(ratio)
    assert 0 < rate["vocab_matrix_share"] < 1
    assert "training runs at" in capsys.readouterr().out


@pytest.mark.slow
def test_the_peak_of_a_step_is_counted() -> None:
    # At least one layer's widest features, 64 * 8 / 3 rounded up to 192, of all tokens in fp32.
    arguments = MeasureArguments(random_target="64x2x4", vocabulary=64, batch_size=64, length=512)
    # In a process of its own: here there may be memory that others have left.
    counted = peak_alone(arguments, LossConfig())
    assert counted["standing_mib"] > 100
    assert counted["step_mib"] > 64 * 512 * 192 * 4 / 2**20


@pytest.mark.slow
def test_memory_is_counted_in_processes_of_their_own(tmp_path: Path) -> None:
    output = tmp_path / "numbers.json"
    flags = [*SMALL, "--measure", "memory", "--memory_heads", "1", "2"]
    assert main([*flags, "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["memory"]
    assert [row["num_heads"] for row in rows] == [1, 2]
    assert all(row["standing_mib"] > 100 and row["step_mib"] >= 0 for row in rows)


def test_a_step_learns_and_leaves_the_target_alone() -> None:
    arguments = MeasureArguments(
        random_target="32x2x4", vocabulary=64, batch_size=2, length=16, kind="hydra"
    )
    training = Training(arguments, LossConfig({"forward_kl": 1.0}))
    digest = training.target.weights_digest()
    before = [parameter.detach().clone() for parameter in training.heads.parameters()]
    training.step()
    after = training.heads.parameters()
    assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert training.target.weights_digest() == digest


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--random_target", "64x2"], "expected WIDTHxLAYERSxHEADS"),
        (["--repeats", "1"], "repeats must be at least 2"),
        (["--memory_heads", "0"], "memory_heads of at least 1"),
        (["--loss", "kl"], "unknown loss term 'kl'"),
    ],
)
def test_wrong_flags_are_refused_in_one_sentence(
    flags: list[str], message: str, refused: Refused
) -> None:
    assert message in refused(main, [*SMALL, *flags])
