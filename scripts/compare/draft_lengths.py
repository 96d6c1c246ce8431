"""Whether a draft model's adaptive drafts are as fast as the best fixed length, without being told.

python -m scripts.compare.draft_lengths runs/demo/draft
python -m scripts.compare.draft_lengths runs/demo/draft --temperature 0.7 --lengths 1 2 4

Three sets of prompts: held-out code, prose, and tables of numbers. On each, adaptive drafts begin
without any knowledge and take turns with every fixed length, prompt by prompt.
"""

from __future__ import annotations

import random
import sys
from dataclasses import MISSING, dataclass
from typing import Any, Literal

from medusa_heads.cli.flags.arguments import command
from medusa_heads.settings import flag

PLAIN, ADAPTIVE = "none", "adaptive"


@dataclass
class Arguments:
    """What to measure."""

    draft: str = flag(MISSING, "a folder written by train-draft")
    target: str | None = flag(None, "default: the one the draft names")
    lengths: list[int] = flag([1, 2, 3, 4, 6, 8], "fixed lengths to compare")
    sets: list[str] = flag(["code", "prose", "numbers"], "of code, prose and numbers")
    dtype: Literal["bfloat16", "float32"] = flag("bfloat16", "of both models")
    num_prompts: int = flag(8, "prompts in each set")
    prompt_length: int = flag(64, "tokens in each")
    max_new_tokens: int = flag(128, "tokens after each")
    temperature: float | None = flag(None, "of drawn text and drafts; default: greedy")
    seed: int = flag(1, "of the prompts and the sampling")


def compare(arguments: Arguments) -> None:
    """Print a table for each set of prompts."""
    import torch
    from rich.console import Console
    from transformers import AutoTokenizer, logging
    from transformers.utils.logging import disable_progress_bar

    from medusa_heads.inference.models.drafted import DraftedModel

    if unknown := sorted(set(arguments.sets) - {"code", "prose", "numbers"}):
        raise ValueError(f"sets of prompts are code, prose and numbers, got {unknown}")
    if min(arguments.lengths, default=0) < 1:
        raise ValueError(f"lengths must be at least 1, got {arguments.lengths}")
    logging.set_verbosity_error()
    disable_progress_bar()
    models = DraftedModel.from_pretrained(
        arguments.draft,
        target=arguments.target,
        dtype=getattr(torch, arguments.dtype),
        tree="chain",
    )
    tokenizer = AutoTokenizer.from_pretrained(models.target.name_or_path)
    for name in arguments.sets:
        prompts = prompts_of(name, tokenizer, arguments)
        Console().print(measured(name, models.target, models.draft, prompts, arguments))


def prompts_of(name: str, tokenizer: Any, arguments: Arguments) -> list[list[int]]:
    """Token ids of one set's prompts."""
    from medusa_heads.data.corpus import draw_windows
    from medusa_heads.inference.bench.prompts import held_out_prompts

    names = ("num_prompts", "prompt_length", "seed")
    drawn: dict[str, int] = {each: getattr(arguments, each) for each in names}
    if name == "code":
        return held_out_prompts(tokenizer, **drawn)
    make = _prose if name == "prose" else _numbers
    texts = make(random.Random(arguments.seed))
    return [input_ids for _, input_ids in draw_windows(texts, tokenizer, **drawn)]


def measured(
    name: str, target: Any, draft: Any, prompts: list[list[int]], arguments: Arguments
) -> Any:
    """A table of tokens per step and per second; ratios to the best fixed length."""
    from rich.table import Table

    from medusa_heads.inference.bench.timed_run import WARM_UP_TOKENS, Method, run_once, take_turns
    from medusa_heads.inference.models.drafted import DraftedModel

    sampling: dict[str, Any] = {"do_sample": False}
    if arguments.temperature is not None:
        sampling = {"do_sample": True, "temperature": arguments.temperature, "top_k": 0}
    options = {"pad_token_id": 0, **sampling}
    kind = "chain" if arguments.temperature is None else "sampled"
    trees = {str(n): f"{kind}:{n}" for n in arguments.lengths} | {ADAPTIVE: "auto"}
    methods = [Method(PLAIN, target.model.generate)]
    for label, tree in trees.items():
        methods.append(Method(label, DraftedModel(target, draft, tree=tree).generate))
    for method in methods[:-1]:  # what is adaptive would begin to learn
        run_once(method, target.model, [prompts[0]], 0, max_new_tokens=WARM_UP_TOKENS, **options)
    options["max_new_tokens"] = arguments.max_new_tokens
    alone = [[prompt] for prompt in prompts]
    runs = take_turns(methods, target.model, alone, arguments.seed, **options)
    speeds = {
        label: sum(run.num_tokens for run in made) / sum(run.seconds for run in made)
        for label, made in runs.items()
    }
    best = max(speed for label, speed in speeds.items() if label not in (PLAIN, ADAPTIVE))
    table = Table(title=f"{name}, {len(prompts)} prompts, {arguments.dtype}, {kind} drafts")
    for column in ("drafted tokens", "tokens per step", "tokens/s", "to the best fixed length"):
        table.add_column(column, justify="right")
    for label, made in runs.items():
        tokens, forwards = sum(r.num_tokens for r in made), sum(r.forwards for r in made)
        speed = speeds[label]
        table.add_row(label, f"{tokens / forwards:.2f}", f"{speed:.1f}", f"{speed / best:.3f}")
    return table


def _prose(draw: random.Random) -> list[str]:
    """Sentences of few words, as a license or a manual strings them together."""
    who = ["The user", "A copy", "This program", "The author", "Each file", "The license"]
    does = ["may change", "must keep", "comes with", "does not limit", "refers to", "replaces"]
    what = ["the source code", "any warranty", "this notice", "the work as a whole", "its terms"]
    when = ["in every copy", "without permission", "under these conditions", "at any time"]
    sentence = [who, does, what, when]
    return [
        ". ".join(" ".join(map(draw.choice, sentence)) for _ in range(400)) + "." for _ in range(8)
    ]


def _numbers(draw: random.Random) -> list[str]:
    """Tables with a counter, and figures that nobody can guess."""
    return [
        "\n".join(f"{row}, {draw.randrange(10)}, {draw.randrange(10)}, 0" for row in range(1, 600))
        for _ in range(8)
    ]


main = command("scripts.compare.draft_lengths", compare, __doc__, "draft")

if __name__ == "__main__":
    sys.exit(main())
