"""Train the demo's target model, or a better one, from Python sources on this machine.

    python -m scripts.demo.pretrain_target --output_dir runs/demo-target --minutes 55
    python -m scripts.demo.pretrain_target --output_dir runs/demo-target --resume
    python -m scripts.demo.pretrain_target --output_dir runs/hybrid --model_type qwen3_5_text
    train-heads --config configs/demo.yaml --model_name_or_path runs/demo-target/target

A byte-level BPE tokenizer and a small Llama, or a hybrid of equal size, are trained from scratch on
the running interpreter's standard library, less the packages held out for evaluation, and on some
installed packages. The output directory fills with `tokenizer/`, `blocks/`, the Trainer's
checkpoints and, at the end, `target/`: configuration, bf16 safetensors and tokenizer. Every step is
seeded: the same sources, versions, arguments (with `--bf16`, which otherwise this machine decides)
and number of threads give the same weights. All fields of transformers' TrainingArguments are flags
here too.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from datasets import Dataset, DatasetDict
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from medusa_heads.cli.flags.arguments import run_command
from medusa_heads.contents import is_model
from medusa_heads.data.corpus import standard_library
from medusa_heads.files import move_in, staging
from medusa_heads.machine.choice import choose
from medusa_heads.settings import at_least, flag
from scripts.demo.tokens import to_blocks, train_tokenizer

SHORTEST, LONGEST = 200, 200_000  # characters: neither empty package markers nor generated tables
TIMED_STEPS = 5


@dataclass
class TargetArguments:
    """What is trained, on what."""

    packages: list[str] = flag(
        ["sympy", "networkx", "pandas", "numpy", "fsspec", "rich"],
        "Installed packages to train on besides the standard library.",
    )
    max_files: int | None = flag(None, "Train on that many files only.")
    model_type: Literal["llama", "qwen3_5_text"] = flag(
        "llama", "qwen3_5_text: two gated delta layers to a layer of attention."
    )
    vocab_size: int = flag(4096, "Tokens in the vocabulary.")
    hidden_size: int = flag(384, "Width; heads are 64 wide each.")
    num_layers: int = flag(6, "Transformer layers.")
    sequence_length: int = flag(512, "Tokens per training sequence.")
    eval_sequences: int = flag(128, "Held-out sequences to measure on, 0 for all.")
    evaluate: str | None = flag(None, "Measure the model in this folder on held-out text, only.")

    def __post_init__(self) -> None:
        if self.hidden_size < 128 or self.hidden_size % 128:
            raise ValueError(f"hidden_size must be a multiple of 128, got {self.hidden_size}.")
        at_least(self, 1, "max_files", "num_layers", "sequence_length", "vocab_size")
        at_least(self, 0, "eval_sequences")


@dataclass
class PretrainArguments(TrainingArguments):
    """transformers' TrainingArguments with defaults for this model, and two fields more."""

    output_dir: str | None = "runs/demo-target"
    minutes: float | None = flag(
        None, "Time a few steps, then set --max_steps to fill that many minutes."
    )
    resume: bool = flag(False, "Go on from the last checkpoint, to the steps it was started for.")
    max_steps: int = 1150
    per_device_train_batch_size: int = 16
    per_device_eval_batch_size: int = 16
    learning_rate: float = 3e-3
    warmup_steps: float = 100
    lr_scheduler_type: str = "cosine_with_min_lr"
    lr_scheduler_kwargs: dict[str, Any] | str | None = field(
        default_factory=lambda: {"min_lr_rate": 0.05}
    )
    weight_decay: float = 0.1
    adam_beta2: float = 0.95
    bf16: bool | None = flag(  # type: ignore[assignment]
        None, "Train in bf16 autocast. Default: where this machine is faster so."
    )
    eval_strategy: str = "steps"
    eval_steps: float | None = 100
    save_steps: float = 100
    save_total_limit: int | None = 2
    logging_steps: float = 20

    def __post_init__(self) -> None:
        if not torch.accelerator.is_available():
            self.use_cpu = True  # asked for by name, the CPU may compute in bf16
        if self.bf16 is None:
            place = "cpu" if self.use_cpu else None
            choice = choose("train", device=place, count_threads=False)
            self.bf16 = choice.dtype == torch.bfloat16
            print(f"training: {choice}", file=sys.stderr)
        super().__post_init__()


def main(argv: list[str] | None = None) -> None:
    """Run the whole recipe; `argv` defaults to the command line."""
    kinds: Any = (TargetArguments, PretrainArguments)
    parser: Any = HfArgumentParser(kinds, allow_abbrev=False)
    parser.error = _refuse  # argparse would print the usage, several screens long
    arguments, training = parser.parse_args_into_dataclasses(args=argv)
    if arguments.evaluate is not None:
        evaluate(arguments.evaluate, arguments, training)
        return
    folder = Path(training.output_dir)
    checkpoint = get_last_checkpoint(folder) if folder.is_dir() else None
    if checkpoint is not None and not training.resume:
        raise ValueError(
            f"{folder} already holds a training: add --resume or choose another --output_dir."
        )
    tokenizer, blocks = prepare(arguments, folder, training.resume, training.seed)
    set_seed(training.seed)
    model = AutoModelForCausalLM.from_config(target_config(arguments, tokenizer))
    if checkpoint is not None:
        state = json.loads((Path(checkpoint) / "trainer_state.json").read_text())
        training.max_steps = state["max_steps"]  # the learning rate goes on along the same curve
    elif training.minutes is not None:
        training.max_steps = steps_within(training.minutes, arguments, training, model.config)
    print(
        f"Training {model.num_parameters() / 1e6:.1f} M parameters for {training.max_steps} steps "
        f"on {blocks['train'].num_rows * arguments.sequence_length / 1e6:.1f} M tokens.",
        flush=True,
    )
    trainer = Trainer(
        model, training, default_data_collator, blocks["train"], eval_dataset=blocks["held_out"]
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    print_held_out_loss(trainer)
    save_target(model, tokenizer, folder / "target")
    print(f"Wrote {folder / 'target'}")


def _refuse(message: str) -> NoReturn:
    raise ValueError(f"{message} (see --help)")


def prepare(
    arguments: TargetArguments, folder: Path, resume: bool, seed: int
) -> tuple[PreTrainedTokenizerFast, DatasetDict]:
    """Tokenizer and token blocks, from the output directory when resuming."""
    if resume and (folder / "blocks").is_dir():  # written last, so the tokenizer is there too
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
        return tokenizer, DatasetDict.load_from_disk(folder / "blocks")
    texts = training_texts(arguments, seed)
    characters = sum(map(len, texts))
    print(f"Training a tokenizer on {len(texts)} files, {characters / 1e6:.1f} M characters.")
    tokenizer = train_tokenizer(texts, arguments.vocab_size)
    blocks = DatasetDict(
        train=to_blocks(texts, tokenizer, arguments.sequence_length),
        held_out=held_out_blocks(arguments, tokenizer, seed),
    )
    tokenizer.save_pretrained(folder / "tokenizer")
    with staging(folder) as made:
        blocks.save_to_disk(made / "blocks")
        shutil.rmtree(folder / "blocks", ignore_errors=True)
        move_in(made, folder, ["blocks"])
    return tokenizer, DatasetDict.load_from_disk(folder / "blocks")


def training_texts(arguments: TargetArguments, seed: int) -> list[str]:
    """Sources to train on, in a seeded order; none of the packages held out for evaluation."""
    texts = list(standard_library("train")["text"])
    site_packages = Path(sysconfig.get_path("purelib"))
    for package in arguments.packages:
        if not (site_packages / package).is_dir():
            raise ValueError(
                f"Package {package!r} is not installed in {site_packages}: "
                "install it or name other --packages."
            )
        for file in sorted((site_packages / package).rglob("*.py")):
            text = file.read_text(encoding="utf-8", errors="replace")
            if SHORTEST < len(text) < LONGEST:
                texts.append(text)
    random.Random(seed).shuffle(texts)
    return texts[: arguments.max_files]


def held_out_blocks(
    arguments: TargetArguments, tokenizer: PreTrainedTokenizerFast, seed: int
) -> Dataset:
    """The first blocks of the held-out packages, their files in a seeded order."""
    texts = list(standard_library("held_out")["text"])
    random.Random(seed).shuffle(texts)
    blocks = to_blocks(texts, tokenizer, arguments.sequence_length)
    return blocks.take(min(arguments.eval_sequences or blocks.num_rows, blocks.num_rows))


def target_config(
    arguments: TargetArguments, tokenizer: PreTrainedTokenizerFast
) -> PretrainedConfig:
    """A Llama with grouped-query attention, three query heads of 64 to a key-value head at 384, or
    a hybrid of as many parameters: what its layers have more for mixing, their MLPs have less."""
    width, heads = arguments.hidden_size, arguments.hidden_size // 64
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "num_hidden_layers": arguments.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if arguments.model_type == "llama":
        return LlamaConfig(**common, intermediate_size=width * 8 // 3)
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    return Qwen3_5TextConfig(
        **common,
        intermediate_size=width * 2,
        layer_types=[kinds[layer % 3] for layer in range(arguments.num_layers)],
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
    )


def steps_within(
    minutes: float,
    arguments: TargetArguments,
    training: PretrainArguments,
    config: PretrainedConfig,
) -> int:
    """How many training steps fit, from a few timed on a throw-away model."""
    model = AutoModelForCausalLM.from_config(config).to(training.device)
    shape = (training.per_device_train_batch_size, arguments.sequence_length)
    input_ids_BT = torch.randint(config.vocab_size, shape, device=training.device)
    for step in range(TIMED_STEPS + 1):
        if step == 1:  # the first step warms up
            start = time.perf_counter()
        with torch.autocast(training.device.type, torch.bfloat16, enabled=bool(training.bf16)):
            loss = model(input_ids=input_ids_BT, labels=input_ids_BT).loss
        loss.backward()
        loss.item()  # waits for an accelerator
    seconds = (time.perf_counter() - start) / TIMED_STEPS * training.gradient_accumulation_steps
    steps = max(1, int(minutes * 60 / seconds))
    print(f"One step takes {seconds:.2f} s; --max_steps {steps} repeats this run exactly.")
    return steps


def evaluate(folder: str, arguments: TargetArguments, training: PretrainArguments) -> None:
    """Print the held-out loss of a finished model; nothing is written."""
    if not is_model(folder):
        raise ValueError(
            f"--evaluate wants the folder of a model, such as OUT/target, got {folder}"
        )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    blocks = held_out_blocks(arguments, tokenizer, training.seed)
    print_held_out_loss(Trainer(model, training, default_data_collator, eval_dataset=blocks))


def print_held_out_loss(trainer: Trainer) -> None:
    """One line: the mean loss over the evaluation sequences, in nats per token."""
    print(f"Held-out loss: {trainer.evaluate()['eval_loss']:.4f} nats per token")


def save_target(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the finished model in bf16 beside its place, then put it there in one move."""
    with staging(folder.parent) as beside:
        model.bfloat16().save_pretrained(beside / folder.name)
        tokenizer.save_pretrained(beside / folder.name)
        shutil.rmtree(folder, ignore_errors=True)
        move_in(beside, folder.parent, [folder.name])


if __name__ == "__main__":
    raise SystemExit(run_command(main, prog="scripts.demo.pretrain_target"))
