"""Everything of a run but its steps: what it would train, on how much, and what that takes.

The target is built from its configuration on the meta device: no weight is read, and a model of any
size is planned for on any machine.

Shapes: B batch, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from medusa_heads.config import HeadsConfig
from medusa_heads.heads import KINDS
from medusa_heads.target.target import TargetModel
from medusa_heads.training.loss.chunks import chunk_pairs
from medusa_heads.training.loss.row_blocks import BLOCK_FEATURES_CPU, BLOCK_FEATURES_GPU

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import TrainingArguments

    from medusa_heads.training.arguments.joint_config import JointConfig

_ADAMW_BYTES = 16  # of a parameter: itself, its gradient and two moments, all fp32
_BITS_4 = 0.5 + 1 / 64  # bytes of a weight: its own, and the 8-bit scale that 64 of them share
_LOGIT_COPIES = 3  # of a chunk: logits, and the target's probabilities and their logarithms
_LAYER_COPIES = 4  # of the stream's width, beside the wide part of the widest layer


@dataclass(frozen=True)
class TextSize:
    """How much text a run learns from; None where a stream does not say."""

    rows: int | None
    tokens: int | None
    learnt: int | None
    longest_row: int


@dataclass(frozen=True)
class Plan:
    """What a run would be.

    Attributes:
        target: class, size and dtype.
        learner: what is trained: its kind, and its shape and size.
        text: to learn from.
        steps: optimiser steps.
        rows_a_step: over all processes.
        memory: estimated bytes of each process, by what they are for.
        disk: bytes, by what they are for.
    """

    target: str
    learner: tuple[str, str]
    text: TextSize
    steps: int
    rows_a_step: int
    memory: Mapping[str, float]
    disk: Mapping[str, float]


def plan_heads(
    target: TargetModel,
    config: HeadsConfig,
    args: TrainingArguments,
    text: TextSize,
    *,
    four_bits: bool = False,
    joint: JointConfig | None = None,
) -> Plan:
    """Steps, memory and disk of a run.

    The memory of activations is an estimate for targets of dense layers, without that of the
    attention's own kernel.

    Args:
        target: may be on the meta device.
        config: of the heads.
        args: of the run.
        text: to learn from.
        four_bits: the target's linear layers are quantised.
        joint: an adapter of the target learns too.
    """
    config = config.for_target(target.hidden_size, target.vocab_size)
    with torch.device("meta"):
        heads = _size(KINDS[config.kind](config))
    rows_a_step, steps = _steps(args, text)
    tokens = args.per_device_train_batch_size * text.longest_row
    element, width, wide = _widths(target)
    on_cpu = args.device.type == "cpu"
    block = BLOCK_FEATURES_CPU if on_cpu else BLOCK_FEATURES_GPU
    block = min(block, tokens * width * config.num_heads)
    memory = {
        "target's weights": weight_bytes(target, four_bits=four_bits),
        "heads, gradients, AdamW": heads * _ADAMW_BYTES,
        "target's forward": tokens * (2 * wide + _LAYER_COPIES * width) * element,
        "heads' activations": tokens * width * 8 + block * 4 * (config.num_layers + 2),
        "a chunk of logits": _chunk(tokens * config.num_heads, config.num_candidates, args),
    }
    trained = heads
    if joint is not None:
        adapter = adapter_size(target, joint)
        trained += adapter
        memory["adapter, gradients, AdamW"] = adapter * _ADAMW_BYTES
        # What each layer keeps for the backward pass.
        layers = target.config.num_hidden_layers
        of_layer = tokens * (4 * wide + 12 * width) * element
        memory["target's backward"] = of_layer * (1 if args.gradient_checkpointing else layers)
    disk = {"each checkpoint": trained * 12.0}
    if text.learnt is not None:
        kept = text.tokens if config.prefix_attention else text.learnt
        disk["hidden states, if cached"] = float(kept or 0) * width * element
    matrix = f"{config.vocab_matrix} vocabulary matrix"
    kind = f"{config.num_heads} {config.kind} heads of {config.num_layers} blocks, {matrix}"
    learner = ("heads", f"{kind}: {count(heads)} parameters")
    return Plan(_named(target, four_bits), learner, text, steps, rows_a_step, memory, disk)


def plan_draft(
    target: TargetModel,
    draft: nn.Module,
    args: TrainingArguments,
    text: TextSize,
    *,
    four_bits: bool = False,
) -> Plan:
    """The same for a draft model; arguments as those of `plan_heads`, and the model in fp32."""
    rows_a_step, steps = _steps(args, text)
    tokens = args.per_device_train_batch_size * text.longest_row
    element, width, wide = _widths(target)
    small = TargetModel(draft)  # type: ignore[arg-type]
    _, small_width, small_wide = _widths(small)
    size, layers = _size(draft), small.config.num_hidden_layers
    memory = {
        "target's weights": weight_bytes(target, four_bits=four_bits),
        "draft model, gradients, AdamW": size * _ADAMW_BYTES,
        "target's forward": tokens * (2 * wide + _LAYER_COPIES * width) * element,
        "draft model's backward": tokens * layers * (4 * small_wide + 12 * small_width) * 4.0,
        "chunks of logits": 2 * _chunk(tokens, target.vocab_size, args),  # the target's too
    }
    kind = f"{type(draft).__name__} of {layers} layers"
    learner = ("draft model", f"{kind}: {count(size)} parameters, {size / _size(target.model):.0%}")
    disk = {"each checkpoint": size * 12.0}
    return Plan(
        _named(target, four_bits),
        (learner[0], f"{learner[1]} of the target's"),
        text,
        steps,
        rows_a_step,
        memory,
        disk,
    )


def _steps(args: TrainingArguments, text: TextSize) -> tuple[int, int]:
    """Rows a step over all processes, and optimiser steps."""
    rows_a_step = (
        args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    )
    if args.max_steps > 0:
        return rows_a_step, args.max_steps
    assert text.rows is not None, "a stream needs max_steps"
    return rows_a_step, math.ceil(math.ceil(text.rows / rows_a_step) * args.num_train_epochs)


def _widths(model: TargetModel) -> tuple[int, int, int]:
    """Bytes of a number, the width of the stream, and that within a feed-forward block."""
    width = model.hidden_size
    wide = getattr(model.config, "intermediate_size", None) or 4 * width
    return model.dtype.itemsize, width, wide


def _chunk(pairs: int, vocab_size: int, args: TrainingArguments) -> float:
    """Bytes of the logits, and what stands beside them, of as many pairs as are held at a time."""
    held = min(chunk_pairs(vocab_size, args.device.type, torch.float32), pairs)
    return held * vocab_size * torch.float32.itemsize * _LOGIT_COPIES


def _named(target: TargetModel, four_bits: bool) -> str:
    stored = "4 bits" if four_bits else str(target.dtype).removeprefix("torch.")
    return f"{type(target.model).__name__}, {count(_size(target.model))} parameters, {stored}"


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _inner_matrices(target: TargetModel) -> list[nn.Linear]:
    """All linear layers but the lm_head, which is neither quantised nor adapted."""
    lm_head = target.get_output_embeddings()
    modules = target.model.modules()
    return [m for m in modules if isinstance(m, nn.Linear) and m is not lm_head]


def weight_bytes(target: TargetModel, *, four_bits: bool = False) -> float:
    """Bytes of all weights; quantisation leaves embeddings, norms and the lm_head as they are."""
    stored = sum(weight.numel() * weight.dtype.itemsize for weight in target.model.parameters())
    if not four_bits:
        return stored
    inner = [matrix.weight for matrix in _inner_matrices(target)]
    return stored - sum(weight.numel() * (weight.dtype.itemsize - _BITS_4) for weight in inner)


def adapter_size(target: TargetModel, joint: JointConfig) -> int:
    """Parameters of a LoRA adapter."""
    ends = joint.target_modules
    names = {id(module): name for name, module in target.model.named_modules()}
    return sum(
        joint.lora_r * (matrix.in_features + matrix.out_features)
        for matrix in _inner_matrices(target)
        if isinstance(ends, str) or names[id(matrix)].endswith(tuple(ends))
    )


def show_plan(plan: Plan, console: Console) -> None:
    """Print a plan, one line a fact."""
    from rich.table import Table

    table = Table(title="Dry run: nothing is trained, nothing written", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    text = plan.text
    size = "a stream"
    if text.rows is not None:
        size = f"{text.rows:,} rows, {text.tokens:,} tokens, {text.learnt:,} of them learnt"
    table.add_row("target", plan.target)
    table.add_row(*plan.learner)
    table.add_row("text", f"{size}; longest row {text.longest_row}")
    table.add_row("steps", f"{plan.steps:,} of {plan.rows_a_step} rows")
    table.add_section()
    for name, needed in plan.memory.items():
        table.add_row(f"memory: {name}", byte_size(needed))
    table.add_row("memory of a process, about", byte_size(sum(plan.memory.values())))
    table.add_section()
    for name, needed in plan.disk.items():
        table.add_row(f"disk: {name}", byte_size(needed))
    console.print(table)


def count(number: float) -> str:
    """For example `8.03 B`."""
    for limit, unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.0f}"


def byte_size(number: float) -> str:
    """For example `16.1 GB`."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return f"{number:.0f} B"


def text_size(rows: Any, learnt: int) -> TextSize:
    """Of a table of rows, packed or not."""
    lengths = [len(ids) for ids in rows.with_format("numpy")["input_ids"]]
    return TextSize(len(lengths), sum(lengths), learnt, max(lengths))
