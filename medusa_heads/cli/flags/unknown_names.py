"""What to say of a flag or a YAML key that a command does not have.

The name may be misspelt, may be what another library calls one of ours, or may belong to
transformers.TrainingArguments, whose fields go into `training_args`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from typing import Any

from medusa_heads.cli.flags.parser import transformers_file
from medusa_heads.files import parse_json

CONTAINER = "training_args"
_MOST_LISTED = 12
# What trl, peft, the Trainer's examples or older releases call a flag of ours.
_ELSEWHERE = {
    "batch_size": "per_device_train_batch_size",
    "dataset_name": "dataset",
    "epochs": "num_train_epochs",
    "eval_batch_size": "per_device_eval_batch_size",
    "lr": "learning_rate",
    "max_seq_length": "max_length",
    "model": "model_name_or_path",
    "model_name": "model_name_or_path",
    "num_epochs": "num_train_epochs",
    "output": "output_dir",
    "revision": "model_revision",
    "tp_plan": "tensor_parallel",
    "torch_dtype": "dtype",
    "train_batch_size": "per_device_train_batch_size",
    "use_peft": "joint",
    "warmup_ratio": "warmup_share",
}
_WITHOUT_FLAG = {
    "device": "runs take the accelerator if there is one; CUDA_VISIBLE_DEVICES chooses among "
    f"several, and --{CONTAINER} '{{\"use_cpu\": true}}' stays on the CPU",
    "push_to_hub": "push the heads with 'medusa-heads push' when they are trained",
}


def explain_flag(flag: str, value: str | None, known: Sequence[str]) -> str:
    """One sentence on an unknown flag, told as it was typed and with what was typed behind it."""
    name, assigned, inside = flag.lstrip("-").partition("=")
    name = name.replace("-", "_")
    if assigned:
        value = inside
    elif value is not None and value.startswith("--"):
        value = None
    belongs = f"--{CONTAINER} '{json.dumps({name: _read(value)})}'"
    return f"unknown argument {flag!r}{_hint(name, known, belongs, '--')}"


def explain_key(key: str, value: Any, known: Sequence[str]) -> str:
    """The end of a sentence on an unknown key of a YAML file, its value beside it."""
    try:
        told = json.dumps(value, default=str)
    except TypeError:  # a mapping by something else than names
        told = str(value)
    belongs = f"'{CONTAINER}: {{{key}: {told}}}'"
    return _hint(key, known, belongs, "")


def _hint(name: str, known: Sequence[str], belongs: str, dashes: str) -> str:
    trains = CONTAINER in known
    if trains and name.startswith("hub_"):
        name = "push_to_hub"
    if trains and name in _WITHOUT_FLAG:
        return f"; {_WITHOUT_FLAG[name]}"
    if (ours := _ELSEWHERE.get(name, "")) in known:
        return f"; did you mean '{dashes}{ours}'?"
    if trains and name in _trainer_fields():
        return f", a field of transformers.TrainingArguments; give it as {belongs}"
    if close := difflib.get_close_matches(name, known, n=1):
        return f"; did you mean '{dashes}{close[0]}'?"
    if len(known) > _MOST_LISTED:
        return "; --help lists the known ones"
    return f"; known: {', '.join(dashes + one for one in sorted(known))}"


def _read(value: str | None) -> Any:
    """A value of the command line as JSON would hold it; a flag alone is a switch."""
    if value is None:
        return True
    try:
        return parse_json(value.lower() if value in ("True", "False") else value)
    except json.JSONDecodeError:
        return value


def _trainer_fields() -> list[str]:
    """Names of the fields of transformers.TrainingArguments, read from its source: an import of it
    would bring torch and take seconds."""
    source = transformers_file("training_args.py").read_text("utf-8")
    return re.findall(r"^    (\w+): .+ = field\(", source, re.M)
