"""The command `medusa-heads benchmark`.

medusa-heads benchmark runs/demo/heads --num_prompts 20 --report runs/demo
medusa-heads benchmark runs/qwen --prompts question.jsonl --dtypes bfloat16 --batch_sizes 1 8
medusa-heads benchmark assets/demo-target --methods plain suffix recycling auto auto+compile
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from medusa_heads.cli.flags.arguments import parse_arguments, run_command
from medusa_heads.cli.flags.benchmark import (
    DECODINGS,
    DTYPES,
    PROVED_PARAMETERS,
    BenchmarkArguments,
)
from medusa_heads.cli.settled import settle, tell_choices
from medusa_heads.errors import first_line
from medusa_heads.files import check_folder

if TYPE_CHECKING:
    from medusa_heads.inference.bench.prompts import Prompt
    from medusa_heads.inference.bench.setting import Plan
    from medusa_heads.inference.bench.source import Source

PROG = "medusa-heads benchmark"


def main(argv: Sequence[str]) -> int:
    """Measure as the flags say; returns the exit code."""
    return run_command(lambda: _parse_and_run(argv), prog=PROG)


def _parse_and_run(argv: Sequence[str]) -> None:
    (arguments,) = parse_arguments(
        (BenchmarkArguments,),
        argv,
        prog=PROG,
        description="Measure ways to decode a target against transformers' own.",
        positional="checkpoint",
    )
    run_benchmark(arguments)


def run_benchmark(arguments: BenchmarkArguments) -> dict[str, Any]:
    """Measure, show the tables, write the report; returns what `report.json` holds.

    Raises:
        ValueError: a setting, a file, the checkpoint or its target is unusable.
    """
    _check(arguments)
    if arguments.report is not None:
        check_folder(arguments.report)
    from medusa_heads.checkpoint.stored_heads import read_sidecar
    from medusa_heads.inference.bench.methods import check_methods, needs_heads
    from medusa_heads.inference.bench.source import find_source
    from medusa_heads.machine import find_device

    device = find_device(arguments.device)
    source = find_source(
        arguments.checkpoint, arguments.target, heads=needs_heads(arguments.methods or ["heads"])
    )
    has_heads = source.checkpoint is not None
    if not arguments.dtypes:
        arguments = replace(arguments, dtypes=_dtypes(arguments, source))
    plan = _plan(arguments, has_heads)
    check_methods(
        [setting.methods for setting in plan.settings],
        heads=has_heads,
        draft=bool(arguments.draft_model),
        corpus=arguments.corpus is not None,
    )
    from rich.console import Console

    from medusa_heads.inference.bench.report import tables, write_numbers, write_report
    from medusa_heads.inference.bench.run import benchmark
    from medusa_heads.trees.statistics import HeadStatistics

    prompts, left_out = _prompts(arguments, source)

    def keep(so_far: dict[str, Any]) -> None:
        """What was measured stays, should the rest be interrupted."""
        if arguments.report is not None:
            all_left_out = so_far["prompts_left_out"] + left_out
            write_numbers(arguments.report, so_far | {"prompts_left_out": all_left_out})

    tell_choices()
    report = benchmark(
        arguments.checkpoint,
        prompts,
        plan,
        target=arguments.target,
        draft_model=arguments.draft_model,
        corpus=arguments.corpus,
        device=str(device),
        trust_remote_code=arguments.trust_remote_code,
        on_setting=keep,
    )
    report["prompts_left_out"] += left_out
    console = Console()
    for table in tables(report):
        console.print(table)
    if report["prompts_left_out"]:
        console.print(f"Left out, as longer than asked for: {report['prompts_left_out']} prompts.")
    if arguments.report is not None:
        stored = read_sidecar(source.checkpoint).get("statistics") if source.checkpoint else None
        statistics = HeadStatistics.from_dict(stored) if stored else None
        for path in write_report(arguments.report, report, statistics):
            console.print(f"Written: {path}", soft_wrap=True, highlight=False)
    return report


def _check(arguments: BenchmarkArguments) -> None:
    if arguments.num_prompts < 0 or (arguments.prompts is None and arguments.num_prompts == 0):
        raise ValueError(f"num_prompts must be at least 1, got {arguments.num_prompts}")
    for name, given, known in (
        ("dtypes", arguments.dtypes, DTYPES),
        ("decodings", arguments.decodings, DECODINGS),
    ):
        if unknown := [value for value in given if value not in known]:
            raise ValueError(f"expected {name} among {', '.join(known)}, got {unknown[0]!r}")


def _dtypes(arguments: BenchmarkArguments, source: Source) -> list[str]:
    """The fastest, and float32 for the proof where that is cheap."""
    from medusa_heads.machine import choose
    from medusa_heads.target.loading import stored_form

    trusted = arguments.trust_remote_code
    name, revision = source.target_name(trust_remote_code=trusted)
    form = stored_form(name, revision=revision, trust_remote_code=trusted)
    if form is None:
        return ["float32"]
    choice = choose(
        "tree",
        device=arguments.device,
        stored=form.dtype,
        shape=form.shape,
        count_threads=False,
    )
    settle(choice)
    fastest = str(choice.dtype).removeprefix("torch.")
    proved = form.shape.parameters <= PROVED_PARAMETERS
    return list(dict.fromkeys([fastest, "float32"] if proved else [fastest]))


def _plan(arguments: BenchmarkArguments, has_heads: bool) -> Plan:
    from medusa_heads.inference.bench.methods import COMPILE, CORPUS, DRAFT_MODEL, HEADS
    from medusa_heads.inference.bench.setting import Plan, Setting, default_settings

    def methods(default: tuple[str, ...]) -> tuple[str, ...]:
        names = arguments.methods
        if names is None:
            names = [name if name != HEADS or has_heads else "auto" for name in default]
            if arguments.corpus is not None:
                names.append(names[-1] + CORPUS)
            if arguments.draft_model:
                names.append(DRAFT_MODEL)
        ends = ("", COMPILE, CORPUS, CORPUS + COMPILE)
        treed = {HEADS + end: f"{HEADS}:{arguments.tree}{end}" for end in ends}
        return tuple(treed.get(name, name) for name in names)

    return Plan(
        settings=[
            Setting(setting.name, setting.dtype, methods(setting.methods))
            for setting in default_settings(arguments.dtypes)
            if setting.name in arguments.decodings
        ],
        batch_sizes=arguments.batch_sizes,
        max_new_tokens=arguments.max_new_tokens,
        max_prompt_length=arguments.max_prompt_length,
        temperature=arguments.temperature,
        seed=arguments.seed,
        threads=arguments.threads,
    )


def _prompts(arguments: BenchmarkArguments, source: Source) -> tuple[list[Prompt], int]:
    """The prompts, and how many were too long."""
    from medusa_heads.inference.bench.prompts import (
        Prompt,
        choose_prompts,
        encode_questions,
        held_out_prompts,
        read_questions,
    )
    from medusa_heads.target.loading import load_tokenizer

    # The file first: a misspelt name is told before anything is loaded.
    questions = read_questions(arguments.prompts) if arguments.prompts is not None else None
    trusted = arguments.trust_remote_code
    name, revision = source.target_name(trust_remote_code=trusted)
    try:
        tokenizer = load_tokenizer(name, revision=revision, trust_remote_code=trusted)
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise ValueError(f"expected a tokenizer beside the target {name!r}: {reason}") from error
    if questions is not None:
        encoded = encode_questions(questions, tokenizer)
        count = arguments.num_prompts or len(encoded)
        return choose_prompts(encoded, count, arguments.max_prompt_length)
    windows = held_out_prompts(
        tokenizer,
        num_prompts=arguments.num_prompts,
        prompt_length=arguments.prompt_length,
        seed=arguments.seed,
    )
    return [Prompt(tuple(window)) for window in windows], 0
