"""How much of a step on a GPU is the target's own forward, and in which kernels its time goes.

python -m scripts.grown.shares --shape 7b --batch_sizes 1 8 32 --output runs/shares.json

Heads alone, and `auto` where it verifies as many nodes, decode held-out prompts, a small target
grown as target.py does it. Beside their steps stands the forward of as many nodes behind as many
tokens, recorded as they are, by itself: what a step takes beyond that is drafts, acceptance and
bookkeeping.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from medusa_heads import MedusaModel
from medusa_heads.cli.flags.arguments import command
from medusa_heads.inference.engine.state import padded_mask
from medusa_heads.machine.devices import find_device, wait_for
from medusa_heads.machine.facts import describe_machine
from medusa_heads.settings import flag
from medusa_heads.target.graphs import captured
from medusa_heads.target.graphs.captured import CapturedTarget
from medusa_heads.trees.tree import TreeShape
from scripts.grown.model import grown_medusa, prompts_of
from scripts.measure.written import write_report

_TOLD = ("shape", "dtype", "compile", "nodes", "temperature", "top_p")
_WARM_UP, _TEXTS, _FORWARDS, _KERNELS = 3, 3, 20, 12  # of each: texts, texts, calls, rows to show


@dataclass
class Arguments:
    """What to measure."""

    heads: str = flag("assets/demo-heads", "heads checkpoint")
    shape: Literal["own", "0.1b", "1b", "7b"] = flag("7b", "what it and its target are grown to")
    dtype: Literal["bfloat16", "float32"] = flag("bfloat16", "of the weights")
    compile: Literal["capture", "kernels"] = flag("kernels", "how steps are recorded")
    batch_sizes: list[int] = flag([1, 8, 32], "texts decoded together")
    nodes: int = flag(16, "that a step verifies, the root included")
    trees: list[str] | None = flag(None, "by default static, of as many nodes, and auto")
    prompt_length: int = flag(64, "tokens in each prompt")
    new_tokens: int = flag(128, "tokens after each prompt")
    temperature: float = flag(0.0, "of text that is drawn; 0 for greedy text")
    top_p: float = flag(1.0, "of text that is drawn")
    device: str | None = flag(None, "such as cuda")
    output: str = flag("runs/shares.json", "the numbers")


@torch.no_grad()
def write(arguments: Arguments) -> None:
    """Measure as the flags say, and write what comes out."""
    if min(*arguments.batch_sizes, arguments.nodes - 1, arguments.new_tokens) < 1:
        raise ValueError("expected rows and new tokens of at least 1, and nodes of at least 2")
    device = find_device(arguments.device)
    if not captured.records(device):
        raise ValueError(f"steps are recorded on an NVIDIA GPU alone, and this is {device}")
    machine, dtype = describe_machine(), getattr(torch, arguments.dtype)
    medusa, _ = grown_medusa(arguments.heads, arguments.shape, dtype=dtype, device=device)
    target: Any = medusa.target.model
    target.generation_config.eos_token_id = None  # texts of one length
    count = max(arguments.batch_sizes) * 2 + _WARM_UP + _TEXTS
    prompts = prompts_of(arguments.heads, count, arguments.prompt_length)
    told = {name: getattr(arguments, name) for name in _TOLD}
    steps: list[dict[str, Any]] = []
    report = told | {"machine": machine, "steps": steps}
    for rows in arguments.batch_sizes:
        for tree in arguments.trees or (f"static:{arguments.nodes - 1}", "auto"):
            steps.append(of_steps(medusa, arguments, prompts, rows, tree))
            # As it comes: what follows may be cut off.
            write_report(arguments.output, report, table_of(steps), kernels_of(steps[-1]))


def of_steps(
    medusa: MedusaModel, arguments: Arguments, prompts: list[list[int]], rows: int, tree: str
) -> dict[str, Any]:
    """Texts of so many rows, and the forwards of their trees, in milliseconds. Raises ValueError:
    steps cannot be recorded here."""
    heads, compile = medusa.heads, arguments.compile
    model = MedusaModel(medusa.target.model, heads, tree=tree, compile=compile)
    target = model.target
    assert isinstance(target, CapturedTarget)
    nodes = min(arguments.nodes, model.drafter.num_nodes)  # auto may have found that fewer pay
    if model.drafter.sizes:
        model.drafter.sizes = [nodes - 1]
    began, seconds, tokens = time.perf_counter(), [], []
    for turn in range(_WARM_UP + _TEXTS):
        among = [prompts[(turn * rows + i) % len(prompts)] for i in range(rows)]
        generate(model, arguments, arguments.new_tokens, among)
        stats = model.last_stats
        if "step" not in stats.seconds:
            raise ValueError("steps cannot be recorded here, as a warning says")
        if turn == _WARM_UP - 1:
            ready = time.perf_counter() - began
        elif turn >= _WARM_UP:
            seconds.append(stats.seconds["step"] / (stats.forwards - 1))
            tokens.append(stats.tokens_per_step)
    context = arguments.prompt_length + arguments.new_tokens // 2
    slots = arguments.prompt_length + arguments.new_tokens + model.drafter.num_nodes
    forward, of_one = (forward_seconds(target, rows, count, context, slots) for count in (nodes, 1))
    kernels = profiled(model, arguments, prompts[:rows])
    return {
        "rows": rows,
        "tree": tree,
        "nodes": nodes,
        "ready_seconds": ready,
        "tokens_per_step": median(tokens),
        "step": 1e3 * median(seconds),
        "forward": 1e3 * forward,
        "forward_of_one": 1e3 * of_one,
        "beside": median(seconds) / forward - 1,
        "kernels_started": sum(kernel["calls"] for kernel in kernels),
        "kernels": kernels,
    }


def generate(
    model: MedusaModel, arguments: Arguments, new_tokens: int, prompts: list[list[int]]
) -> None:
    """Decode as the flags say."""
    ids = torch.tensor(prompts, device=model.target.device)
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    if arguments.temperature:
        drawn = {"temperature": arguments.temperature, "top_p": arguments.top_p}
        options |= {"do_sample": True, **drawn}
    model.generate(ids, attention_mask=torch.ones_like(ids), **options)


def profiled(
    model: MedusaModel, arguments: Arguments, prompts: list[list[int]]
) -> list[dict[str, Any]]:
    """Of a step, which kernels take how many microseconds, the slowest first: what a text takes
    more than its first tokens do, so that its prompt is left out."""
    on_gpu = model.target.device.type == "cuda"
    spent = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    found, steps = defaultdict[str, list[float]](lambda: [0.0, 0.0]), 0
    new_tokens = arguments.new_tokens
    for sign, tokens in ((-1, max(new_tokens // 4, 1)), (1, new_tokens)):
        kinds = [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
        with profile(activities=kinds) as seen:
            generate(model, arguments, tokens, prompts)
        steps += sign * model.last_stats.forwards
        for event in seen.key_averages():
            of_name = found[event.key]
            of_name[0] += sign * getattr(event, spent)
            of_name[1] += sign * event.count
    kernels = [
        {"us": us / steps, "calls": calls / steps, "name": name}
        for name, (us, calls) in found.items()
        if us > 0 and calls > 0
    ]
    return sorted(kernels, key=lambda kernel: -kernel["us"])


def forward_seconds(
    target: CapturedTarget, rows: int, nodes: int, context: int, slots: int
) -> float:
    """The mean of forwards of a chain of so many nodes behind a text, one behind the other."""
    cache = target.new_cache(rows, slots)
    tokens_BN = torch.ones(rows, nodes, dtype=torch.long, device=target.device)
    tree = TreeShape.from_choices([(0,) * depth for depth in range(1, nodes)]).tree(tokens_BN)
    slots_C = torch.arange(target.capacity(slots), device=target.device)
    valid_BC = (slots_C < context).expand(rows, -1)
    places_B1 = torch.full((rows, 1), context, device=target.device)
    mask = padded_mask(tree, valid_BC, places_B1, None, context, torch.zeros_like(places_B1[:, 0]))
    with target.capture_hidden():
        for _ in range(_WARM_UP):
            target.verify(tree, cache, mask)
        return seconds_of(lambda: target.verify(tree, cache, mask), target) / _FORWARDS


def seconds_of(function: Callable[[], object], target: CapturedTarget) -> float:
    """All calls together."""
    wait_for(target.device)
    started = time.perf_counter()
    for _ in range(_FORWARDS):
        function()
    wait_for(target.device)
    return time.perf_counter() - started


def table_of(rows: list[dict[str, Any]]) -> Table:
    """Milliseconds, and what is beside the forward."""
    table = Table(
        "rows", "tree", "nodes", "ready, s", "tokens per step", "step", "forward", "of one node"
    )
    table.add_column("beside", justify="right")
    for row in rows:
        times = [f"{row[name]:.2f}" for name in ("tokens_per_step", "step", "forward")]
        ready, one = f"{row['ready_seconds']:.1f}", f"{row['forward_of_one']:.2f}"
        beside = f"{row['beside']:.1%}"
        table.add_row(str(row["rows"]), row["tree"], str(row["nodes"]), ready, *times, one, beside)
    return table


def kernels_of(row: dict[str, Any]) -> Table:
    """Which take most of a step."""
    started = f"{row['kernels_started']:.0f} kernels a step"
    table = Table("us", "calls", "kernel", title=f"{row['rows']} rows, {row['tree']}: {started}")
    for kernel in row["kernels"][:_KERNELS]:
        table.add_row(f"{kernel['us']:.0f}", f"{kernel['calls']:.1f}", kernel["name"][:70])
    return table


main = command("scripts.grown.shares", write, __doc__)

if __name__ == "__main__":
    sys.exit(main())
