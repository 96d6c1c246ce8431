"""Two processes (gloo, CPU) started by the shipped accelerate configurations."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from medusa_heads.cli.train_heads import main
from medusa_heads.target.target import TargetModel
from tests.conftest import TinyLlama
from tests.training.conftest import VOCAB

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs" / "accelerate"
BATCH = "--per_device_train_batch_size"
TIMED = ("_runtime", "_per_second")


@pytest.fixture
def flags(target: TargetModel, tmp_path: Path) -> list[str]:
    """Of a run of 8 steps; with a corpus beside its rows."""
    write_target(tmp_path, target)
    generator = torch.Generator().manual_seed(0)
    with (tmp_path / "rows.jsonl").open("w") as rows, (tmp_path / "corpus.jsonl").open("w") as text:
        for _ in range(43):
            first, step, length = torch.randint(12, 30, (3,), generator=generator).tolist()
            ids = [(first + step * t) % VOCAB for t in range(length)]
            labels = [-100] * 4 + ids[4:]
            rows.write(json.dumps({"input_ids": ids, "labels": labels}) + "\n")
            text.write(json.dumps({"text": " ".join(f"w{i}" for i in ids)}) + "\n")
    flags = ["--model_name_or_path", str(tmp_path / "target"), "--max_steps", "8"]
    flags += ["--dataset", str(tmp_path / "rows.jsonl"), "--eval_rows", "3", "--num_heads", "2"]
    flags += ["--save_steps", "4", "--save_total_limit", "2", "--no_load_best_model_at_end"]
    flags += ["--learning_rate", "1e-2", "--continuation_length", "10", "--max_length", "32"]
    # Rows of unequal lengths are in no process dealt out of one batch, whoever asks for it.
    args = {"use_cpu": True, "disable_tqdm": True, "accelerator_config": {"dispatch_batches": True}}
    return [*flags, "--training_args", json.dumps(args)]


def write_target(folder: Path, target: TargetModel) -> None:
    target.model.save_pretrained(folder / "target")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder / "target")


def launch(
    config: str, folder: Path, runs: str, flags: list[str]
) -> subprocess.CompletedProcess[str]:
    """The runs (see `two_processes.py`), into a folder with the name of the configuration."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
    command += ["--config_file", str(CONFIGS / f"{config}.yaml"), "--main_process_port", "0"]
    script = str(Path(__file__).with_name("two_processes.py"))
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.run(
        [*command, script, str(folder), config, runs, *flags, BATCH, "4"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        check=False,
    )


def heads_in(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "medusa_lm_head.safetensors")


def log_in(folder: Path) -> list[dict[str, Any]]:
    """What was measured at every step, without how long it took."""
    state = json.loads((folder / "checkpoint-8" / "trainer_state.json").read_text())
    return [
        {name: value for name, value in entry.items() if not name.endswith(TIMED)}
        for entry in state["log_history"]
    ]


@pytest.mark.slow
def test_two_processes_learn_what_one_does_with_twice_the_batch(
    flags: list[str], target: TargetModel, tmp_path: Path
) -> None:
    assert main([*flags, BATCH, "8", "--output_dir", str(tmp_path / "one")]) == 0
    fitted = ["--linear_shortcut", "--induction", "--output_dir", str(tmp_path / "fitted")]
    assert main([*flags, BATCH, "8", *fitted]) == 0
    done = launch("ddp", tmp_path, "plain,accumulated,resumed,sharded,distilled,fitted", flags)
    assert done.returncode == 0, done.stdout + done.stderr

    one, ddp = tmp_path / "one", tmp_path / "ddp"
    expected = heads_in(one)
    start = load_file(one / "checkpoint-4" / "model.safetensors")
    assert any((start[f"heads.{k}"] - v).abs().max() > 1e-3 for k, v in expected.items())
    files = {path.name for path in one.iterdir()}
    for name in ("plain", "accumulated", "resumed", "sharded"):
        found = heads_in(ddp / name)
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-6)
        run = yaml.safe_load((ddp / name / "run.yaml").read_text())
        assert run["target_weights_sha256"] == target.weights_digest()
    found = heads_in(ddp / "fitted")  # by sums of what each has read
    for key, tensor in heads_in(tmp_path / "fitted").items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-3)
    assert (
        found["0.0.res_connection.weight"] - torch.eye(len(found["0.0.res_connection.bias"]))
    ).norm() > 1
    assert {path.name for path in (ddp / "plain").iterdir()} == files
    assert {path.name for path in (ddp / "sharded").iterdir()} == files
    parts = {path.name for path in (ddp / "plain" / "checkpoint-8").iterdir()}
    assert {"rng_state_0.pth", "rng_state_1.pth", "run.yaml", "trainer_state.json"} <= parts
    first, other = (json.loads((ddp / f"counts-{r}.json").read_text()) for r in (0, 1))
    assert first["answered"] == 12, "the first process writes the text, the other reads it"
    assert other == {"answered": 0, "hashed": ["distilled"]}, "the first hashes for both"


@pytest.mark.slow
def test_two_processes_with_a_quantised_target(
    flags: list[str], tiny_llama: TinyLlama, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    wide = tmp_path / "wide"  # enough for the kernels of bitsandbytes
    tiny_llama().save_pretrained(wide)
    # In bf16, which a processor that is quick at it takes by itself, batches round otherwise.
    flags = [*flags, "--dtype", "float32", "--bf16", "false"]
    flags += ["--model_name_or_path", str(wide), "--load_in_4bit"]
    more = ["--joint", "--joint_warmup_steps", "2", "--lora_r", "4"]
    one = {"plain": tmp_path / "one", "joint": tmp_path / "one-joint"}
    for name, folder in one.items():
        output = ["--output_dir", str(folder), *(more if name == "joint" else [])]
        assert main([*flags, BATCH, "8", *output]) == 0
    done = launch("ddp", tmp_path, "plain,joint", flags)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, folder in one.items():
        path = "checkpoint-8/model.safetensors"
        expected, found = load_file(folder / path), load_file(tmp_path / "ddp" / name / path)
        assert expected.keys() == found.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-5)

    refused = launch("fsdp", tmp_path, "plain", flags)
    assert refused.returncode != 0 and "4-bit matrices cannot be spread" in refused.stderr


@pytest.mark.slow
def test_an_fsdp_launch_learns_what_a_ddp_launch_does(
    flags: list[str], target: TargetModel, tmp_path: Path
) -> None:
    for config, more in (("ddp", ""), ("fsdp", ",otherwise")):
        done = launch(config, tmp_path, f"plain,stopped,joint{more}", flags)
        assert done.returncode == 0, done.stdout + done.stderr

    ddp, fsdp = tmp_path / "ddp", tmp_path / "fsdp"
    for name in ("plain", "stopped", "joint", "otherwise"):
        expected, found = ddp / ("plain" if name == "otherwise" else name), fsdp / name
        files = {path.relative_to(found) for path in found.rglob("*")}
        assert files == {path.relative_to(expected) for path in expected.rglob("*")}
        for path in (path for path in files if path.suffix == ".safetensors"):
            learnt, as_ddp = load_file(found / path), load_file(expected / path)
            assert learnt.keys() == as_ddp.keys()
            for key, tensor in as_ddp.items():
                torch.testing.assert_close(learnt[key], tensor, rtol=0, atol=1e-6)
        figures = json.loads((found / "metrics.json").read_text())
        for key, value in json.loads((expected / "metrics.json").read_text()).items():
            if not key.endswith(TIMED):
                assert figures[key] == pytest.approx(value, abs=1e-5), (name, key)
        run = yaml.safe_load((found / "run.yaml").read_text())
        assert run["target_weights_sha256"] == target.weights_digest()
    assert json.loads((fsdp / "stopped" / "metrics.json").read_text())["steps"] < 8
    before, after = (
        load_file(fsdp / "joint" / f"checkpoint-{step}" / "model.safetensors") for step in (4, 8)
    )
    assert any("lora_B" in key and (after[key] - before[key]).abs().max() > 1e-3 for key in after)
    assert json.loads((fsdp / "counts-1.json").read_text())["hashed"] == []


@pytest.mark.slow
def test_a_killed_fsdp_launch_goes_on_as_if_it_had_not_been(
    flags: list[str], tmp_path: Path
) -> None:
    killed = launch("fsdp", tmp_path, "plain,killed", flags)
    assert killed.returncode != 0 and f"Signal {signal.SIGKILL.value} (SIGKILL)" in killed.stderr
    folder = tmp_path / "fsdp" / "killed"
    assert not (folder / "checkpoint-8").exists()
    done = launch("fsdp", tmp_path, "revived", flags)
    assert done.returncode == 0, done.stdout + done.stderr

    untouched = tmp_path / "fsdp" / "plain"
    for path in ("medusa_lm_head.safetensors", "checkpoint-8/model.safetensors"):
        expected, found = load_file(untouched / path), load_file(folder / path)
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    assert log_in(folder) == log_in(untouched)
    start = load_file(folder / "checkpoint-4" / "model.safetensors")
    assert any((start[key] - end).abs().max() > 1e-3 for key, end in found.items())
