"""Learning rates that nobody chose: they follow the width of what they train.

A step of Adam moves every entry of a matrix by about the rate, and so what the matrix makes of its
n inputs by up to n times as much. A rate that suits one width therefore suits another in inverse
proportion (Yang et al. 2022, "Tensor Programs V", arXiv:2203.03466).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import SchedulerType, TrainingArguments

from medusa_heads.heads import DecoderHeads, DraftHeads
from medusa_heads.heads.correction import Correction
from medusa_heads.heads.fusion import Fusion
from medusa_heads.heads.medusa import WideBlock
from medusa_heads.heads.text.induction import InductionLayer

TUNED_WIDTH = 384
"""Of the target that the default rates were measured on."""

PREFIX_SHARE = 0.2
"""Of the heads' rate: everything the heads read passes through the layer (measured)."""


@dataclass
class RunArguments(TrainingArguments):
    """transformers' arguments, and whether `learning_rate` is a default, meant for TUNED_WIDTH, of
    which each part gets what suits its width (a rate that somebody gave is every part's), and
    whether `per_device_train_batch_size` is one, meant for much text."""

    rates_by_width: bool = field(default=False)
    rows_by_text: bool = field(default=False)


def by_width(args: TrainingArguments) -> bool:
    return isinstance(args, RunArguments) and args.rates_by_width


def fit_rate(args: TrainingArguments, width: int, share: float = 1.0) -> None:
    """Lower a default rate for a model wider than TUNED_WIDTH, and to a share for other reasons."""
    if by_width(args):
        args.learning_rate *= min(1.0, TUNED_WIDTH / width) * share


def fit_schedule(args: TrainingArguments) -> None:
    """Let a schedule that goes by what is measured know which way is better, unless it is told: by
    itself it takes less for better, and would lower the rate of a run that commits more and more
    tokens per step."""
    if SchedulerType(args.lr_scheduler_type).value in ("reduce_lr_on_plateau", "greedy"):
        told: Any = args.lr_scheduler_kwargs or {}
        args.lr_scheduler_kwargs = {"mode": "max" if args.greater_is_better else "min", **told}


@contextmanager
def steps_of_schedule(args: TrainingArguments, steps: int) -> Iterator[int]:
    """The steps that the schedule of a run of `steps` is made for: where all of them warm up, one
    more, which the run never takes; some schedules divide by the number of those behind."""
    given, warmup = args.warmup_steps, args.get_warmup_steps(steps)
    args.warmup_steps = max(warmup, given)  # a share would be one of more steps
    try:
        yield max(steps, warmup + 1)
    finally:
        args.warmup_steps = given


def rate_shares(heads: DraftHeads) -> dict[str, float]:
    """What share of a default rate suits each parameter, by its name in the heads. A block that
    reads the embeddings of n tokens too has 1 + n times the inputs of one that reads none; a
    correction's inputs do not grow with the target's width, and those of features do with their
    number."""
    shares = dict.fromkeys(dict(heads.named_parameters()), 1.0)
    undivided = max(1.0, (heads.config.hidden_size or 0) / TUNED_WIDTH)
    layers = set(heads.encoder().modules()) if isinstance(heads, DecoderHeads) else set()
    for name, module in heads.named_modules():
        if isinstance(module, WideBlock | Fusion):
            share = module.linear.out_features / module.linear.in_features
        elif isinstance(module, InductionLayer):
            share = 1 / 2  # hidden states and tokens
        elif name in ("prefix", "decoder"):
            share = PREFIX_SHARE
        elif isinstance(module, nn.Linear) and module in layers:
            share = PREFIX_SHARE * (heads.config.hidden_size or 0) / module.in_features
        elif isinstance(module, Correction):
            share = undivided
        else:
            continue
        shares |= {f"{name}.{inner}": share for inner, _ in module.named_parameters()}
    return shares


def rate_groups(
    heads: DraftHeads, args: TrainingArguments, decaying: Sequence[nn.Parameter]
) -> list[dict[str, Any]]:
    """The heads' parameters in groups for an optimiser, the highest rate first: of a run whose rate
    is fitted to the target, where weight decay applies to the `decaying` ones."""
    shares, decays = rate_shares(heads), {id(parameter) for parameter in decaying}
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in heads.named_parameters():
        if parameter.requires_grad:
            share = shares[name] if by_width(args) else 1.0
            groups.setdefault((share, id(parameter) in decays), []).append(parameter)
    return [
        {
            "params": groups[share, decay],
            "lr": args.learning_rate * share,
            "weight_decay": args.weight_decay if decay else 0.0,
        }
        for share, decay in sorted(groups, reverse=True)
    ]
