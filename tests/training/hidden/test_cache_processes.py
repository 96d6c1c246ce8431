"""Two processes under torchrun fill one cache of hidden states, and read it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from medusa_heads.target.target import TargetModel

PROCESSES = """
import sys
from pathlib import Path

import torch
from datasets import load_from_disk
from transformers import LlamaForCausalLM

from medusa_heads.config import HeadsConfig
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.training import OptimisationArguments, to_training_arguments
from medusa_heads.training.arguments.cache import CacheArguments
from medusa_heads.training.runs.heads import train_heads

folder = Path(sys.argv[1])
torch.set_num_threads(1)
forwards = 0
for mode in ("off", "auto", "read"):
    target = TargetModel(LlamaForCausalLM.from_pretrained(folder / "target"))
    hidden = target.hidden

    def counted(*args, **kwargs):
        global forwards
        forwards += 1
        return hidden(*args, **kwargs)

    target.hidden = counted
    forwards = 0
    arguments = OptimisationArguments(
        output_dir=str(folder / mode),
        num_train_epochs=2,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        training_args={"use_cpu": True, "disable_tqdm": True, "ddp_backend": "gloo"},
    )
    args = to_training_arguments(arguments, "shared")
    train_heads(
        target,
        load_from_disk(str(folder / "rows")),
        eval_dataset=load_from_disk(str(folder / "held_out")),
        config=HeadsConfig(num_heads=2),
        output_dir=folder / mode,
        training_args=args,
        hidden_cache=CacheArguments(mode, None if mode == "off" else str(folder / "cache")),
    )
    (folder / f"{mode}-{args.process_index}.txt").write_text(str(forwards))
"""


@pytest.mark.slow
def test_two_processes_fill_one_cache(
    target: TargetModel, texts: tuple[Dataset, Dataset], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    target.model.save_pretrained(tmp_path / "target")
    for rows, name in zip(texts, ("rows", "held_out"), strict=True):
        rows.save_to_disk(str(tmp_path / name))
    script = tmp_path / "processes.py"
    script.write_text(PROCESSES)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    command += ["--master_port=0", "--standalone", str(script), str(tmp_path)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    weights = [
        load_file(tmp_path / mode / "medusa_lm_head.safetensors")
        for mode in ("off", "auto", "read")
    ]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(weights[2][name], tensor, rtol=1e-4, atol=1e-5)
    ran = {
        mode: [int((tmp_path / f"{mode}-{rank}.txt").read_text()) for rank in range(2)]
        for mode in ("auto", "read")
    }
    assert ran["read"] == [0, 0]
    # 17 rows and 5 held-out ones, each rank its half once; and one token for the dtype.
    assert all(count <= 5 + 2 + 1 for count in ran["auto"]), ran
    assert done.stdout.count("Hidden states:") == 2  # said once a run, not once a process
