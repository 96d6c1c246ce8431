"""Run by two processes at once: `train-heads` several times, each into a folder of its own.

Arguments: a folder for everything, then the flags that all runs share.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from medusa_heads.cli.train_heads import main
from medusa_heads.inference.regeneration.transformers_backend import TransformersBackend

FOLDER, FLAGS = Path(sys.argv[1]), sys.argv[2:]
CORPUS = ["--dataset", str(FOLDER / "corpus.jsonl"), "--num_prompts", "8"]
RUNS = {
    "plain": [],
    "accumulated": ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2"],
    "resumed": ["--resume_from_checkpoint", str(FOLDER / "plain" / "checkpoint-4")],
    "sharded": ["--shard_target"],
    "distilled": ["--self_distill", *CORPUS, "--num_eval_prompts", "4", "--prompt_length", "6"],
}
answered = 0


def run() -> None:
    """All runs; what each process generated is written down."""
    answer = TransformersBackend.answer

    def counted(self: Any, prompts: Any, *args: Any) -> None:
        global answered
        answered += len(prompts)
        answer(self, prompts, *args)

    TransformersBackend.answer = counted  # type: ignore[method-assign, assignment]
    for name, more in RUNS.items():
        code = main([*FLAGS, "--output_dir", str(FOLDER / name), *more])
        assert code == 0, f"{name}: exit code {code}"
    (FOLDER / f"answered-{os.environ['RANK']}.json").write_text(json.dumps(answered))


run()
