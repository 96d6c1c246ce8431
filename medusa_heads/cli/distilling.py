"""Text that the target writes itself, for the command that trains on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_heads.inference.regeneration.arguments import DistillArguments
from medusa_heads.training.arguments.data import DataArguments
from medusa_heads.training.arguments.training import OptimisationArguments

if TYPE_CHECKING:
    from datasets import Dataset

    from medusa_heads.data.sources import Corpus
    from medusa_heads.target.target import TargetModel


def distilled_rows(
    target: TargetModel,
    tokenizer: Any,
    corpus: Corpus,
    held_out: Corpus | None,
    to_data: DataArguments,
    to_distill: DistillArguments,
    to_optimise: OptimisationArguments,
) -> tuple[Corpus, Corpus]:
    """The target's own continuations of prompts from both corpora, cached on disk."""
    from medusa_heads.data.sources import as_corpus
    from medusa_heads.inference.regeneration.regenerate import regenerate

    cache_dir = Path(to_distill.distill_cache or Path(to_optimise.output_dir) / "distilled")
    rows = [
        regenerate(
            target,
            prompts,
            max_new_tokens=to_distill.continuation_length,
            batch_size=to_distill.generation_batch_size,
            greedy_share=to_distill.greedy_share,
            temperature=to_distill.temperature,
            seed=to_optimise.seed,
            cache_dir=cache_dir,
            num_workers=to_distill.generation_workers,
        )
        for prompts in distilled_prompts(
            target, tokenizer, corpus, held_out, to_data, to_distill, to_optimise.seed
        )
    ]
    return as_corpus(rows[0], "distilled text"), as_corpus(rows[1], "distilled held-out text")


def distilled_prompts(
    target: TargetModel,
    tokenizer: Any,
    corpus: Corpus,
    held_out: Corpus | None,
    to_data: DataArguments,
    to_distill: DistillArguments,
    seed: int,
) -> list[Dataset]:
    """Prompts from the text to train on, and from the held-out text."""
    from medusa_heads.data.corpus import prompt_windows
    from medusa_heads.training.data.prepare import hold_out

    if tokenizer is None:
        raise ValueError("self_distill needs the target's tokenizer, and none lies beside it")
    for part in (corpus, held_out):
        if part is not None and (part.format.name != "text" or part.is_stream):
            raise ValueError(
                f"self_distill draws prompts from a table of plain text, got {part.found_as} in "
                f"{part.name!r}"
            )
    length = to_distill.prompt_length + to_distill.continuation_length
    target.check_length(length, "prompt_length + continuation_length")
    if held_out is None:
        texts = hold_out(corpus.rows, to_data.eval_share, seed, to_data.eval_rows)
    else:
        texts = corpus.rows, held_out.rows
    counts = (to_distill.num_prompts, to_distill.num_eval_prompts)
    return [
        prompt_windows(
            text, tokenizer, num_prompts=count, prompt_length=to_distill.prompt_length, seed=seed
        )
        for text, count in zip(texts, counts, strict=True)
    ]
