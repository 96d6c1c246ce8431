"""`train-heads --dry_run` and `train-draft --dry_run`: everything but steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from medusa_heads.cli.settled import tell_choices
from medusa_heads.cli.training import Run

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from medusa_heads.target.target import TargetModel
    from medusa_heads.training.runs.dry_run import Plan, TextSize


def dry_run(
    run: Run,
    args: TrainingArguments,
    num_heads: int,
    plan: Callable[[TargetModel, TextSize], Plan],
) -> None:
    """Print a sample of the text and what the run would be; only the first process does."""
    from rich.console import Console

    from medusa_heads.training.data.sample import show_sample
    from medusa_heads.training.hidden.meta_target import meta_target
    from medusa_heads.training.runs.dry_run import show_plan

    # Several processes take the target in the dtype it is stored in.
    target = meta_target(run.to_target, args.device if args.world_size == 1 else None)
    rows, size = _text(run, target, args, num_heads)
    planned = plan(target, size)
    if args.process_index == 0:
        tell_choices()
        console = Console()
        show_sample(rows, run.tokenizer, console)
        show_plan(planned, console)


def _text(
    run: Run, target: TargetModel, args: TrainingArguments, num_heads: int
) -> tuple[Any, TextSize]:
    """The rows of a run, and how much text they are; of text to be written only its prompts."""
    from medusa_heads.config import IGNORED
    from medusa_heads.training.data.pack import pack_rows
    from medusa_heads.training.data.prepare import prepare_data
    from medusa_heads.training.runs.dry_run import TextSize, text_size

    to_data, to_distill = run.to_data, run.to_distill
    if to_distill.self_distill:
        prompts = run.prompts(target)[0]
        length = to_distill.prompt_length + to_distill.continuation_length
        learnt = len(prompts) * to_distill.continuation_length
        labels = [IGNORED] * to_distill.prompt_length
        first = {"input_ids": prompts[0]["input_ids"], "labels": labels}
        return [first], TextSize(len(prompts), len(prompts) * length, learnt, length)
    # Whether packed documents see each other is measured with weights, which are not here.
    data = prepare_data(
        target,
        run.corpus,
        run.held_out,
        run.tokenizer,
        replace(to_data, packing=False),
        num_heads=num_heads,
        seed=args.seed,
        max_steps=args.max_steps,
    )
    if data.is_stream:
        return data.rows, TextSize(None, None, None, to_data.max_length)
    rows: Any = pack_rows(data.known_rows, to_data.max_length) if to_data.packing else data.rows
    return rows, text_size(rows, data.facts.supervised_tokens)
