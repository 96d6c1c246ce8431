"""What fresh heads begin with, by what is measured on some text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import cycle, islice
from typing import Any

import torch
from accelerate.utils import send_to_device
from datasets import Dataset
from torch import Tensor, nn
from torch.func import functional_call
from transformers import TrainingArguments

from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.heads import DecoderHeads, DraftHeads
from medusa_heads.heads.prefix import PrefixLayer
from medusa_heads.heads.vocabulary import is_plain
from medusa_heads.target.layers import decoder_layers
from medusa_heads.training.arguments.batch import rows_of_all
from medusa_heads.training.data.prepare import TrainingData
from medusa_heads.training.hidden.states import DrawnOrder, HiddenStates
from medusa_heads.training.loss.least_squares import (
    FEWEST_ROWS_A_COLUMN,
    ROWS_A_COLUMN,
    begins_with_least_squares,
    columns,
    fit_linear,
)

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")

FITTED_SHARE = 0.25
"""Of the rows that a run reads in all its passes, those by which fresh heads are fitted before."""


def scale_fresh(
    heads: DraftHeads, hidden_states: HiddenStates, text: Dataset, batch_size: int
) -> None:
    """Let fresh heads whose output is normalised be as sure as the target, by the first row of a
    text, read in the batch in which an evaluation reads it: in others it rounds differently."""
    if isinstance(heads, DecoderHeads):
        rows = [text[place] for place in range(min(batch_size, len(text)))]
        some = send_to_device(hidden_states.collate(rows), hidden_states.target.device)
        heads.scale_to(hidden_states.of(some)[:1, : len(rows[0]["input_ids"])])


@torch.no_grad()
def attend_as_target(heads: DraftHeads, model: Any) -> bool:
    """Let a fresh prefix layer compare positions as the target's last layer does, and read of them
    what that reads; whether it does. Which positions tell what comes next, a run would else have to
    find out (docs/benchmarks/recipes.md, "A prefix layer that attends as the target"). What the
    heads say stays the same: the layer's output is nothing yet.

    Only where the target's layer has plain matrices of queries, keys and values, and heads of the
    prefix layer's width or a multiple of it. Processes that share a target take part together.
    """
    layer, found = heads.prefix, _attention_of_last_layer(model)
    if not isinstance(layer, PrefixLayer) or found is None:
        return False
    norm, attention = found
    linears = [getattr(attention, name) for name in _PROJECTIONS]
    width, of_head = len(layer.down.weight), getattr(attention, "head_dim", None)
    queries, keys, values = (linear.weight.shape for linear in linears)
    if not of_head or of_head % (width // layer.num_attention_heads) or keys[0] % of_head:
        return False
    if queries != (width, width) or keys != values or keys[1] != width:
        return False
    weights = [_whole(linear.weight).to(layer.down.weight) for linear in linears]
    # As much sharper or blunter as this target's scores are than usual ones of its heads' width.
    weights[0] = weights[0] * (getattr(attention, "scaling", None) or of_head**-0.5) * of_head**0.5
    layer.attend_as(weights, width // of_head, _scales(norm, weights[0]))
    return True


def _attention_of_last_layer(model: Any) -> tuple[nn.Module, nn.Module] | None:
    """The norm before it and itself, where it has linear layers for queries, keys and values, and
    nothing else behind these."""
    try:
        last = decoder_layers(model, "")[-1]
    except UnsupportedArchitecture:
        return None
    for module in last.modules():
        linears = [getattr(module, name, None) for name in _PROJECTIONS]
        if all(type(linear) is nn.Linear and linear.bias is None for linear in linears):
            weights = [linear.weight for linear in linears if linear is not None]
            norm: nn.Module | None = getattr(last, "input_layernorm", None)
            names = [name for name, _ in module.named_children()]
            normed = any("norm" in name and name.startswith(("q", "k")) for name in names)
            if norm is None or normed:
                return None
            plain = all(is_plain(weight) and not weight.is_meta for weight in weights)
            return (norm, module) if plain else None
    return None


def _scales(norm: nn.Module, like_XD: Tensor) -> Tensor:
    """What a norm multiplies each number by [D], whether it takes off the mean or not, adds a bias
    or not, and keeps its weights less one or not. It runs on its own device, where accelerate
    would hand on what it is given."""
    parts = {name: _whole(part).to(like_XD.dtype) for name, part in norm.named_parameters()}
    device = next((part.device for part in parts.values()), like_XD.device)
    signs_D = like_XD.new_ones(like_XD.shape[1], device=device)
    signs_D[::2] = -1
    up_D, down_D = (functional_call(norm, parts, (sign * signs_D,)) for sign in (1, -1))
    return ((up_D - down_D) / 2 * signs_D).to(like_XD.device)


def _whole(weight: Any) -> Tensor:
    """All of a weight of which this process may have a part."""
    whole: Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return whole


def fit_fresh(
    heads: DraftHeads, hidden_states: HiddenStates, data: TrainingData, args: TrainingArguments
) -> int:
    """Let fresh heads begin with least squares, by some of the rows that they will learn from, of
    which each process reads as many; by how many positions."""
    if not begins_with_least_squares(heads):
        return 0
    rows: Any = data.rows
    (count, learnt_of_row), needed = data.rows_and_learnt(), columns(heads)
    passed = args.num_train_epochs * (count or 0)
    if args.max_steps > 0:
        passed = args.max_steps * args.gradient_accumulation_steps * rows_of_all(args)
    most = min(FITTED_SHARE * passed, ROWS_A_COLUMN * needed / learnt_of_row, count or math.inf)
    if most * learnt_of_row < FEWEST_ROWS_A_COLUMN * needed:
        return 0
    # In the batches of the first pass, which a cache was written in: others round differently.
    size, seed = args.train_batch_size, args.seed if args.data_seed is None else args.data_seed
    order = None if count is None else DrawnOrder(count, seed)
    some = iter(rows if order is None else order)

    def batches() -> Iterator[tuple[Tensor, Mapping[str, Any]]]:
        for _ in range(math.ceil(most / (size * args.world_size))):
            batch = list(islice(some, size * args.world_size))
            each = math.ceil(len(batch) / args.world_size)
            if order is not None:  # the last: all processes read, and no row twice but for that
                batch += islice(cycle(order), each * args.world_size - len(batch))
            own = batch[each * args.process_index : each * (args.process_index + 1)]
            taken = own if order is None else [rows[place] for place in own]
            inputs = send_to_device(hidden_states.collate(taken), hidden_states.target.device)
            yield hidden_states.of_step(inputs), inputs

    return fit_linear(heads, batches())
