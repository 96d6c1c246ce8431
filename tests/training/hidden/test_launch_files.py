"""The launch files in configs/accelerate, read by accelerate itself, and the Slurm script."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from medusa_heads.cli.flags.arguments import parse_arguments
from medusa_heads.cli.train_heads import ARGUMENTS, main
from medusa_heads.training.hidden.launched import Sharding, launched_sharding
from tests.training.hidden.test_many_processes import check_equal, flags, loaded, run_of

__all__ = ["flags"]  # a fixture
ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "configs" / "accelerate"
SCRIPT = FOLDER / "slurm.sh"


def launched(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The launch as accelerate understands it; its environment is that of its processes."""
    known = launch_command_parser().parse_args(arguments)
    understood, *_ = _validate_launch_command(known)
    for name, value in prepare_multi_gpu_env(understood).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", str(understood.num_processes))
    return understood


@pytest.mark.parametrize(
    ("name", "nodes", "processes", "sharding"),
    [
        ("ddp", 1, 2, None),
        ("fsdp", 1, 2, Sharding()),
        ("ddp_nodes", 2, 16, None),
        ("fsdp_nodes", 2, 16, Sharding(copies=2)),
    ],
)
def test_accelerate_reads_what_a_file_means(
    name: str,
    nodes: int,
    processes: int,
    sharding: Sharding | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = str(FOLDER / f"{name}.yaml")
    more = ["--machine_rank", "1", "--main_process_ip", "10.0.0.1"] if nodes > 1 else []
    found = launched(["--config_file", file, *more, "-m", "x"], monkeypatch)
    assert (found.num_machines, found.num_processes) == (nodes, processes)
    if nodes > 1:
        assert (found.main_process_ip, found.main_process_port) == ("10.0.0.1", 29500)
        assert (found.rdzv_backend, found.machine_rank) == ("static", 1)
    assert launched_sharding() == sharding


def test_every_launch_file_is_read() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {
        *("ddp.yaml", "fsdp.yaml", "ddp_nodes.yaml", "fsdp_nodes.yaml", "slurm.sh")
    }


@pytest.mark.parametrize(("file", "copies"), [(None, None), ("fsdp_nodes.yaml", 3)])
def test_the_slurm_script_starts_a_launcher_on_each_node(
    file: str | None, copies: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    programs = {
        "scontrol": 'printf "node%s\\n" 7 8 9',
        "srun": 'shift; SLURM_NODEID=2 "$@"',  # as on the last of three nodes
        "accelerate": 'printf "%s\\n" "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" "$@"',
    }
    for program, does in programs.items():
        path = tmp_path / program
        path.write_text(f"#!/bin/bash\n{does}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    job = {"SLURM_JOB_NODELIST": "node[7-9]", "SLURM_NNODES": "3", "SLURM_JOB_ID": "123456"}
    job |= {"SLURM_GPUS_ON_NODE": "4", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    if file is not None:
        job["LAUNCH"] = f"configs/accelerate/{file}"
    given = ["--config", "configs/llama-3.1-8b.yaml", "--output_dir", "runs/with a space"]
    done = subprocess.run(
        ["bash", str(SCRIPT), *given],
        env=os.environ | job,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    patience, verb, *arguments = done.stdout.splitlines()
    assert verb == "launch"
    (told,) = re.findall(r"--signal=TERM@(\d+)", SCRIPT.read_text())
    assert 240 <= int(patience) < int(told), "the launcher kills what has not ended by then"
    found = launched(arguments, monkeypatch)
    assert (found.machine_rank, found.num_machines, found.num_processes) == (2, 3, 12)
    assert (found.main_process_ip, found.main_process_port) == ("node7", 23456)
    sharding = launched_sharding()
    assert (sharding and sharding.copies) == copies
    assert found.training_script == "medusa_heads.cli.train_heads" and found.module
    assert found.training_script_args == ["--resume_from_checkpoint", "auto", *given]
    parse_arguments(ARGUMENTS, found.training_script_args, prog="train-heads", description="")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "each"), [("ddp_nodes", 1), ("fsdp_nodes", 2)])
def test_two_nodes_learn_what_one_process_does(
    name: str, each: int, flags: list[str], tmp_path: Path
) -> None:
    """Two launchers on this machine, as on two."""
    assert main(run_of(flags, 1, tmp_path / "one")) == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", port]
    command += ["--config_file", str(FOLDER / f"{name}.yaml"), "--num_processes", str(2 * each)]
    if each > 1:
        command += ["--parallelism_config_dp_shard_size", str(each)]
    training = ["-m", "medusa_heads.cli.train_heads", *run_of(flags, 2 * each, tmp_path / "nodes")]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    nodes = [
        subprocess.Popen(
            [*command, "--machine_rank", rank, *training],
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    printed = [node.communicate()[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(printed)
    check_equal(tmp_path / "nodes", tmp_path / "one")
    assert loaded(tmp_path / "nodes")["processes"] == 2 * each
