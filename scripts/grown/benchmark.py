"""Benchmark a trained small target and its heads at a large model's cost, without writing the large
model anywhere.

python -m scripts.grown.benchmark --shape 0.1b --report runs/grown
python -m scripts.grown.benchmark --shape 7b --device cuda --batch_sizes 1 8 32 --report runs/7b

The target is grown as target.py does it, on the device where it is measured. The methods are
those of `medusa-heads benchmark`, and so is the report, without the picture. With
`--must_be_identical` the exit code is 1 where a method of this engine wrote other text than plain
decoding: to be asked for in float32, where rounding cannot tip a choice.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from medusa_heads.cli.flags.arguments import command
from medusa_heads.cli.verbs.benchmark import DECODINGS
from medusa_heads.machine.devices import find_device
from medusa_heads.settings import flag

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from medusa_heads.inference.bench.methods import Models


@dataclass
class Arguments:
    """What to grow, and what to measure on it."""

    heads: str = flag(
        "assets/demo-heads", "heads checkpoint, which names the small target that it belongs to"
    )
    shape: Literal["own", "0.1b", "1b", "7b"] = flag(
        "own", "what they are grown to; own: measured as they are"
    )
    methods: list[str] = flag(
        ["plain", "transformers-prompt-lookup", "heads:auto"],
        "as of medusa-heads benchmark, without those of a draft model",
    )
    dtype: Literal["bfloat16", "float32"] = flag("bfloat16", "of the weights")
    decodings: list[str] = flag(["greedy"], "greedy, sampled, or both")
    batch_sizes: list[int] = flag([1], "prompts decoded together")
    num_prompts: int = flag(8, "prompts for each batch size, and two batches at least")
    prompt_length: int = flag(64, "tokens in each prompt")
    max_new_tokens: int = flag(128, "tokens after each prompt")
    device: str | None = flag(None, "such as cuda; default: the best there is")
    report: str | None = flag(None, "folder for report.json and report.md")
    must_be_identical: bool = flag(False, "exit code 1 where the text is not plain decoding's")


def measure(arguments: Arguments) -> int:
    """Measure as the flags say; returns the exit code."""
    report = run(arguments)
    different = other_texts(report) if arguments.must_be_identical else []
    for line in different:
        print(line, file=sys.stderr)
    return int(bool(different))


def run(arguments: Arguments) -> dict[str, Any]:
    """Grow, measure, show the tables, write the report and return it.

    Raises:
        ValueError: a setting, the checkpoint or its target is unusable.
    """
    if min(arguments.batch_sizes, default=0) < 1 or arguments.num_prompts < 1:
        raise ValueError("batch_sizes and num_prompts must be at least 1")
    if unknown := [name for name in arguments.decodings if name not in DECODINGS]:
        raise ValueError(f"expected decodings among {', '.join(DECODINGS)}, got {unknown[0]!r}")
    device = find_device(arguments.device)
    from rich.console import Console

    from medusa_heads.inference.bench.methods import check_methods
    from medusa_heads.inference.bench.report import tables, write_numbers
    from medusa_heads.inference.bench.run import measure_models
    from medusa_heads.inference.bench.setting import Plan, Setting
    from scripts.grown.model import prompts_of

    check_methods([arguments.methods], heads=True, draft=False)
    console = Console(highlight=False)
    models = _models(arguments, device, console)
    count = max(arguments.num_prompts, 2 * max(arguments.batch_sizes))
    prompts = prompts_of(arguments.heads, count, arguments.prompt_length)
    settings = [
        Setting(name, arguments.dtype, tuple(arguments.methods)) for name in arguments.decodings
    ]
    whole: dict[str, Any] = {}
    measured: list[dict[str, Any]] = []
    for size in arguments.batch_sizes:

        def keep(report: dict[str, Any]) -> None:
            whole.update(report | {"settings": [*measured, *report["settings"]]})
            if arguments.report is not None:
                write_numbers(arguments.report, whole)

        report = measure_models(
            lambda _: models,
            prompts[: max(arguments.num_prompts // size, 2) * size],
            Plan(settings, batch_sizes=[size], max_new_tokens=arguments.max_new_tokens),
            progress=sys.stderr.isatty(),
            on_setting=keep,
        )
        measured.extend(report["settings"])
        console.print(*tables(report))
    return whole


def _models(arguments: Arguments, device: torch.device, console: Console) -> Models:
    import torch

    from medusa_heads.inference.bench.methods import Models
    from scripts.grown.model import grown_medusa

    started = time.perf_counter()
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    medusa, grown = grown_medusa(arguments.heads, arguments.shape, dtype=dtype, device=device)
    if grown is None:
        return Models(medusa.target, medusa)
    differences = grown.differences()
    seconds = time.perf_counter() - started
    model: Any = medusa.target.model
    console.print(
        f"Grown to {model.num_parameters() / 1e6:.0f} M parameters: {seconds:.0f} seconds"
    )
    for what, (difference, spread) in differences.items():
        console.print(f"{what}: logits differ by {difference:.2g} at most, spread {spread:.2g}")
    return Models(medusa.target, medusa)


def other_texts(report: Mapping[str, Any]) -> list[str]:
    """A line for every method of this engine that wrote anything but plain decoding's text."""
    return [
        f"{method['name']} wrote other text than plain decoding ({setting['name']}, "
        f"{setting['batch_size']} rows): {method['identical']:.0%} of {setting['prompts']} the same"
        for setting in report["settings"]
        # Sampled rows of a batch draw from one stream: the order of steps makes their text.
        if setting["name"] == "greedy" or setting["batch_size"] == 1
        for method in setting["methods"]
        if "accepted_by_depth" in method and method["identical"] < 1.0
    ]


main = command("scripts.grown.benchmark", measure, __doc__)

if __name__ == "__main__":
    sys.exit(main())
