"""Flags of the loss, and what they become."""

from pathlib import Path
from typing import Any

import pytest

from medusa_heads.cli.flags.arguments import parse_arguments
from medusa_heads.training.arguments.loss_config import LossConfig


def parsed(*flags: str) -> LossConfig:
    (config,) = parse_arguments((LossConfig,), flags, prog="test", description="")
    assert isinstance(config, LossConfig)
    return config


def test_the_default_is_cross_entropy_that_decays_from_head_to_head() -> None:
    assert parsed() == LossConfig() == LossConfig({"cross_entropy": 1.0}, 1.0, "decay", 0.8)
    assert not parsed().needs_teacher


@pytest.mark.parametrize(
    "flag",
    [
        "cross_entropy=0.5,reverse_kl=0.25",
        " cross_entropy = 0.5, reverse_kl=2.5e-1",
        '{"cross_entropy": 0.5, "reverse_kl": 0.25}',
    ],
)
def test_mixtures_are_read(flag: str) -> None:
    config = parsed("--loss", flag, "--head-weights", "acceptance", "--loss-temperature", "0.7")
    terms = {"cross_entropy": 0.5, "reverse_kl": 0.25}
    assert config == LossConfig(terms, temperature=0.7, head_weights="acceptance")
    assert config.needs_teacher and not config.needs_overlap


def test_a_config_file_can_hold_a_mapping(tmp_path: Path) -> None:
    file = tmp_path / "loss.yaml"
    file.write_text("loss:\n  forward_kl: 1\n  acceptance: 1e-1\nhead_loss_decay: 0.9\n")
    config = parsed("--config", str(file))
    assert config == LossConfig({"forward_kl": 1.0, "acceptance": 0.1}, decay=0.9)
    assert config.needs_overlap


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"terms": "crossentropy"}, "unknown loss term 'crossentropy'; known"),
        ({"terms": "forward_kl=much"}, "'forward_kl' needs a number, got 'much'"),
        ({"terms": "forward_kl=-1"}, "'forward_kl' needs a weight above 0, got -1.0"),
        ({"terms": "forward_kl=nan"}, "needs a weight above 0"),
        ({"terms": "forward_kl,forward_kl=2"}, "names a term twice"),
        ({"terms": '{"forward_kl"'}, "not valid JSON"),
        ({"terms": {}}, "at least one term"),
        ({"temperature": 0.7}, "a temperature changes only terms with the target's own"),
        ({"terms": "forward_kl", "temperature": 0.0}, "temperature must be above 0"),
        ({"decay": 0.0}, r"^decay must lie in \(0, 1\]"),
        ({"smoothing": 1.5}, r"^smoothing must lie in \(0, 1\]"),
        ({"head_weights": "equal"}, "head_weights must be one of"),
    ],
)
def test_impossible_losses_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossConfig(**values)


@pytest.mark.parametrize("flag", ["--head_loss_decay", "--head_weight_smoothing"])
def test_a_number_out_of_range_is_told_by_its_flag(flag: str) -> None:
    with pytest.raises(ValueError, match=rf"{flag[2:]} must lie in \(0, 1\], got 1.5"):
        parsed(flag, "1.5")
