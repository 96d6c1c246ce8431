"""Flags of joint training."""

from typing import Any

import pytest

from medusa_heads.cli.flags.arguments import parse_arguments
from medusa_heads.cli.train_heads import CheckpointArguments, joint_settings
from medusa_heads.training.arguments.joint_config import JointConfig


def parsed(*flags: str) -> JointConfig | None:
    kinds = (CheckpointArguments, JointConfig)
    switches, config = parse_arguments(kinds, flags, prog="test", description="")
    return joint_settings(switches.joint, config)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--lora_r", "8"], "lora_r plays a part in joint training only: add --joint"),
        (
            ["--joint_warmup_steps", "0.1"],
            "joint_warmup_steps plays a part in joint training only: add --joint",
        ),
        (["--joint", "--lora_r", "0"], "lora_r must be at least 1"),
        (["--joint", "--lora_dropout", "1.0"], "lora_dropout must lie in"),
        (["--joint", "--joint_warmup_steps", "2.5"], "a whole number of steps, or a share"),
        (["--joint", "--lora_learning_rate", "0"], "lora_learning_rate of joint training"),
        (["--joint", "--joint_kl_weight", "-1"], "joint_kl_weight must be at least 0"),
        (["--joint", "--joint_lm_weight", "0", "--joint_kl_weight", "0"], "nothing would preserve"),
    ],
)
def test_flags_out_of_range(given: list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parsed(*given)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"learning_rate": 0.0}, "learning_rate of joint training"),
        ({"target_modules": []}, "at least one module"),
    ],
)
def test_values_out_of_range(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        JointConfig(**given)


def test_flags_make_a_config() -> None:
    assert parsed() is None
    assert parsed("--joint") == JointConfig()
    given = parsed("--joint", "--lora_target_modules", "q_proj", "--joint_warmup_steps", "0.1")
    assert given == JointConfig(target_modules=("q_proj",), warmup_steps=0.1)
    assert (JointConfig().warmup(11), JointConfig(warmup_steps=4).warmup(11)) == (3, 4)
