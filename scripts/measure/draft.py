"""What a draft model gains its target: tokens per step and tokens per second, in turns.

python -m scripts.measure.draft runs/demo/draft
python -m scripts.measure.draft runs/demo/draft --dtype float32 --trees chain:2 chain:4 dynamic:12

Prompts are those of `medusa-heads benchmark`: windows of the standard library packages that nothing
here trains on. transformers' own assisted decoding with the same draft model is measured beside.
"""

from __future__ import annotations

import sys
from dataclasses import MISSING, dataclass
from functools import partial
from typing import Any, Literal

from medusa_heads.cli.flags.arguments import command
from medusa_heads.settings import flag

PLAIN = "transformers generate"
ASSISTED = "transformers assisted"


@dataclass
class Arguments:
    """What to measure."""

    draft: str = flag(MISSING, "a folder written by train-draft")
    target: str | None = flag(None, "default: the one the draft names")
    trees: list[str] = flag(
        ["chain:1", "chain:2", "chain:4", "chain:6", "dynamic:12"], "drafts to compare"
    )
    dtype: Literal["bfloat16", "float32"] = flag("bfloat16", "of both models")
    num_prompts: int = flag(20, "prompts")
    prompt_length: int = flag(64, "tokens in each")
    max_new_tokens: int = flag(128, "tokens after each")
    temperature: float = flag(0.7, "of the sampled texts")
    seed: int = flag(1, "of the prompts and the sampling")


def measure(arguments: Arguments) -> None:
    """Print a table for greedy and one for sampled text."""
    import torch
    from rich.console import Console
    from rich.table import Table
    from transformers import AutoTokenizer, logging
    from transformers.utils.logging import disable_progress_bar

    from medusa_heads.inference.bench.prompts import held_out_prompts
    from medusa_heads.inference.bench.timed_run import (
        WARM_UP_TOKENS,
        Method,
        run_once,
        summarise,
        take_turns,
    )
    from medusa_heads.inference.models.drafted import DraftedModel

    logging.set_verbosity_error()
    disable_progress_bar()
    first = DraftedModel.from_pretrained(
        arguments.draft, target=arguments.target, dtype=getattr(torch, arguments.dtype)
    )
    target: Any = first.target.model
    tokenizer = AutoTokenizer.from_pretrained(first.target.name_or_path)
    prompts = held_out_prompts(
        tokenizer,
        num_prompts=arguments.num_prompts,
        prompt_length=arguments.prompt_length,
        seed=arguments.seed,
    )
    methods = [
        Method(PLAIN, target.generate),
        Method(ASSISTED, partial(target.generate, assistant_model=first.draft.model), one_row=True),
    ]
    for tree in arguments.trees:
        model = DraftedModel(first.target, first.draft, tree=tree, rng="transformers")
        methods.append(Method(tree, model.generate, lambda model=model: model.last_stats))  # type: ignore[misc]
    sampled = {"do_sample": True, "temperature": arguments.temperature, "top_k": 0}
    for name, how in (("greedy", {"do_sample": False}), ("sampled", sampled)):
        options: dict[str, Any] = {"pad_token_id": 0, **how}
        for method in methods:
            run_once(method, target, [prompts[0]], 0, max_new_tokens=WARM_UP_TOKENS, **options)
        options["max_new_tokens"] = arguments.max_new_tokens
        alone = [[prompt] for prompt in prompts]
        runs = take_turns(methods, target, alone, arguments.seed, **options)
        table = Table(title=f"{arguments.dtype}, {name}, {len(prompts)} prompts")
        for column in ("drafts", "tokens per step", "tokens/s", "speed-up", "identical"):
            table.add_column(column, justify="right")
        for method in methods:
            figures = summarise(runs[method.name], runs[PLAIN])
            table.add_row(
                method.name,
                f"{figures['tokens_per_step']:.2f}",
                f"{figures['tokens_per_second']:.1f}",
                f"{figures['speedup']:.2f}",
                f"{round(figures['identical'] * len(prompts))} of {len(prompts)}",
            )
        Console().print(table)


main = command("scripts.measure.draft", measure, __doc__, "draft")

if __name__ == "__main__":
    sys.exit(main())
