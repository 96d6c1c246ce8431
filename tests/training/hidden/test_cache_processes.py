"""Two processes under torchrun fill one cache of hidden states, and read it: each with the whole
target, or with a part of it."""

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
from medusa_heads.training.hidden import prepare
from medusa_heads.training.hidden.sharding import shard_target
from medusa_heads.training.runs.heads import train_heads

prepare.SHARD_BYTES = 5000  # several, and not as many for each process
folder = Path(sys.argv[1])
torch.set_num_threads(1)
forwards = 0
for name in ("off", "auto", "read", "spread-auto", "spread-read"):
    mode = name.removeprefix("spread-")
    cache = folder / ("cache" if mode == name else "spread-cache")
    target = TargetModel(LlamaForCausalLM.from_pretrained(folder / "target"))
    hidden = target.hidden

    def counted(*args, **kwargs):
        global forwards
        forwards += 1
        return hidden(*args, **kwargs)

    target.hidden = counted
    forwards = 0
    arguments = OptimisationArguments(
        output_dir=str(folder / name),
        num_train_epochs=1,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        training_args={"use_cpu": True, "disable_tqdm": True, "ddp_backend": "gloo"},
    )
    args = to_training_arguments(arguments, "shared")
    if mode != name:
        shard_target(target, args.device)
        forwards = 0
    train_heads(
        target,
        load_from_disk(str(folder / "rows")),
        eval_dataset=load_from_disk(str(folder / "held_out")),
        config=HeadsConfig(num_heads=2),
        output_dir=folder / name,
        training_args=args,
        hidden_cache=CacheArguments(mode, None if mode == "off" else str(cache)),
    )
    (folder / f"{name}-{args.process_index}.txt").write_text(str(forwards))
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
    runs = ("off", "auto", "read", "spread-auto", "spread-read")
    weights = [load_file(tmp_path / run / "medusa_lm_head.safetensors") for run in runs]
    for name, tensor in weights[0].items():
        for other in weights[1:]:
            torch.testing.assert_close(other[name], tensor, rtol=1e-5, atol=1e-6)
    ran = {
        run: [int((tmp_path / f"{run}-{rank}.txt").read_text()) for rank in range(2)]
        for run in runs
    }
    assert ran["read"] == ran["spread-read"] == [0, 0]
    # 9 batches of rows, 3 of held-out ones, each once; and one token for the dtype in each process.
    assert sum(ran["auto"]) == 9 + 3 + 2 and min(ran["auto"]) > 4
    assert ran["spread-auto"] == [max(ran["auto"])] * 2  # all run it together
    # Said once a run, not once a process: what will be written, what is read.
    assert done.stdout.count("Hidden states:") == 2 + 1 + 2 + 1
    for written in (tmp_path / "cache").rglob("*.states"):
        assert (tmp_path / "spread-cache" / written.relative_to(tmp_path / "cache")).exists()
