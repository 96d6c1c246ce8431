"""Two processes (gloo, CPU) started by the shipped accelerate configuration."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from medusa_heads.cli.train_heads import main
from medusa_heads.target import TargetModel
from tests.training.conftest import VOCAB

ROOT = Path(__file__).parents[2]


def write_target(folder: Path, target: TargetModel) -> None:
    target.model.save_pretrained(folder / "target")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder / "target")


@pytest.mark.slow
def test_two_processes_learn_what_one_does_with_twice_the_batch(
    target: TargetModel, tmp_path: Path
) -> None:
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
    flags += ["--training_args", '{"use_cpu": true, "disable_tqdm": true}']
    batch = "--per_device_train_batch_size"
    assert main([*flags, batch, "8", "--output_dir", str(tmp_path / "one")]) == 0

    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
    launch += ["--config_file", str(ROOT / "configs/accelerate/ddp.yaml"), "--main_process_port"]
    script = str(Path(__file__).with_name("two_processes.py"))
    done = subprocess.run(
        [*launch, "0", script, str(tmp_path), *flags, batch, "4"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

    expected = load_file(tmp_path / "one" / "medusa_lm_head.safetensors")
    start = load_file(tmp_path / "one" / "checkpoint-4" / "model.safetensors")
    assert any((start[f"heads.{k}"] - v).abs().max() > 1e-3 for k, v in expected.items())
    files = {path.name for path in (tmp_path / "one").iterdir()}
    for name in ("plain", "accumulated", "resumed", "sharded"):
        found = load_file(tmp_path / name / "medusa_lm_head.safetensors")
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-6)
        run = yaml.safe_load((tmp_path / name / "run.yaml").read_text())
        assert run["target_weights_sha256"] == target.weights_digest()
    assert {path.name for path in (tmp_path / "plain").iterdir()} == files
    assert {path.name for path in (tmp_path / "sharded").iterdir()} == files
    parts = {path.name for path in (tmp_path / "plain" / "checkpoint-8").iterdir()}
    assert {"rng_state_0.pth", "rng_state_1.pth", "run.yaml", "trainer_state.json"} <= parts
    answered = [json.loads((tmp_path / f"answered-{r}.json").read_text()) for r in (0, 1)]
    assert answered == [12, 0], "the first process writes the text, the other reads it"
