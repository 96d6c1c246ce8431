"""vLLM answers prompts in process: the text that the target's own generate() gives."""

import json
import subprocess
import sys
from pathlib import Path

from datasets import Dataset, load_from_disk

from medusa_heads.cli.verbs.regenerate import main
from tests.vllm.partly_trained import TARGET, prompts


def test_greedy_text_is_that_of_generate(environment: dict[str, str], tmp_path: Path) -> None:
    Dataset.from_dict({"input_ids": prompts()}).to_parquet(tmp_path / "prompts.parquet")

    def flags(name: str, share: str = "1") -> list[str]:
        given = ["--model_name_or_path", str(TARGET), "--output_dir", str(tmp_path / name)]
        given += ["--dataset", str(tmp_path / "prompts.parquet"), "--max_new_tokens", "40"]
        return [*given, "--dtype", "float32", "--greedy_share", share]

    def by_vllm(name: str, share: str) -> None:
        engine = {"enforce_eager": True, "max_model_len": 512, "max_num_seqs": 4}
        command = [sys.executable, "-m", "medusa_heads.cli.main", "regenerate", *flags(name, share)]
        command += ["--backend", "vllm", "--engine_args", json.dumps(engine)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    assert main(flags("home")) == 0
    by_vllm("greedy", "1")
    home = load_from_disk(str(tmp_path / "home"))
    assert load_from_disk(str(tmp_path / "greedy")).to_dict() == home.to_dict()
    by_vllm("drawn", "0.5")
    drawn = load_from_disk(str(tmp_path / "drawn"))
    assert len(drawn) == len(home) and drawn.to_dict() != home.to_dict()
