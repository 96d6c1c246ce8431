"""What a training run would be and take: the dry run of `train-heads` and `train-draft`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from medusa_heads.cli.choices import apply_choice, print_choices
from medusa_heads.config import IGNORED
from medusa_heads.files import expanded

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import TrainingArguments

    from medusa_heads.cli.training import Command
    from medusa_heads.target.target import TargetModel
    from medusa_heads.training.data.prepare import TrainingData
    from medusa_heads.training.runs.dry_run import DryRun, TextSize


def show_plan_of(
    command: Command,
    args: TrainingArguments,
    num_heads: int,
    plan: Callable[[TargetModel, TrainingData, TextSize], DryRun],
    train: Callable[..., object],
    begins_as: str | None = None,
    compare: Callable[[TargetModel, TrainingData], str] | None = None,
) -> None:
    """Everything but the run: print a sample of the text, what the run would be, and what some
    of its steps take; only the first process does."""
    from rich.console import Console

    from medusa_heads.training.arguments.batch import check_filled
    from medusa_heads.training.data.sample import show_sample
    from medusa_heads.training.hidden.device_map import load_placed
    from medusa_heads.training.hidden.meta_target import meta_target
    from medusa_heads.training.runs.dry_run import show_plan
    from medusa_heads.training.runs.rehearsal import Course, forecast, rehearse, show_forecast

    # Several processes take the target in the dtype it is stored in.
    target = meta_target(command.to_target, args.device if args.world_size == 1 else None)
    data, rows, size = planned_text(command, target, args, num_heads)
    planned = plan(target, data, size)
    check_filled(args, size.rows)
    if args.process_index != 0:
        return
    print_choices()
    console = Console()
    show_sample(rows, command.tokenizer, console)
    show_plan(planned, console)
    reason = "an image costs what no number of tokens tells" if data.has_images else None
    if reason := reason or _unmeasured(command, args, planned, begins_as):
        console.print(f"No step was measured: {reason}.", highlight=False)
        say_warnings(data.warnings)
        return
    console.print("Measuring steps of two sizes ..", style="dim")
    target = load_placed(command.to_target, args, apply_choice)
    course = Course.of(data, args)
    show_forecast(forecast(*rehearse(train, target, data, args), course), course, console)
    if compare is not None and not data.is_stream:
        try:
            console.print(compare(target, data), highlight=False)
        except OSError as error:
            console.print(f"The disk of hidden states was not measured: {error}.", highlight=False)
    if command.to_distill.self_distill:
        console.print("The target writes the text before; that is not in it.")
    say_warnings(data.warnings)


def _unmeasured(
    command: Command, args: TrainingArguments, planned: DryRun, begins_as: str | None
) -> str | None:
    """Why it is not known what steps take here; None where they can be measured."""
    from medusa_heads.machine.devices import free_memory
    from medusa_heads.training.arguments.target import TargetArguments
    from medusa_heads.training.hidden.meta_target import weights_on_disk
    from medusa_heads.training.runs.dry_run import byte_size

    other = TargetArguments(begins_as or "")
    needed, free = sum(planned.memory.values()), free_memory(args.device)
    if not command.to_optimise.measure_steps:
        return "measure_steps is off"
    if args.world_size > 1:
        return "this is one of several processes; without a launcher one measures"
    if not weights_on_disk(command.to_target):
        return "the target's weights are not on this disk"
    if begins_as and not expanded(begins_as).is_dir() and not weights_on_disk(other):
        return f"the weights of {begins_as!r} are not on this disk"
    if free is not None and needed > free:
        return f"about {byte_size(needed)} are needed, and {byte_size(free)} are free"
    return None


def planned_text(
    command: Command, target: TargetModel, args: TrainingArguments, num_heads: int
) -> tuple[TrainingData, Any, TextSize]:
    """The text of a run, rows to show, and how much it is; of text to be written only prompts
    are known, and go on as they are."""
    from medusa_heads.training.runs.dry_run import TextSize, text_size

    distill = command.to_distill
    if distill.self_distill:
        prompts, held_out = command.prompts(target)
        length = distill.prompt_length + distill.continuation_length
        data = without_answers([prompts, held_out], target, command)
        first = {name: row[: distill.prompt_length] for name, row in data.rows[0].items()}
        learnt = data.facts.supervised_tokens
        return data, [first], TextSize(len(prompts), len(prompts) * length, learnt, length)
    data = command.rows(target, (command.corpus, command.held_out), args, num_heads)
    if data.is_stream:
        return data, data.rows, TextSize(None, None, None, command.to_data.max_length)
    return data, data.rows, text_size(data.rows, data.facts.supervised_tokens)


def without_answers(
    prompts: Sequence[Dataset], target: TargetModel, command: Command
) -> TrainingData:
    """Rows as long as those that will be written, of prompts to learn from and held-out ones."""
    from datasets import Dataset

    from medusa_heads.training.data.columns import learnt_whole
    from medusa_heads.training.data.prepare import TrainingData
    from medusa_heads.training.data.row_facts import check_rows

    behind = command.to_distill.continuation_length

    def long(row: dict[str, Any]) -> dict[str, Any]:
        ids = row["input_ids"]
        more = (ids * (behind // len(ids) + 1))[:behind]
        return {"input_ids": ids + more, "labels": [IGNORED] * len(ids) + more}

    rows, held = (Dataset.from_list([long(row) for row in part]) for part in prompts)
    if command.learns_prompts:
        rows = learnt_whole(rows)
    known, of_held = (
        check_rows(part, target, name="text", heads_reached=1) for part in (rows, held)
    )
    return TrainingData(rows, held, rows, known, of_held, [])


def say_warnings(sentences: Sequence[str]) -> None:
    """At the end, where they are read."""
    for sentence in sentences:
        print(f"warning: {sentence}", file=sys.stderr)
