"""Flags of joint training."""

from typing import Any

import pytest

from medusa_heads.training.arguments.joint import JointArguments
from medusa_heads.training.arguments.joint_config import JointConfig


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"lora_r": 8}, "lora_r plays a part in joint training only: add --joint"),
        ({"joint": True, "lora_r": 0}, "lora_r must be at least 1"),
        ({"joint": True, "lora_dropout": 1.0}, "lora_dropout must lie in"),
        ({"joint": True, "joint_warmup_steps": 2.5}, "a whole number of steps, or a share"),
        ({"joint": True, "lora_learning_rate": 0.0}, "learning_rate of joint training"),
        ({"joint": True, "joint_kl_weight": -1.0}, "kl_weight must be at least 0"),
        ({"joint": True, "joint_lm_weight": 0.0, "joint_kl_weight": 0.0}, "nothing would preserve"),
        ({"joint": True, "lora_target_modules": []}, "at least one module"),
    ],
)
def test_flags_out_of_range(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        JointArguments(**given)


def test_flags_make_a_config() -> None:
    assert JointArguments().config() is None
    assert JointArguments(joint=True).config() == JointConfig()
    given = JointArguments(joint=True, lora_target_modules=["q_proj"], joint_warmup_steps=0.1)
    assert given.config() == JointConfig(target_modules=("q_proj",), warmup_steps=0.1)
    assert (JointConfig().warmup(11), JointConfig(warmup_steps=4).warmup(11)) == (3, 4)
