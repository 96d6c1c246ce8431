"""What train-heads and train-draft do alike: from flags to the rows that a run learns from."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_heads.cli.choices import apply_choice, print_choices
from medusa_heads.cli.planning import say_warnings, show_plan_of
from medusa_heads.data.finding import find_names
from medusa_heads.files import read_json
from medusa_heads.inference.regeneration.arguments import DistillArguments
from medusa_heads.training.arguments.data import DataArguments
from medusa_heads.training.arguments.target import TargetArguments
from medusa_heads.training.arguments.training import OptimisationArguments, further_arguments

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import TrainingArguments

    from medusa_heads.data.sources import Corpus
    from medusa_heads.machine.choice import Choice
    from medusa_heads.target.target import TargetModel
    from medusa_heads.training.data.prepare import TrainingData
    from medusa_heads.training.hidden.launched import Sharding
    from medusa_heads.training.runs.dry_run import DryRun, TextSize


@dataclass
class Command:
    """What a command was told of a run, and the text and tokenizer (None: there is none) for it."""

    to_target: TargetArguments
    to_data: DataArguments
    to_distill: DistillArguments
    to_optimise: OptimisationArguments
    trains: bool = True  # and so writes to output_dir
    learns_prompts: bool = False  # of the text that the target continues
    checkpoint: str | None = field(default=None, init=False)  # that it goes on from

    def __post_init__(self) -> None:
        # A mistyped path is answered before torch is loaded, which takes seconds.
        find_names([*self.to_data.dataset, *(self.to_data.eval_dataset or [])])
        further_arguments(self.to_optimise)  # read again when those of the run are made
        if self.trains:
            from medusa_heads.training.runs.resumable import find_start

            # Asked again when training begins; here, before anything is loaded or written, and of
            # a dry run too: it plans no run that would be refused.
            self.checkpoint = find_start(
                Path(self.to_optimise.output_dir),
                self.to_optimise.resume_from_checkpoint,
                self.to_target.model_name_or_path,
                overwrite=self.to_optimise.overwrite_output_dir,
            )

        from medusa_heads.target.loading import find_tokenizer
        from medusa_heads.training.data.prepare import load_corpora

        self.corpus, self.held_out = load_corpora(self.to_data)
        self.tokenizer: Any = find_tokenizer(
            self.to_target.model_name_or_path,
            self.to_target.model_revision,
            trust_remote_code=self.to_target.trust_remote_code,
        )

    def run(
        self,
        args: TrainingArguments,
        num_heads: int,
        *,
        plan: Callable[[TargetModel, TrainingData, TextSize], DryRun],
        check: Callable[[TargetModel], object],
        train: Callable[..., object],
        report: Callable[[Path], None],
        sharding: Sharding | None = None,
        rehearse: Callable[..., object] | None = None,
        begins_as: str | None = None,
        compare: Callable[[TargetModel, TrainingData], str] | None = None,
    ) -> None:
        """Load the target, prepare the text, train, and report what was learnt; of a dry run the
        plan alone, with what `rehearse` takes, which trains likewise (default: `train`), unless the
        weights that it `begins_as` would have to be fetched, and a sentence by which `compare` sets
        it beside another. What is refused of the target is refused by `check`, before hours may go
        into writing text."""
        if self.to_optimise.dry_run:
            show_plan_of(self, args, num_heads, plan, rehearse or train, begins_as, compare)
            return
        output_dir = self.to_optimise.output_dir
        target = self.load_target(args, sharding)
        check(target)
        train(
            target,
            self.prepare(target, args, num_heads),
            training_args=args,
            output_dir=output_dir,
            resume_from_checkpoint=self.to_optimise.resume_from_checkpoint,
            overwrite_output_dir=self.to_optimise.overwrite_output_dir,
            early_stopping_patience=self.to_optimise.early_stopping_patience,
            record={"data": asdict(self.to_data), "distillation": asdict(self.to_distill)},
        )
        if args.process_index == 0:
            from medusa_heads.training.runs.record import METRICS_FILE

            report(Path(output_dir))
            say_warnings(read_json(Path(output_dir) / METRICS_FILE).get("warnings", []))

    def load_target(self, args: TrainingArguments, sharding: Sharding | None) -> TargetModel:
        """Perhaps spread over the processes, and as a run that goes on had it; ValueError where it
        cannot be had."""
        from medusa_heads.training.hidden.device_map import load_placed
        from medusa_heads.training.hidden.sharding import load_to_spread
        from medusa_heads.training.runs.record import target_dtype_before
        from medusa_heads.training.runs.setup import as_target

        device = args.device  # asked for first, because it lets the processes know of one another
        if sharding is not None:
            return as_target(load_to_spread(self.to_target, sharding), device, sharding)
        before = None if self.to_target.load_in_4bit else target_dtype_before(self.checkpoint)
        if self.to_target.dtype != "auto" or before is None:
            return load_placed(self.to_target, args, apply_choice)

        def keep(choice: Choice) -> None:
            apply_choice(replace(choice, reason=f"{before} as in the checkpoint"))

        return load_placed(replace(self.to_target, dtype=before), args, keep)

    def autocast(self, device: str | None) -> bool:
        """Whether a run that goes on did so in bf16 autocast, as speeds measured anew may say
        otherwise; else whether this machine trains faster so, by the sizes of the target; tells
        the user. Several processes, which could measure differently, never begin to."""
        import torch

        from medusa_heads.machine.choice import Choice, choose
        from medusa_heads.machine.devices import computes_in, find_device
        from medusa_heads.machine.products import dtype_name
        from medusa_heads.target.loading import stored_form
        from medusa_heads.training.runs.record import in_bf16_before

        before = in_bf16_before(self.checkpoint)
        if before is not None:
            dtype, where = torch.bfloat16 if before else torch.float32, find_device(device)
            if computes_in(where, dtype):
                reason = f"{dtype_name(dtype)} as in the checkpoint"
                choice = Choice(where, dtype, torch.get_num_threads(), reason)
                apply_choice(choice, "training", threads=False)
                return before

        launched = os.environ.get("WORLD_SIZE", "")
        if launched.isdecimal() and int(launched) > 1:
            return False
        form = stored_form(self.to_target.model_name_or_path, **self.to_target.source())
        if form is None:  # no target, which is refused when it is loaded
            return False
        choice = choose("train", device=device, shape=form.shape, count_threads=False)
        apply_choice(choice, "training", threads=False)
        return choice.dtype == torch.bfloat16

    def prepare(self, target: TargetModel, args: TrainingArguments, num_heads: int) -> TrainingData:
        """Rows of the corpus, or of the target's continuations of it; the first one is shown."""
        from rich.console import Console

        from medusa_heads.training.data.columns import learnt_whole
        from medusa_heads.training.data.sample import show_sample

        if args.process_index == 0:
            print_choices()
        texts: tuple[Corpus, Corpus | None] = self.corpus, self.held_out
        if self.to_distill.self_distill:
            kept = self.to_distill.distill_cache or Path(self.to_optimise.output_dir) / "distilled"
            # The first process writes the text, the others read it from the cache.
            with args.main_process_first(desc="the target's text"):
                prompts, of_held_out = self.prompts(target)
                distill = self.to_distill, kept, args.seed
                learnt = continue_prompts(target, prompts, "distilled text", *distill)
                if self.learns_prompts:
                    learnt = replace(learnt, rows=learnt_whole(learnt.rows))
                texts = (
                    learnt,
                    continue_prompts(target, of_held_out, "distilled held-out text", *distill),
                )
        data = self.rows(target, texts, args, num_heads)
        if args.process_index == 0:
            show_sample(data.rows, self.tokenizer, Console())
        return data

    def rows(
        self,
        target: TargetModel,
        texts: tuple[Corpus, Corpus | None],
        args: TrainingArguments,
        num_heads: int,
    ) -> TrainingData:
        """Rows of text that is there, and held-out ones."""
        from medusa_heads.inference.regeneration.store import own_words
        from medusa_heads.training.data.prepare import prepare_data

        limits: dict[str, Any] = {"num_heads": num_heads, "max_steps": args.max_steps}
        names = find_names(self.to_data.dataset)
        told = {own_words(target.name_or_path, each) for each in names}
        own = self.to_distill.self_distill or told == {"plain"}
        limits |= {"seed": args.seed, "own_text": own, "own_ends": None not in told}
        data = prepare_data(target, texts[0], texts[1], self.tokenizer, self.to_data, **limits)
        if not self.learns_prompts:  # an adapter, a target's modules, a draft model
            data.refuse_images("what is trained here does")
        return data

    def prompts(self, target: TargetModel) -> list[Dataset]:
        """Prompts for the target from the text to train on, and from the held-out text."""
        from medusa_heads.data.corpus import prompt_windows
        from medusa_heads.training.data.split import hold_out

        if self.tokenizer is None:
            raise ValueError("self_distill needs the target's tokenizer, and none lies beside it")
        for part in (self.corpus, self.held_out):
            if part is not None and (part.format.name != "text" or part.is_stream):
                raise ValueError(
                    f"self_distill draws prompts from a table of plain text, got {part.found_as} "
                    f"in {part.name!r}: have it answered with medusa-heads regenerate, and train "
                    "on the answers"
                )
        distill, seed = self.to_distill, self.to_optimise.seed
        length = distill.prompt_length
        target.check_length(
            length + distill.continuation_length,
            "prompt_length + continuation_length",
            "lower one of them",
        )
        if self.held_out is None:
            share, rows = self.to_data.eval_share, self.to_data.eval_rows
            texts = hold_out(self.corpus.rows, share, seed, rows)
        else:
            texts = self.corpus.rows, self.held_out.rows
        counts = distill.num_prompts, distill.num_eval_prompts
        return [
            prompt_windows(text, self.tokenizer, num_prompts=count, prompt_length=length, seed=seed)
            for text, count in zip(texts, counts, strict=True)
        ]


def continue_prompts(
    target: TargetModel,
    prompts: Dataset,
    name: str,
    distill: DistillArguments,
    cache_dir: str | Path,
    seed: int = 0,
) -> Corpus:
    """The target's own continuations of prompts, cached on disk."""
    from medusa_heads.data.sources import as_corpus
    from medusa_heads.inference.regeneration.regenerate import regenerate

    rows = regenerate(
        target,
        prompts,
        max_new_tokens=distill.continuation_length,
        batch_size=distill.generation_batch_size,
        greedy_share=distill.greedy_share,
        temperature=distill.temperature,
        seed=seed,
        cache_dir=cache_dir,
        num_workers=distill.generation_workers,
    )
    return as_corpus(rows, name)
