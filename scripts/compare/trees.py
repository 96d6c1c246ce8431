"""Every size of tree beside `auto` and transformers' own generate(), on the same prompts.

python -m scripts.compare.trees --checkpoint runs/demo/heads
python -m scripts.compare.trees --checkpoint runs/demo/heads --batch_size 8 --trees auto static:3

All take turns on every batch, in an order that rotates, in one process; a ratio is the median of
the batches' ratios. Every output is compared with plain generate()'s: in fp32 a differing row is an
error, in bf16 they are counted (near ties fall either way). `none` runs our loop without drafts.
"""

from __future__ import annotations

import os
import sys
from dataclasses import MISSING, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from medusa_heads.cli.flags.environment import told_to_torch

os.environ.update(told_to_torch())

from rich.table import Table

from medusa_heads import MedusaModel
from medusa_heads.cli.decoding import load_model
from medusa_heads.cli.flags.arguments import command
from medusa_heads.cli.flags.decoding import ModelArguments
from medusa_heads.inference.bench.prompts import held_out_prompts
from medusa_heads.inference.bench.timed_run import Method, TimedRun, summarise, take_turns
from medusa_heads.inference.plan.tree_size import expected_tokens, fastest, tune
from medusa_heads.machine.facts import describe_machine
from medusa_heads.settings import flag
from medusa_heads.tables import on_screen
from scripts.measure.written import write_report

PLAIN = "transformers generate"


@dataclass
class CompareArguments:
    """What to compare."""

    checkpoint: str = flag(MISSING, "heads checkpoint folder")
    trees: list[str] = flag(
        [], "as generate() takes them; default: auto and all that it chooses from"
    )
    batch_size: int = flag(1, "texts decoded together")
    num_batches: int = flag(8, "of different prompts")
    prompt_length: int = flag(64, "tokens of the longest prompts")
    max_new_tokens: int = flag(128, "behind each prompt")
    temperature: float = flag(0.0, "0 decodes greedily")
    dtype: str = flag("bfloat16", "of the target")
    device: str | None = flag(None, "such as cuda")
    output: str = flag("runs/compare_trees.json", "the numbers")


def write(arguments: CompareArguments) -> None:
    """Compare as the flags say, and write what comes out: a row for each way of decoding."""
    machine = describe_machine()  # before our own work adds to the load
    if arguments.dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"expected dtype float32, bfloat16 or float16, got {arguments.dtype!r}")
    counts = (arguments.batch_size, arguments.num_batches, arguments.prompt_length - 1)
    if min(*counts, arguments.max_new_tokens) < 1 or arguments.temperature < 0:
        raise ValueError(
            "expected batches, prompts of at least 2 tokens and new tokens, and a temperature of "
            "at least 0"
        )
    options = ModelArguments(
        arguments.checkpoint,
        dtype=arguments.dtype,  # type: ignore[arg-type]
        device=arguments.device,
    )
    chain, tokenizer = load_model(options, tree="chain")
    if chain.statistics is None:
        raise ValueError("these heads carry no statistics: train them with an evaluation set")
    expected = expected_tokens(chain.statistics)
    target, heads = chain.target, chain.heads
    plain: Any = target.model
    # An early end would leave batches of unequal work.
    target.model.generation_config.eos_token_id = None
    methods = [Method(PLAIN, plain.generate)]
    for tree in arguments.trees or ["auto", *expected]:
        # By its own random stream, so that texts can be compared.
        model = MedusaModel(
            target, heads, statistics=chain.statistics, tree=tree, rng="transformers"
        )
        methods.append(Method(tree, model.generate, lambda model=model: model.last_stats))  # type: ignore[misc]
    sizes = tune(target, chain.drafting, chain.statistics, batch_size=arguments.batch_size)
    runs = take_all_turns(methods, plain, make_batches(arguments, tokenizer), arguments)
    report = {
        "target": target.name_or_path,
        "dtype": arguments.dtype,
        "batch_size": arguments.batch_size,
        "temperature": arguments.temperature,
        "new_tokens": arguments.max_new_tokens,
        "machine": machine | {"load_average_after": describe_machine()["load_average"]},
        "expected_fastest": fastest(sizes).tree,
        "sizes": {size.tree: size.step_seconds for size in sizes},
        "ways": {name: of_way(runs, name) for name in runs},
    }
    write_report(arguments.output, report, table_of(report))


def make_batches(arguments: CompareArguments, tokenizer: Any) -> list[list[list[int]]]:
    """Prompts of the full length and down to half of it."""
    size, longest = arguments.batch_size, arguments.prompt_length
    prompts = held_out_prompts(
        tokenizer, num_prompts=size * arguments.num_batches, prompt_length=longest, seed=1
    )
    shortened = [prompt[i % size * longest // (2 * size) :] for i, prompt in enumerate(prompts)]
    return [shortened[start : start + size] for start in range(0, len(prompts), size)]


def take_all_turns(
    methods: list[Method], plain: Any, batches: list[list[list[int]]], arguments: CompareArguments
) -> dict[str, list[TimedRun]]:
    """What every way of decoding took and wrote of each batch; the first batch warms up, too."""
    sampling = {"do_sample": True, "temperature": arguments.temperature}
    decoding: dict[str, Any] = sampling if arguments.temperature else {"do_sample": False}
    decoding |= {"max_new_tokens": arguments.max_new_tokens, "pad_token_id": 0}
    runs = take_turns(methods, plain, [batches[0], *batches], 0, **decoding)
    drawn_together = arguments.temperature and arguments.batch_size > 1
    if arguments.dtype == "float32" and not drawn_together:
        for name, made in runs.items():
            if any(own.rows != other.rows for own, other in zip(made, runs[PLAIN], strict=True)):
                raise ValueError(f"{name} wrote another text than transformers' generate()")
    return {name: made[1:] for name, made in runs.items()}


def of_way(runs: dict[str, list[TimedRun]], name: str) -> dict[str, Any]:
    """Medians over the batches, and how many rows are plain generate()'s."""
    made = runs[name]
    whole = summarise(made, runs[PLAIN])
    summary = {key: whole[key] for key in ("tokens_per_second", "speedup", "tokens_per_step")}
    if name != PLAIN:
        summary["same_rows"] = round(whole["identical"] * sum(len(run.rows) for run in made))
    if "auto" in runs:
        pairs = zip(made, runs["auto"], strict=True)
        summary["auto_over_this"] = median(own.seconds / auto.seconds for own, auto in pairs)
    return summary


def table_of(report: dict[str, Any]) -> Table:
    """One row a way of decoding, in the order tried."""
    how = f"temperature {report['temperature']:g}" if report["temperature"] else "greedy"
    title = (
        f"{Path(report['target']).name}, {report['dtype']}, {how}, batches of "
        f"{report['batch_size']}; of fixed trees {report['expected_fastest']} is expected "
        "to be the fastest"
    )
    columns = ["", "tokens/s", "speed-up", "tokens per step", "auto is", "rows as plain"]
    cells = [
        [
            name,
            f"{way['tokens_per_second']:.1f}",
            f"{way['speedup']:.2f}",
            f"{way['tokens_per_step']:.2f}",
            f"{way['auto_over_this']:.2f} x" if "auto_over_this" in way else "",
            str(way.get("same_rows", "")),
        ]
        for name, way in report["ways"].items()
    ]
    return on_screen(title, (columns, cells))


main = command("scripts.compare.trees", write, __doc__)

if __name__ == "__main__":
    sys.exit(main())
