"""What heads take by the target's size, computed from shapes alone: the tables of docs/sizes.md.

    python -m scripts.pages.sizes

Memory is the estimate of `train-heads --dry_run`, for a GPU. Nothing here is measured.

Shapes: D hidden, V vocabulary, K heads, L layers, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config

from medusa_heads import HeadsConfig, TargetModel
from medusa_heads.tables import in_markdown
from medusa_heads.training.runs.dry_run import DryRun, TextSize, byte_size, plan_heads

ROWS, LENGTH = 8, 2048  # of a step's forward, as in configs/llama-3.1-8b.yaml
HEADS = HeadsConfig(num_heads=4)
# Sizes by `_NAMES`, and whether embeddings and lm_head are one matrix.
SHAPES: dict[str, tuple[Callable[..., PreTrainedConfig], tuple[int, ...], bool]] = {
    "Llama 3.2 1B": (LlamaConfig, (2048, 8192, 16, 32, 8, 128256), True),
    "Llama 3.2 3B": (LlamaConfig, (3072, 8192, 28, 24, 8, 128256), True),
    "Qwen 2.5 7B": (Qwen2Config, (3584, 18944, 28, 28, 4, 152064), False),
    "Llama 3.1 8B": (LlamaConfig, (4096, 14336, 32, 32, 8, 128256), False),
    "Qwen 2.5 14B": (Qwen2Config, (5120, 13824, 48, 40, 8, 152064), False),
    "Qwen 2.5 32B": (Qwen2Config, (5120, 27648, 64, 40, 8, 152064), False),
    "Llama 3.1 70B": (LlamaConfig, (8192, 28672, 80, 64, 8, 128256), False),
}
_NAMES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size",
)  # fmt: skip
# Only what a plan reads: on a machine without a GPU, real training arguments would name the CPU.
_ARGUMENTS: Any = SimpleNamespace(
    per_device_train_batch_size=ROWS,
    gradient_accumulation_steps=1,
    world_size=1,
    max_steps=1,
    device=torch.device("cuda"),
)


def shaped(name: str) -> TargetModel:
    """A target of a known shape, without weights."""
    kind, sizes, tied = SHAPES[name]
    config = kind(**dict(zip(_NAMES, sizes, strict=True)), tie_word_embeddings=tied)
    with torch.device("meta"):
        target = TargetModel(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
    target.freeze()
    return target


def training_operations(target: TargetModel, config: HeadsConfig, length: int) -> float:
    """Floating-point operations of a training step, for a token that is learnt.

    2 for each weight of the target but its vocabulary's, 2 L T D of its attention, which sees half
    a row on average, and 4 (V D + D^2) a head: a product forth, and one back.
    """
    ends: tuple[Any, ...] = (target.model.get_input_embeddings(), target.get_output_embeddings())
    vocabulary = {id(end.weight) for end in ends}
    matrices = [weight for weight in target.model.parameters() if id(weight) not in vocabulary]
    body = sum(weight.numel() for weight in matrices)
    width, layers = target.hidden_size, target.config.num_hidden_layers
    heads = 4 * config.num_heads * width * (target.vocab_size + config.num_layers * width)
    return 2 * body + 2 * layers * length * width + heads


def cache_bytes(target: TargetModel) -> int:
    """Keys and values of a token, in bf16."""
    config = target.config
    head = config.hidden_size // config.num_attention_heads
    return 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head


def planned(
    target: TargetModel, rows: int = ROWS, *, four_bits: bool = False, spread: int = 1
) -> DryRun:
    """As `train-heads --dry_run` plans it."""
    args = SimpleNamespace(**vars(_ARGUMENTS) | {"per_device_train_batch_size": rows})
    tokens = rows * LENGTH
    text = TextSize(rows, tokens, tokens, LENGTH)
    arguments: Any = args
    return plan_heads(target, HEADS, arguments, text, four_bits=four_bits, spread=spread)


def table() -> list[str]:
    """What each size has, as lines of markdown."""
    columns = [
        "shape of", "weights", "of training, the heads", "a checkpoint",
        "heads on disk, bf16", "KV cache of a token", "operations a token",
    ]  # fmt: skip
    rows = []
    for name in SHAPES:
        target = shaped(name)
        plan = planned(target)
        (learning,) = (size for part, size in plan.memory.items() if part.startswith("heads, "))
        cells = [
            name,
            byte_size(plan.memory["target's weights"]),
            byte_size(learning),
            byte_size(plan.disk["each checkpoint"]),
            byte_size(learning / 16 * 2),  # AdamW holds 16 bytes of a parameter, bf16 2
            byte_size(cache_bytes(target)),
            f"{training_operations(target, HEADS, LENGTH) / 1e9:.0f} G",
        ]
        rows.append(cells)
    return in_markdown((columns, rows)).splitlines()


@dataclass(frozen=True)
class Machine:
    """GPUs, the memory of each in bytes, and the operations a second that each is assumed to
    reach."""

    gpus: int
    memory: float
    rate: float

    def __str__(self) -> str:
        return f"{self.gpus} x {self.memory / 1e9:.0f} GB"


MACHINES = (Machine(1, 24e9, 50e12), Machine(1, 80e9, 200e12), Machine(8, 80e9, 200e12))
LEFT = 0.1  # of a GPU's memory, for attention, the allocator and CUDA itself
TOKENS = 10e6


def fitting(target: TargetModel, machine: Machine) -> tuple[str, int, float] | None:
    """How a target is held on a machine with the most rows a forward, how many they are, and the
    bytes of each GPU; None where it does not fit."""
    ways: dict[str, dict[str, Any]] = {"whole": {}, "FSDP": {"spread": machine.gpus}}
    if machine.gpus == 1:
        ways = {"whole": {}, "4 bits": {"four_bits": True}}
    for rows in (8, 4, 2, 1):
        for way, how in ways.items():
            needed = sum(planned(target, rows, **how).memory.values())
            if needed <= (1 - LEFT) * machine.memory:
                return way, rows, needed
    return None


def machines() -> list[str]:
    """What fits where, as lines of markdown."""
    rows = []
    for name in SHAPES:
        target, cells = shaped(name), [name]
        operations = TOKENS * training_operations(target, HEADS, LENGTH)
        for machine in MACHINES:
            found = fitting(target, machine)
            if found is None:
                cells.append("does not fit")
                continue
            way, count, needed = found
            hours = operations / (machine.gpus * machine.rate) / 3600
            cells.append(f"{way}, {count} rows: {byte_size(needed)}, {hours:.2g} h")
        rows.append(cells)
    return in_markdown((["shape of", *map(str, MACHINES)], rows)).splitlines()


if __name__ == "__main__":
    print("\n".join([*machines(), "", *table()]))
