"""What train-heads and train-draft do alike: from flags to the rows that a run learns from."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_heads.cli.flags.arguments import run_command
from medusa_heads.cli.settled import settle, tell_choices
from medusa_heads.inference.regeneration.arguments import DistillArguments
from medusa_heads.training.arguments.data import DataArguments
from medusa_heads.training.arguments.target import TargetArguments
from medusa_heads.training.arguments.training import OptimisationArguments

if TYPE_CHECKING:
    import torch
    from transformers import TrainingArguments

    from medusa_heads.data.sources import Corpus
    from medusa_heads.target.target import TargetModel
    from medusa_heads.training.data.prepare import TrainingData
    from medusa_heads.training.hidden.launched import Sharding


def run_training(train: Callable[[], None], prog: str) -> int:
    """Run a command that trains, and return its exit code; see `run_command`."""
    # Waiting threads sleep instead of spinning, which on busy cores slows small models tenfold.
    # Read when torch is loaded, so it is set before.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return run_command(train, prog=prog)


@dataclass(frozen=True)
class Texts:
    """What a run is to learn from, as it was found.

    Attributes:
        corpus: to train on.
        held_out: to measure on, where it is given apart.
        tokenizer: the one beside the target, None where there is none.
        settings: of the text.
        distillation: whether the target continues it first, and how.
    """

    corpus: Corpus
    held_out: Corpus | None
    tokenizer: Any
    settings: DataArguments
    distillation: DistillArguments


def find_texts(
    to_target: TargetArguments, to_data: DataArguments, to_distill: DistillArguments
) -> Texts:
    """Find and open the corpora, and the tokenizer.

    Raises:
        ValueError: a corpus is not there, or cannot be read.
    """
    from medusa_heads.data.finding import find_names

    # A mistyped path is answered before torch is loaded, which takes seconds.
    find_names([*to_data.dataset, *(to_data.eval_dataset or [])])

    from medusa_heads.training.data.prepare import find_tokenizer, load_corpora

    corpus, held_out = load_corpora(to_data)
    tokenizer = find_tokenizer(
        to_target.model_name_or_path,
        to_target.model_revision,
        trust_remote_code=to_target.trust_remote_code,
    )
    return Texts(corpus, held_out, tokenizer, to_data, to_distill)


def load_target(
    to_target: TargetArguments,
    to_optimise: OptimisationArguments,
    args: TrainingArguments,
    sharding: Sharding | None = None,
) -> TargetModel:
    """The target of a run that can begin in its folder; spread over the processes, if so wished.

    Raises:
        ValueError: the folder holds another run, or nothing to resume; or there is no such target,
            or it cannot be spread.
    """
    from medusa_heads.target.target import TargetModel
    from medusa_heads.training.hidden.sharding import load_to_spread
    from medusa_heads.training.runs.setup import as_target, find_start

    # Asked again when training begins; here, before hours may go into the target's own text.
    find_start(
        Path(to_optimise.output_dir),
        to_optimise.resume_from_checkpoint,
        overwrite=to_optimise.overwrite_output_dir,
    )
    device = args.device  # asked for first, because it lets the processes know of one another
    if sharding is not None:
        return as_target(load_to_spread(to_target, sharding), device, sharding)
    alone = args.world_size == 1
    target = TargetModel.from_pretrained(
        to_target.model_name_or_path,
        dtype=to_target.dtype,
        use="batch" if alone else None,
        on_choice=settle,
        **to_target.source(),
        **to_target.placement(device),
    )
    return target


def autocast_for(to_target: TargetArguments) -> Callable[[str | None], bool]:
    """Says whether a machine trains faster in bf16 autocast, by the sizes of the target; and tells
    the user. Several processes, which could measure differently, never do."""

    def faster(device: str | None) -> bool:
        import torch

        from medusa_heads.machine import choose
        from medusa_heads.target.loading import stored_form

        if _processes() > 1:
            return False
        form = stored_form(to_target.model_name_or_path, **to_target.source())
        shape = None if form is None else form.shape
        choice = choose("train", device=device, shape=shape, count_threads=False)
        settle(choice, "training", threads=False)
        return choice.dtype == torch.bfloat16

    return faster


def device_to_choose_for(args: TrainingArguments) -> torch.device | None:
    """For which a dtype is chosen; None where several processes take the target as it is stored."""
    return args.device if args.world_size == 1 else None


def _processes() -> int:
    """How many a launcher started."""
    given = os.environ.get("WORLD_SIZE", "")
    return int(given) if given.isdecimal() else 1


def prepare_texts(
    target: TargetModel,
    texts: Texts,
    to_optimise: OptimisationArguments,
    args: TrainingArguments,
    num_heads: int,
) -> TrainingData:
    """Rows of the corpus, or of the target's continuations of it; the first one is shown.

    Raises:
        ValueError: text that cannot be used.
    """
    from medusa_heads.cli.distilling import distilled_rows
    from medusa_heads.training.data.prepare import prepare_data

    if args.process_index == 0:
        tell_choices()
    corpus, held_out = texts.corpus, texts.held_out
    if texts.distillation.self_distill:
        # The first process writes the text, the others read it from the cache.
        with args.main_process_first(desc="the target's text"):
            corpus, held_out = distilled_rows(
                target,
                texts.tokenizer,
                corpus,
                held_out,
                texts.settings,
                texts.distillation,
                to_optimise,
            )
    data = prepare_data(
        target,
        corpus,
        held_out,
        texts.tokenizer,
        texts.settings,
        num_heads=num_heads,
        seed=to_optimise.seed,
        max_steps=args.max_steps,
    )
    if args.process_index == 0:
        from rich.console import Console

        from medusa_heads.training.data.sample import show_sample

        show_sample(data.rows, texts.tokenizer, Console())
    return data
