"""Targets that cannot be spread; `test_many_processes.py` spreads those that can."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, DistributedType, PartialState
from datasets import Dataset
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PhiConfig, PhiForCausalLM, Trainer, TrainingArguments

from medusa_heads.cli.train_draft import main as train_draft
from medusa_heads.cli.train_heads import main as train_heads
from medusa_heads.config import HeadsConfig
from medusa_heads.heads import MedusaHeads
from medusa_heads.heads.vocabulary import vocabulary
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments import renamed
from medusa_heads.training.arguments.target import TargetArguments
from medusa_heads.training.arguments.usable import check_usable
from medusa_heads.training.hidden.launched import Sharding
from medusa_heads.training.hidden.sharding import (
    digest_for_all,
    is_sharded,
    load_to_spread,
    shard_target,
)
from medusa_heads.training.hidden.tensor_parallel import PartedTarget
from medusa_heads.training.runs.heads_trainer import HeadsTrainer
from tests.conftest import Refused

CPU = torch.device("cpu")
# By its name here, under which it is refused.
CHECKPOINTING = next(each for each in renamed.CHECKPOINTING if hasattr(TrainingArguments, each))


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused before the processes talk to one another needs no second one."""
    monkeypatch.setattr("medusa_heads.training.hidden.sharding.several_processes", lambda: True)


def test_one_process_has_nobody_to_share_with(target: TargetModel) -> None:
    with pytest.raises(ValueError, match="over processes, and there is one: start several with"):
        shard_target(target, CPU)
    with pytest.raises(ValueError, match="over processes, and there is one: start several with"):
        load_to_spread(TargetArguments("nowhere"), Sharding())


@pytest.mark.usefixtures("two_processes")
def test_unknown_layers_are_refused(target: TargetModel) -> None:
    sharding = Sharding(("LlamaMLP", "GPT2Block"))
    with pytest.raises(ValueError, match=r"names \['GPT2Block'\], and LlamaForCausalLM has no"):
        shard_target(target, CPU, sharding)


@pytest.mark.usefixtures("two_processes")
def test_a_model_without_layers_is_refused(target: TargetModel) -> None:
    target.model.model.layers = nn.Sequential(*target.model.model.layers)
    with pytest.raises(ValueError, match="expected a list of layers in LlamaForCausalLM"):
        shard_target(target, CPU)


@pytest.mark.usefixtures("two_processes")
def test_4_bit_matrices_are_not_spread() -> None:
    with pytest.raises(ValueError, match="4-bit matrices cannot be spread over processes"):
        load_to_spread(TargetArguments("nowhere", load_in_4bit=True), Sharding())


@pytest.mark.usefixtures("two_processes")
def test_all_that_heads_read_stays_whole() -> None:
    config = PhiConfig(
        vocab_size=30,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    target = TargetModel(PhiForCausalLM(config))  # its lm_head has a bias
    target.freeze()
    before, ids_BT = vocabulary(target), torch.arange(12).view(2, 6)
    hidden_BTX = target.with_features([0]).hidden(ids_BT)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        shard_target(target, CPU)
        assert isinstance(target.model.model.final_layernorm.weight, DTensor)
        for kept, whole in zip(vocabulary(target), before, strict=True):
            assert kept is not None and whole is not None
            assert not isinstance(kept, DTensor) and torch.equal(kept, whole)
        torch.testing.assert_close(target.with_features([0]).hidden(ids_BT), hidden_BTX)
    finally:
        dist.destroy_process_group()


def test_an_fsdp_launch_is_refused_by_name_where_it_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "a b c"}\n' * 20)
    flags = ["--model_name_or_path", "./nowhere", "--dataset", str(corpus)]
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert train_heads([*flags, "--self_distill"]) == 2
    assert "an FSDP launch) cannot write text apart" in capsys.readouterr().err
    for flag in (["--device_map", "auto"], ["--tensor_parallel"]):
        assert train_heads([*flags, *flag]) == 2
        assert f"leave {flag[0][2:]} out, or launch with configs" in capsys.readouterr().err
    assert train_draft(flags) == 2
    assert "leave FSDP out, and launch several with configs" in capsys.readouterr().err
    assert train_heads(flags) == 2
    assert "over processes, and there is one" in capsys.readouterr().err
    monkeypatch.setenv("FSDP_VERSION", "1")
    assert train_heads([*flags, "--dry_run"]) == 2
    assert "set fsdp_version: 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--device_map", "atuo"], "device_map must be one of ['auto', 'balanced'"),
        (["--device_map", '{"": }'], "device_map must be a JSON object"),
        (["--device_map", "auto", "--shard_target"], "device_map and shard_target exclude each"),
        (["--tensor_parallel", "--shard_target"], "shard_target and tensor_parallel exclude"),
        (["--tensor_parallel", "--load_in_4bit"], "4-bit matrices cannot be spread"),
        (["--tensor_parallel", "--joint"], "leave tensor_parallel or joint out"),
        (["--device_map", "auto", "--joint"], "leave device_map or joint out"),
        (["--tensor_parallel", "--self_distill"], "cannot write text apart"),
        (["--tensor_parallel", "--mtp"], "leave tensor_parallel out"),
        (["--device_map", "auto", "--mtp"], "leave device_map out"),
        (["--tensor_parallel"], "spread over processes, and there is one"),
        (
            ["--training_args", f'{{"{CHECKPOINTING}": true, "use_cpu": true}}'],
            f"{CHECKPOINTING} has no place in this training",
        ),
        (["--training_args", '{"fsdp": true, "use_cpu": true}'], "leave fsdp and deepspeed out"),
    ],
)
def test_what_no_launch_can_do_is_refused_before_anything_is_loaded(
    flags: list[str], sentence: str, tmp_path: Path, refused: Refused
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "a b c"}\n' * 20)
    begin = ["--model_name_or_path", "./nowhere", "--dataset", str(corpus)]
    begin += ["--output_dir", str(tmp_path / "heads")]
    assert sentence in refused(train_heads, [*begin, *flags])


def test_one_process_of_several_has_one_device(
    tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags = ["--model_name_or_path", "./nowhere", "--dataset", "x.jsonl", "--device_map", "auto"]
    assert "this launch has several: leave it out" in refused(train_heads, flags)
    assert "leave device_map out" in refused(train_draft, flags)


def test_heads_of_attention_are_dealt_out_evenly(target: TargetModel, tmp_path: Path) -> None:
    target.model.save_pretrained(tmp_path)  # with one key-value head
    arguments = TargetArguments(str(tmp_path), tensor_parallel=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_world_size", lambda: 2)
        with pytest.raises(ValueError, match="the target's 1 num_key_value_heads out to 2"):
            PartedTarget.load(arguments)


def test_accelerate_wraps_only_what_learns_and_as_in_any_launch(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setattr("medusa_heads.training.runs.trainer.is_sharded", lambda _: True)
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    args.device  # noqa: B018  # makes the state that is changed next
    rows = Dataset.from_list([{"input_ids": [1, 2], "labels": [1, 2]}])
    on_gpus = {**PartialState._shared_state, "distributed_type": DistributedType.MULTI_GPU}
    monkeypatch.setattr(PartialState, "_shared_state", on_gpus)
    try:
        AcceleratorState._reset_state()
        assert Trainer(nn.Linear(2, 2), args).is_fsdp_enabled, "what heads are kept from"
        AcceleratorState._reset_state()
        on_gpus["distributed_type"] = DistributedType.MULTI_GPU
        trainer = HeadsTrainer(heads, target, args, rows)
        assert trainer.accelerator.distributed_type == DistributedType.MULTI_GPU
        assert not trainer.is_fsdp_enabled
    finally:
        AcceleratorState._reset_state()


def test_a_torch_without_distributed(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one process, and accelerate cannot train there: it looks for parts of matrices in
    what learns."""
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    monkeypatch.setattr(dist, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", None)
    assert not is_sharded(target) and digest_for_all(target) == target.weights_digest()
    with pytest.raises(ValueError, match="this torch was built without torch") as told:
        check_usable(args)
    assert "\n" not in str(told.value)
