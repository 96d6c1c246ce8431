"""Everything of a run but its steps: what it would train, on how much, and what that takes by the
sizes of matrices. What it takes here is measured elsewhere (`rehearsal.py`).

The target is built from its configuration on the meta device: no weight is read, and a model of any
size is planned for on any machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.filesize import decimal, pick_unit_and_suffix
from rich.table import Table
from torch import nn
from transformers import TrainingArguments

from medusa_heads.config import HeadsConfig
from medusa_heads.heads import KINDS
from medusa_heads.heads.block import AT_ONCE
from medusa_heads.target.layers import layer_lists
from medusa_heads.target.mtp import empty_mtp, own_parts
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.joint_config import JointConfig
from medusa_heads.training.arguments.renamed import CHECKPOINTING
from medusa_heads.training.data.columns import row_lengths
from medusa_heads.training.loss.fused import chunk_pairs
from medusa_heads.training.loss.heads import BLOCK_FEATURES_CPU, BLOCK_FEATURES_GPU
from medusa_heads.training.runs.unrolled import check_depths

_ADAMW_BYTES = 16  # of a parameter: itself, its gradient and two moments, all fp32
_SAVED_BYTES = 12.0  # without the gradient
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


def text_size(rows: Any, learnt: int) -> TextSize:
    """Of a table of rows, packed or not."""
    lengths = row_lengths(rows)
    return TextSize(len(lengths), int(lengths.sum(dtype=np.int64)), learnt, int(lengths.max()))


@dataclass(frozen=True)
class DryRun:
    """What a run would be: what the target is, what learns from how much text, and the estimated
    bytes of each process's memory and of the disk, by what they are for."""

    target: str
    learner: tuple[str, str]
    text: TextSize
    args: TrainingArguments
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
    spread: int = 1,
) -> DryRun:
    """Steps, memory and disk of a run, on a target that may be on the meta device, and that so many
    processes share. The memory of activations is an estimate for targets of dense layers, without
    that of the attention's own kernel."""
    config = config.for_target(target.hidden_size, target.vocab_size)
    target = target.with_features(config.features)
    with torch.device("meta"):
        heads = _size(KINDS[config.kind](config))
    tokens = args.per_device_train_batch_size * text.longest_row
    element, width, wide = _widths(target)
    block = BLOCK_FEATURES_CPU if args.device.type == "cpu" else BLOCK_FEATURES_GPU
    block = min(block, tokens * width * config.num_heads)
    read = tokens * target.width
    if config.induction:
        read += tokens * width * config.num_heads
    if config.kind == "block":
        read += tokens * width * (config.num_heads - 1)
        block += min(AT_ONCE, tokens * width * config.num_heads * 16 * config.num_layers)
    memory = {
        "target's weights": weight_bytes(target, four_bits=four_bits, spread=spread),
        "heads, gradients, AdamW": heads * _ADAMW_BYTES,
        "target's forward": _forward(target, tokens),
        "heads' activations": read * 8 + block * 4 * (config.num_blocks + 2),
        "a chunk of logits": _chunk(tokens * config.num_heads, config.num_candidates, args),
    }
    trained = heads
    if joint is not None:
        adapter = adapter_size(target, joint)
        trained += adapter
        memory["adapter, gradients, AdamW"] = adapter * _ADAMW_BYTES
        # What each layer keeps for the backward pass.
        again = any(getattr(args, name, False) for name in CHECKPOINTING)
        layers = 1 if again else target.config.num_hidden_layers
        memory["target's backward"] = layers * tokens * (4 * wide + 12 * width) * element
    disk = {"each checkpoint": trained * _SAVED_BYTES}
    if text.learnt is not None:
        kept = text.tokens if config.reads_text else text.learnt
        disk["hidden states, if cached"] = float(kept or 0) * target.width * element
    matrix = f"{config.vocab_matrix} vocabulary matrix"
    part = "layer" if config.kind == "block" else "block"
    parts = f"{config.num_layers} {part}{'s' if config.num_layers > 1 else ''}"
    kind = f"{config.num_heads} {config.kind} heads of {parts}, {matrix}"
    if config.draft_vocab_size is not None:
        kind += f", drafting {config.draft_vocab_size:,} of {target.vocab_size:,} tokens"
    if getattr(config.decoder, "norm_output", False):
        kind += ", that go on from what stands behind the last norm"
    learner = ("heads", f"{kind}: {count(heads)} parameters")
    return DryRun(_named(target, four_bits), learner, text, args, memory, disk)


def plan_modules(
    target: TargetModel, depths: int | None, args: TrainingArguments, text: TextSize
) -> DryRun:
    """The same for the target's own modules, which train in fp32. Raises ValueError: it brings
    none."""
    modules = empty_mtp(target)
    depths = check_depths(modules, depths)
    size = _size(own_parts(modules))
    tokens = args.per_device_train_batch_size * text.longest_row
    _, width, wide = _widths(target)
    memory = {
        "target's weights": weight_bytes(target),
        "modules, gradients, AdamW": size * _ADAMW_BYTES,
        "target's forward": _forward(target, tokens),
        "modules' backward": tokens * depths * (4 * wide + 12 * width) * 4.0,
        "a chunk of logits": _chunk(tokens * depths, target.vocab_size, args),
    }
    kind = f"{len(modules.layers)} modules in {depths} depths: {count(size)} parameters"
    disk = {"each checkpoint": size * _SAVED_BYTES}
    learner = ("multi-token-prediction modules", kind)
    return DryRun(_named(target, False), learner, text, args, memory, disk)


def plan_draft(
    target: TargetModel,
    draft: nn.Module,
    args: TrainingArguments,
    text: TextSize,
    *,
    four_bits: bool = False,
) -> DryRun:
    """The same for a draft model, which trains in fp32."""
    tokens = args.per_device_train_batch_size * text.longest_row
    small = TargetModel(draft)  # type: ignore[arg-type]
    _, width, wide = _widths(small)
    size, layers = _size(draft), small.config.num_hidden_layers
    memory = {
        "target's weights": weight_bytes(target, four_bits=four_bits),
        "draft model, gradients, AdamW": size * _ADAMW_BYTES,
        "target's forward": _forward(target, tokens),
        "draft model's backward": tokens * layers * (4 * wide + 12 * width) * 4.0,
        "chunks of logits": 2 * _chunk(tokens, target.vocab_size, args),  # the target's too
    }
    share = f"{size / _size(target.model):.0%} of the target's"
    kind = f"{type(draft).__name__} of {layers} layers: {count(size)} parameters, {share}"
    disk = {"each checkpoint": size * _SAVED_BYTES}
    return DryRun(_named(target, four_bits), ("draft model", kind), text, args, memory, disk)


def _forward(target: TargetModel, tokens: int) -> float:
    element, width, wide = _widths(target)
    # Features are held twice: as they came out, and side by side.
    features = 2 * len(target.features) * width
    return tokens * (2 * wide + _LAYER_COPIES * width + features) * element


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


def _inner_matrices(target: TargetModel) -> dict[str, nn.Linear]:
    """All linear layers but the lm_head, which is neither quantised nor adapted."""
    lm_head = target.get_output_embeddings()
    modules = target.model.named_modules()
    return {name: m for name, m in modules if isinstance(m, nn.Linear) and m is not lm_head}


def weight_bytes(target: TargetModel, *, four_bits: bool = False, spread: int = 1) -> float:
    """Bytes of all weights, or of a process's part where several share them; quantisation leaves
    embeddings, norms and the lm_head as they are."""

    def stored_in(module: Any) -> float:
        return float(sum(weight.numel() * weight.dtype.itemsize for weight in module.parameters()))

    stored = stored_in(target.model)
    if spread > 1:  # each its part, and two gathered: the layer that runs, and the next
        layers = [stored_in(layer) for part in layer_lists(target.model).values() for layer in part]
        return stored - sum(layers) * (1 - 1 / spread) + 2 * max(layers)
    if not four_bits:
        return stored
    inner = [matrix.weight for matrix in _inner_matrices(target).values()]
    return stored - sum(weight.numel() * (weight.dtype.itemsize - _BITS_4) for weight in inner)


def adapter_size(target: TargetModel, joint: JointConfig) -> int:
    """Parameters of a LoRA adapter."""
    ends = joint.target_modules
    return sum(
        joint.lora_r * (matrix.in_features + matrix.out_features)
        for name, matrix in _inner_matrices(target).items()
        if isinstance(ends, str) or name.endswith(tuple(ends))
    )


def show_plan(plan: DryRun, console: Console) -> None:
    """Print a plan, one line a fact."""
    text, args = plan.text, plan.args
    step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    steps = args.max_steps
    if steps <= 0:
        assert text.rows is not None, "a stream needs max_steps"
        steps = math.ceil(math.ceil(text.rows / step) * args.num_train_epochs)
    size = "a stream"
    if text.rows is not None:
        size = f"{text.rows:,} rows, {text.tokens:,} tokens, {text.learnt:,} of them learnt"
    table = Table(title="Dry run: nothing is trained, nothing kept", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row("target", plan.target)
    table.add_row(*plan.learner)
    table.add_row("text", f"{size}; longest row {text.longest_row}")
    table.add_row("steps", f"{steps:,} of {step} rows", end_section=True)
    for name, needed in plan.memory.items():
        table.add_row(f"memory: {name}", byte_size(needed))
    whole = byte_size(sum(plan.memory.values()))
    table.add_row("memory of a process, computed", whole, end_section=True)
    for name, needed in plan.disk.items():
        table.add_row(f"disk: {name}", byte_size(needed))
    console.print(table)


def count(number: float) -> str:
    """For example `8.03 B`."""
    unit, suffix = pick_unit_and_suffix(round(number), ["", " k", " M", " B"], 1000)
    return f"{number / unit:.3g}{suffix}"


def byte_size(number: float) -> str:
    """For example `16.1 GB`."""
    return decimal(round(number))
