"""What is understood of the environment that `accelerate launch` leaves."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file

from medusa_heads.config import HeadsConfig
from medusa_heads.heads import MedusaHeads
from medusa_heads.target.target import TargetModel
from medusa_heads.training.hidden.launched import Sharding, launched_sharding, learning_whole
from tests.training.processes import forked, join

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
        ("ACCELERATE_USE_MEGATRON_LM", "true", "Megatron-LM would take apart what is trained"),
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


def learn_after_an_evaluation(rank: int, folder: Path, rows: Dataset) -> None:
    from transformers import TrainingArguments

    from medusa_heads.training.runs.heads_trainer import HeadsTrainer

    join(rank, 2, folder)
    target = TargetModel.from_pretrained(str(folder / "target"))
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
    args = TrainingArguments(
        str(folder),
        max_steps=4,
        learning_rate=1e-2,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = HeadsTrainer(heads, target, args, rows, rows.select(range(2)))
    trainer.evaluate()
    trainer.train()
    save_file(heads.state_dict(), folder / f"{rank}.safetensors")


def test_processes_that_evaluate_first_average_their_gradients(
    target: TargetModel, make_rows: Callable[..., Dataset], tmp_path: Path
) -> None:
    target.model.save_pretrained(tmp_path / "target")
    processes = [
        forked().Process(target=learn_after_an_evaluation, args=(rank, tmp_path, make_rows(40)))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for rank, process in enumerate(processes):
        process.join(90)
        assert process.exitcode == 0, (tmp_path / f"{rank}.txt").read_text()
    one, other = (load_file(tmp_path / f"{rank}.safetensors") for rank in range(2))
    assert any(weight.abs().max() > 1e-3 for weight in one.values())
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, rtol=0, atol=0)
