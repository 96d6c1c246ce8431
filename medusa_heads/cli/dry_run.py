"""`train-heads --dry_run`: everything but steps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from medusa_heads.cli.distilling import distilled_prompts
from medusa_heads.inference.regenerate_arguments import DistillArguments
from medusa_heads.training.arguments import TargetArguments
from medusa_heads.training.data_arguments import DataArguments

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from medusa_heads.config import HeadsConfig
    from medusa_heads.training.corpora import Corpus
    from medusa_heads.training.joint_config import JointConfig


def dry_run(
    to_target: TargetArguments,
    to_data: DataArguments,
    to_distill: DistillArguments,
    config: HeadsConfig,
    training_args: TrainingArguments,
    corpus: Corpus,
    held_out: Corpus | None,
    tokenizer: Any,
    *,
    joint: JointConfig | None = None,
) -> None:
    """Print a sample of the text and what the run would be; only the first process does.

    Raises:
        ValueError: the target has no configuration, or the text cannot be used.
    """
    from rich.console import Console

    from medusa_heads.config import IGNORED
    from medusa_heads.training.data import prepare_data
    from medusa_heads.training.dry_run import TextSize, meta_target, plan_run, show_plan, text_size
    from medusa_heads.training.packing import pack_rows
    from medusa_heads.training.sample import show_sample

    target = meta_target(to_target)
    if to_distill.self_distill:
        rows: Any = distilled_prompts(
            target, tokenizer, corpus, held_out, to_data, to_distill, training_args.seed
        )[0]
        length = to_distill.prompt_length + to_distill.continuation_length
        learnt = len(rows) * to_distill.continuation_length
        text = TextSize(len(rows), len(rows) * length, learnt, length)
        rows = [{"input_ids": rows[0]["input_ids"], "labels": [IGNORED] * to_distill.prompt_length}]
    else:
        # Whether packed documents see each other is measured with weights, which are not here.
        data = prepare_data(
            target,
            corpus,
            held_out,
            tokenizer,
            replace(to_data, packing=False),
            num_heads=config.num_heads,
            seed=training_args.seed,
            max_steps=training_args.max_steps,
        )
        rows = data.rows
        if data.is_stream:
            text = TextSize(None, None, None, to_data.max_length)
        else:
            rows = pack_rows(data.rows, to_data.max_length) if to_data.packing else data.rows
            text = text_size(rows, to_data.max_length, data.facts.supervised_tokens)
    if training_args.process_index:
        return
    console = Console()
    show_sample(rows, tokenizer, console)
    plan = plan_run(
        target, config, training_args, text, four_bits=to_target.load_in_4bit, joint=joint
    )
    show_plan(plan, config, console)
