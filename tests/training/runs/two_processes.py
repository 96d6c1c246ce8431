"""Run by two processes at once: `train-heads` several times, each into a folder of its own.

Arguments: a folder for everything, the name of the launch, those of its runs with commas between,
then the flags that all runs share.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from medusa_heads.cli.train_heads import main
from medusa_heads.inference.regeneration.transformers_backend import TransformersBackend
from medusa_heads.target import fingerprint
from medusa_heads.training.measure import report
from tests.training.processes import die_in_step

FOLDER, LAUNCH, NAMES, FLAGS = Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(","), sys.argv[4:]
OUTPUT = FOLDER / LAUNCH
CORPUS = ["--num_prompts", "8", "--num_eval_prompts", "4", "--prompt_length", "6"]
RUNS = {
    "plain": [],
    "accumulated": ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2"],
    "resumed": ["--resume_from_checkpoint", str(OUTPUT / "plain" / "checkpoint-4")],
    "sharded": ["--shard_target"],
    "fitted": ["--linear_shortcut", "--induction"],
    "distilled": ["--self_distill", *CORPUS],
    "stopped": ["--load_best_model_at_end", "--early_stopping_patience", "1", "--save_steps", "1"],
    "joint": ["--joint", "--joint_warmup_steps", "2", "--lora_r", "4"],
    "otherwise": [],
    "killed": [],
    "revived": ["--resume_from_checkpoint", "last", "--output_dir", str(OUTPUT / "killed")],
}
OTHER_FSDP = {
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer,LlamaMLP",
    "FSDP_RESHARD_AFTER_FORWARD": "false",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
answered = 0
hashed: set[str] = set()  # the runs in which this process hashed weights
report.draw_plots = lambda *_: []  # as in the process that compares


def run() -> None:
    """All runs; what each process generated and hashed is written down."""
    answer = TransformersBackend.answer

    def counted(*args: Any) -> Any:
        global answered
        for answers in answer(*args):
            answered += len(answers)
            yield answers

    hash_tensor = fingerprint._hash_tensor

    def counted_too(digest: Any, tensor: Any) -> None:
        hashed.add(name)
        hash_tensor(digest, tensor)

    TransformersBackend.answer = counted  # type: ignore[method-assign, assignment]
    fingerprint._hash_tensor = counted_too
    for name in NAMES:
        if name == "killed":
            die_in_step(6)
        before = dict(os.environ)
        os.environ.update(OTHER_FSDP if name == "otherwise" else {})
        flags = FLAGS
        if name == "distilled":
            flags = [flag.replace("rows.jsonl", "corpus.jsonl") for flag in FLAGS]
        code = main([*flags, "--output_dir", str(OUTPUT / name), *RUNS[name]])
        assert code == 0, f"{name}: exit code {code}"
        for changed in OTHER_FSDP:
            os.environ.pop(changed, None)
            os.environ.update({changed: before[changed]} if changed in before else {})
    counts = {"answered": answered, "hashed": sorted(hashed)}
    (OUTPUT / f"counts-{os.environ['RANK']}.json").write_text(json.dumps(counts))


run()
