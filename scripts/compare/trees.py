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
import time
from dataclasses import MISSING, dataclass
from pathlib import Path
from statistics import median
from typing import Any

# Waiting threads sleep instead of spinning; read when torch is loaded, so set before it is.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from rich.table import Table

from medusa_heads import MedusaModel
from medusa_heads.cli.decoding import load_model
from medusa_heads.cli.flags.arguments import command
from medusa_heads.cli.flags.decoding import ModelArguments
from medusa_heads.inference.bench.prompts import held_out_prompts
from medusa_heads.inference.plan.tree_size import expected_tokens, fastest, tune
from medusa_heads.machine import describe_machine
from medusa_heads.settings import flag
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
    """Compare as the flags say, and write what comes out."""
    report = compare(arguments)
    write_report(arguments.output, report, table_of(report))


def compare(arguments: CompareArguments) -> dict[str, Any]:
    """Plain values for JSON: machine, target, and a row for each way of decoding."""
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
    # An early end would leave batches of unequal work.
    target.model.generation_config.eos_token_id = None
    ways: dict[str, Any] = {PLAIN: target.model}
    for tree in arguments.trees or ["auto", *expected]:
        # By its own random stream, so that texts can be compared.
        ways[tree] = MedusaModel(
            target, heads, statistics=chain.statistics, tree=tree, rng="transformers"
        )
    sizes = tune(target, chain.drafting, chain.statistics, batch_size=arguments.batch_size)
    batches = make_batches(arguments, tokenizer, target.device)
    turns = take_turns(ways, batches, arguments)
    medusas = {name: way for name, way in ways.items() if name != PLAIN}
    return {
        "target": target.name_or_path,
        "dtype": arguments.dtype,
        "batch_size": arguments.batch_size,
        "temperature": arguments.temperature,
        "new_tokens": arguments.max_new_tokens,
        "machine": machine | {"load_average_after": describe_machine()["load_average"]},
        "expected_fastest": fastest(sizes).tree,
        "sizes": {size.tree: size.step_seconds for size in sizes},
        "ways": {name: summarise(turns, name, medusas) for name in ways},
    }


def make_batches(
    arguments: CompareArguments, tokenizer: Any, device: torch.device
) -> list[dict[str, Any]]:
    """Left-padded batches: prompts of the full length and down to half of it."""
    size, longest = arguments.batch_size, arguments.prompt_length
    prompts = held_out_prompts(
        tokenizer, num_prompts=size * arguments.num_batches, prompt_length=longest, seed=1
    )
    batches = []
    for start in range(0, len(prompts), size):
        lengths = [longest - row * longest // (2 * size) for row in range(size)]
        ids_BT = torch.tensor(prompts[start : start + size], device=device)
        padding_B1 = torch.tensor([[longest - n] for n in lengths], device=device)
        mask_BT = (torch.arange(longest, device=device) >= padding_B1).long()
        batches.append({"input_ids": ids_BT * mask_BT, "attention_mask": mask_BT})
    return batches


def take_turns(
    ways: dict[str, Any], batches: list[dict[str, Any]], arguments: CompareArguments
) -> list[dict[str, dict[str, Any]]]:
    """For each batch, what every way of decoding took and wrote; the first batch warms up too."""
    sampling = {"do_sample": True, "temperature": arguments.temperature}
    decoding: dict[str, Any] = sampling if arguments.temperature else {"do_sample": False}
    decoding |= {"max_new_tokens": arguments.max_new_tokens, "pad_token_id": 0}
    turns = []
    for index, batch in enumerate([batches[0], *batches]):
        first = index % len(ways)
        order = [*ways][first:] + [*ways][:first]
        turn = {name: decode(ways[name], batch, decoding, seed=index) for name in order}
        plain_BT = turn[PLAIN].pop("tokens")
        for name in [name for name in ways if name != PLAIN]:
            same = int((turn[name].pop("tokens") == plain_BT).all(dim=1).sum())
            exact = arguments.dtype == "float32" and not (
                arguments.temperature and arguments.batch_size > 1
            )
            if exact and same < len(plain_BT):
                raise ValueError(f"{name} wrote another text than transformers' generate()")
            turn[name]["same"] = same
        turns.append(turn)
    return turns[1:]


def decode(way: Any, batch: dict[str, Any], decoding: dict[str, Any], seed: int) -> dict[str, Any]:
    """One generation, timed."""
    torch.manual_seed(seed)
    device = batch["input_ids"].device
    wait(device)
    started = time.perf_counter()
    tokens_BT = way.generate(**batch, **decoding)
    wait(device)
    seconds = time.perf_counter() - started
    new_BT = tokens_BT[:, batch["input_ids"].shape[1] :]
    stats = getattr(way, "last_stats", None)
    steps = stats.steps if stats is not None else new_BT.numel()
    return {"seconds": seconds, "tokens": new_BT, "count": new_BT.numel(), "steps": steps}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summarise(
    turns: list[dict[str, dict[str, Any]]], name: str, medusas: dict[str, Any]
) -> dict[str, Any]:
    """Medians over the batches; the share of rows that are plain generate()'s."""
    summary = {
        "tokens_per_second": median(t[name]["count"] / t[name]["seconds"] for t in turns),
        "speedup": median(t[PLAIN]["seconds"] / t[name]["seconds"] for t in turns),
        "tokens_per_step": sum(t[name]["count"] for t in turns)
        / sum(t[name]["steps"] for t in turns),
    }
    if name != PLAIN:
        summary["same_rows"] = sum(turn[name]["same"] for turn in turns)
    if "auto" in medusas:
        summary["auto_over_this"] = median(t[name]["seconds"] / t["auto"]["seconds"] for t in turns)
    return summary


def table_of(report: dict[str, Any]) -> Table:
    """One row a way of decoding, in the order tried."""
    how = f"temperature {report['temperature']:g}" if report["temperature"] else "greedy"
    table = Table(
        title=f"{Path(report['target']).name}, {report['dtype']}, {how}, batches of "
        f"{report['batch_size']}; of fixed trees {report['expected_fastest']} is expected "
        "to be the fastest"
    )
    table.add_column("", no_wrap=True)
    for column in ("tokens/s", "speed-up", "tokens per step", "auto is", "rows as plain"):
        table.add_column(column, justify="right")
    for name, way in report["ways"].items():
        table.add_row(
            name,
            f"{way['tokens_per_second']:.1f}",
            f"{way['speedup']:.2f}",
            f"{way['tokens_per_step']:.2f}",
            f"{way['auto_over_this']:.2f} x" if "auto_over_this" in way else "",
            str(way.get("same_rows", "")),
        )
    return table


main = command("scripts.compare.trees", write, __doc__)

if __name__ == "__main__":
    sys.exit(main())
