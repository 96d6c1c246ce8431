"""`train-heads --dry_run` and `train-draft --dry_run`: everything but steps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from medusa_heads.cli.distilling import distilled_prompts
from medusa_heads.cli.settled import tell_choices
from medusa_heads.cli.training import Texts, device_to_choose_for
from medusa_heads.training.arguments.draft import DraftArguments
from medusa_heads.training.arguments.target import TargetArguments

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from medusa_heads.config import HeadsConfig
    from medusa_heads.target.target import TargetModel
    from medusa_heads.training.arguments.joint_config import JointConfig
    from medusa_heads.training.runs.dry_run import TextSize


def dry_run_heads(
    to_target: TargetArguments,
    texts: Texts,
    config: HeadsConfig,
    args: TrainingArguments,
    *,
    joint: JointConfig | None = None,
) -> None:
    """Print a sample of the text and what the run would be; only the first process does.

    Raises:
        ValueError: the target has no configuration, or the text cannot be used.
    """
    from medusa_heads.training.hidden.meta_target import meta_target
    from medusa_heads.training.runs.dry_run import plan_heads

    target = meta_target(to_target, device_to_choose_for(args))
    rows, size = _text(target, texts, config.num_heads, args)
    four_bits = to_target.load_in_4bit
    plan = plan_heads(target, config, args, size, four_bits=four_bits, joint=joint)
    _show(rows, texts, plan, args)


def dry_run_draft(
    to_target: TargetArguments, texts: Texts, to_draft: DraftArguments, args: TrainingArguments
) -> None:
    """The same for a draft model.

    Raises:
        ValueError: there is no such target or draft model, or the text cannot be used.
    """
    from medusa_heads.training.hidden.meta_target import meta_target
    from medusa_heads.training.measure.draft_metrics import CHAINS
    from medusa_heads.training.runs.dry_run import plan_draft
    from medusa_heads.training.runs.pruned_target import draft_shape

    target = meta_target(to_target, device_to_choose_for(args))
    draft = draft_shape(
        target, **to_draft.beginning(), trust_remote_code=to_target.trust_remote_code
    )
    rows, size = _text(target, texts, CHAINS[-1], args)
    plan = plan_draft(target, draft, args, size, four_bits=to_target.load_in_4bit)
    _show(rows, texts, plan, args)


def _text(
    target: TargetModel, texts: Texts, num_heads: int, args: TrainingArguments
) -> tuple[Any, TextSize]:
    """The rows of a run, and how much text they are; of text to be written only its prompts."""
    from medusa_heads.config import IGNORED
    from medusa_heads.training.data.pack import pack_rows
    from medusa_heads.training.data.prepare import prepare_data
    from medusa_heads.training.runs.dry_run import TextSize, text_size

    to_data, to_distill = texts.settings, texts.distillation
    if to_distill.self_distill:
        prompts = distilled_prompts(
            target, texts.tokenizer, texts.corpus, texts.held_out, to_data, to_distill, args.seed
        )[0]
        length = to_distill.prompt_length + to_distill.continuation_length
        learnt = len(prompts) * to_distill.continuation_length
        labels = [IGNORED] * to_distill.prompt_length
        first = {"input_ids": prompts[0]["input_ids"], "labels": labels}
        return [first], TextSize(len(prompts), len(prompts) * length, learnt, length)
    # Whether packed documents see each other is measured with weights, which are not here.
    data = prepare_data(
        target,
        texts.corpus,
        texts.held_out,
        texts.tokenizer,
        replace(to_data, packing=False),
        num_heads=num_heads,
        seed=args.seed,
        max_steps=args.max_steps,
    )
    if data.is_stream:
        return data.rows, TextSize(None, None, None, to_data.max_length)
    rows: Any = pack_rows(data.known_rows, to_data.max_length) if to_data.packing else data.rows
    return rows, text_size(rows, data.facts.supervised_tokens)


def _show(rows: Any, texts: Texts, plan: Any, args: TrainingArguments) -> None:
    from rich.console import Console

    from medusa_heads.training.data.sample import show_sample
    from medusa_heads.training.runs.dry_run import show_plan

    if args.process_index == 0:
        tell_choices()
        console = Console()
        show_sample(rows, texts.tokenizer, console)
        show_plan(plan, console)
