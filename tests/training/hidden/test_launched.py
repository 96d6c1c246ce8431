"""What is understood of the environment that `accelerate launch` leaves."""

import os

import pytest

from medusa_heads.training.hidden.launched import Sharding, launched_sharding, learning_whole

# What the launcher of accelerate 1.15 sets for configs/accelerate/fsdp.yaml.
LAUNCHED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_FORWARD_PREFETCH": "false",
}

# And for eight processes of configs/accelerate/fsdp_nodes.yaml, of which each node has four.
IN_NODES = {
    "WORLD_SIZE": "8",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4",
    "PARALLELISM_CONFIG_TP_SIZE": "1",
    "PARALLELISM_CONFIG_CP_SIZE": "1",
}


@pytest.fixture
def fsdp_launch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_without_a_launch_nothing_is_spread() -> None:
    assert launched_sharding() is None


def test_an_fsdp_launch_says_how(fsdp_launch: pytest.MonkeyPatch) -> None:
    assert launched_sharding() == Sharding((), reshard_after_forward=True, load_once=True)
    fsdp_launch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "LlamaDecoderLayer,LlamaMLP")
    fsdp_launch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    fsdp_launch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    classes = ("LlamaDecoderLayer", "LlamaMLP")
    assert launched_sharding() == Sharding(classes, reshard_after_forward=False, load_once=False)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("FSDP_VERSION", "1", "got fsdp_version 1: set fsdp_version: 2"),
        ("FSDP_OFFLOAD_PARAMS", "true", "without fsdp_offload_params: leave that out"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", "without fsdp_activation_checkpointing"),
        ("FSDP_IGNORED_MODULES", "lm_head", "without fsdp_ignored_modules"),
        ("FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP", "without fsdp_auto_wrap_policy: SIZE_BASED"),
        ("PARALLELISM_CONFIG_CP_SIZE", "2", "without parallelism_config_cp_size: leave that out"),
        ("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "4", "asks for 4 copies .* over 4 .* there are 8"),
        ("FSDP_RESHARD_AFTER_FORWARD", "FULL_SHARD", "cannot be read: ValueError: invalid truth"),
        ("FSDP_STATE_DICT_TYPE", "WHOLE", "fsdp_config cannot be read: KeyError: 'WHOLE'"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "DeepSpeed would take apart what is trained"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(
    name: str, value: str, sentence: str, fsdp_launch: pytest.MonkeyPatch
) -> None:
    for size in IN_NODES.items():
        fsdp_launch.setenv(*size)
    fsdp_launch.setenv(name, value)
    with pytest.raises(ValueError, match=sentence):
        launched_sharding()


def test_a_copy_of_the_target_in_each_node(fsdp_launch: pytest.MonkeyPatch) -> None:
    for size in IN_NODES.items():
        fsdp_launch.setenv(*size)
    found = launched_sharding()
    assert found is not None and found.copies == 2
    with pytest.raises(ValueError, match="leave parallelism_config or joint out"):
        found.check_joint()
    with learning_whole():
        assert "ACCELERATE_USE_PARALLELISM_CONFIG" not in os.environ
    assert launched_sharding() == found


def test_what_learns_sees_no_fsdp(fsdp_launch: pytest.MonkeyPatch) -> None:
    with learning_whole():
        assert launched_sharding() is None
    assert launched_sharding() is not None
    fsdp_launch.delenv("ACCELERATE_USE_FSDP")
    with learning_whole():
        pass
    assert "ACCELERATE_USE_FSDP" not in os.environ
