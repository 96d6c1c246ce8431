"""Measure ways to decode a target against transformers' own.

medusa-heads benchmark runs/demo/heads --num_prompts 20 --report runs/benchmark
medusa-heads benchmark runs/qwen --prompts question.jsonl --dtypes bfloat16 --batch_sizes 1 8
medusa-heads benchmark assets/demo-target --methods plain suffix recycling auto auto+compile
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from medusa_heads.cli.choices import apply_choice, print_choices
from medusa_heads.cli.flags.arguments import command
from medusa_heads.errors import first_line
from medusa_heads.files import check_folder
from medusa_heads.settings import at_least, flag
from medusa_heads.shared_flags import DeviceFlag, RemoteCodeFlag

if TYPE_CHECKING:
    import torch

    from medusa_heads.inference.bench.prompts import Prompt
    from medusa_heads.inference.bench.setting import Plan
    from medusa_heads.inference.bench.source import Source

DTYPES = ("bfloat16", "float16", "float32")
# Behind a lower precision, the same text is proved in float32 where that does not take long.
PROVED_PARAMETERS = 250_000_000
DECODINGS = ("greedy", "sampled")
_PROMPT_LENGTH = 64  # of the default prompts


@dataclass
class BenchmarkArguments(DeviceFlag, RemoteCodeFlag):
    """What to measure, on which prompts."""

    checkpoint: str = flag(
        MISSING, "Heads checkpoint, or a target without heads: a folder, or user/name[@revision]."
    )
    target: str | None = flag(None, "Hub id or path of the target. Default: that of the heads.")
    draft_model: list[str] = flag(
        [],
        "Hub id or path of a draft model, for the methods that need one; of several, draft-model "
        "chooses while it decodes, and transformers-assisted takes the first.",
        action="extend",
    )
    methods: list[str] | None = flag(
        None,
        "What to compare: plain (always measured), plain-compiled, transformers-prompt-lookup, "
        "transformers-assisted, heads[:TREE], draft-model[:TREE], or a drafter that needs no "
        "training, as of generate --drafter; of the last three kinds NAME+compile verifies "
        "through torch.compile, NAME+steps compiles whole steps, NAME+kernels records steps with "
        "fewer kernels (on a GPU), NAME+stream draws by transformers' own random stream, and with "
        "--corpus NAME+corpus[+stream][+compile] continues that, too. "
        "Default: plain, transformers-prompt-lookup and the heads (in float32 behind another "
        "dtype plain and the heads, to prove the output the same), without heads auto in their "
        "place; and draft-model and NAME+corpus where those are given.",
    )
    corpus: str | None = flag(None, "File or folder of text that the methods NAME+corpus continue.")
    batch_sizes: list[int] = flag([1], "Prompts decoded together.")
    prompts: str | None = flag(
        None,
        "Prompts, one a line, or .jsonl with prompt, text, messages, or turns and category as in "
        "Spec-Bench. Default: windows of Python's standard library, from packages that no "
        "training here has seen: give your own prompts for a chat model.",
    )
    num_prompts: int = flag(
        20, "Prompts to measure on, from all categories in turn; 0: all of --prompts."
    )
    max_prompt_length: int | None = flag(
        None, "Leave out longer ones of --prompts, in tokens; count them."
    )
    prompt_length: int | None = flag(None, "Tokens in each of the default prompts. Default: 64.")
    max_new_tokens: int = flag(128, "Tokens after each prompt.")
    temperature: float = flag(0.7, "Temperature of the sampled settings.")
    # train-heads draws the text it measures heads on with seed 0: other prompts than those.
    seed: int = flag(1, "Seed of the default prompts and of sampling.")
    tree: str = flag(
        "auto",
        "Tree of the method heads, unless it names one: auto, fastest, N, static:N, dynamic:N, "
        "none, chain, cartesian:A,B,.., FILE.json, one of them +suffix, or suffix.",
    )
    dtypes: list[str] = flag(
        [],
        "Dtypes of the target's weights; each is measured. Default: the fastest here "
        "that holds them exactly; and of a target with at most "
        f"{PROVED_PARAMETERS // 1_000_000}M parameters float32, to prove the output the same.",
    )
    decodings: list[str] = flag(list(DECODINGS), "What is measured: greedy, sampled, or both.")
    threads: int | None = flag(None, "CPU threads. Default: what suits plain decoding best.")
    report: str | None = flag(None, "Folder for report.json, report.md and report.png.")


def benchmark(arguments: BenchmarkArguments) -> None:
    at_least(arguments, 1 if arguments.prompts is None else 0, "num_prompts")
    at_least(arguments, 1, "prompt_length")
    if arguments.prompts is None and arguments.max_prompt_length is not None:
        raise ValueError(
            "max_prompt_length is for prompts of your own: give --prompts, or --prompt_length"
        )
    if arguments.prompts is not None and arguments.prompt_length is not None:
        raise ValueError(
            "prompt_length is that of the default prompts: leave it out beside --prompts, or give "
            "--max_prompt_length"
        )
    for name, known in (("dtypes", DTYPES), ("decodings", DECODINGS)):
        if unknown := [value for value in getattr(arguments, name) if value not in known]:
            raise ValueError(f"expected {name} among {', '.join(known)}, got {unknown[0]!r}")
    if arguments.report is not None:
        check_folder(arguments.report)
    from medusa_heads.checkpoint.stored_heads import read_sidecar
    from medusa_heads.inference.bench.methods import check_methods, needs_heads
    from medusa_heads.inference.bench.source import find_source
    from medusa_heads.machine.devices import find_device

    device = find_device(arguments.device)
    source = find_source(
        arguments.checkpoint, arguments.target, heads=needs_heads(arguments.methods or ["heads"])
    )
    has_heads = source.checkpoint is not None
    # Before dtypes are measured; what is said of methods is the same of all.
    asked = replace(arguments, dtypes=arguments.dtypes or ["float32"])
    settings = _plan(asked, has_heads).settings
    check_methods(
        [setting.methods for setting in settings],
        heads=has_heads,
        draft=bool(arguments.draft_model),
        corpus=arguments.corpus is not None,
    )
    if asked.tree != "auto" and settings == _plan(replace(asked, tree="auto"), has_heads).settings:
        raise ValueError(
            "a tree is of the method heads, where that names none of its own, and it is not among "
            "the methods: name it, or leave --tree out"
        )
    if not arguments.dtypes:
        dtypes, device = _chosen(arguments, source, device)
        arguments = replace(arguments, dtypes=dtypes)
    plan = _plan(arguments, has_heads)
    from rich.console import Console

    from medusa_heads.inference.bench import run
    from medusa_heads.inference.bench.report import tables, write_numbers, write_report
    from medusa_heads.trees.statistics import HeadStatistics

    prompts, left_out = _prompts(arguments, source)

    def keep(so_far: dict[str, Any]) -> None:
        """What was measured stays, should the rest be interrupted."""
        if arguments.report is not None:
            all_left_out = so_far["prompts_left_out"] + left_out
            write_numbers(arguments.report, so_far | {"prompts_left_out": all_left_out})

    print_choices()
    report = run.benchmark(
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
    Console().print(*tables(report))
    if report["prompts_left_out"]:
        print(f"Left out, as longer than asked for: {report['prompts_left_out']} prompts.")
    if arguments.report is not None:
        stored = read_sidecar(source.checkpoint).get("statistics") if source.checkpoint else None
        statistics = HeadStatistics.from_dict(stored) if stored else None
        for path in write_report(arguments.report, report, statistics):
            print(f"Written: {path}")


def _chosen(
    arguments: BenchmarkArguments, source: Source, usual: torch.device
) -> tuple[list[str], torch.device]:
    """The fastest dtype, and float32 for the proof where that is cheap; and the device, another
    than the usual one where that has no room for the weights."""
    from medusa_heads.machine.choice import choose
    from medusa_heads.target.loading import stored_form

    trusted = arguments.trust_remote_code
    name, revision = source.target_name(trust_remote_code=trusted)
    form = stored_form(name, revision=revision, trust_remote_code=trusted)
    if form is None or form.dtype is None:
        return ["float32"], usual
    asked = arguments.device
    choice = choose("tree", device=asked, stored=form.dtype, shape=form.shape, count_threads=False)
    apply_choice(choice)
    fastest = str(choice.dtype).removeprefix("torch.")
    proved = form.shape.parameters <= PROVED_PARAMETERS
    return list(dict.fromkeys([fastest, "float32"] if proved else [fastest])), choice.device


def _plan(arguments: BenchmarkArguments, has_heads: bool) -> Plan:
    from medusa_heads.inference.bench.methods import (
        COMPILE,
        CORPUS,
        DRAFT_MODEL,
        HEADS,
        KERNELS,
        STEPS,
        STREAM,
    )
    from medusa_heads.inference.bench.setting import Plan, default_settings

    def methods(default: tuple[str, ...]) -> tuple[str, ...]:
        names = arguments.methods
        if names is None:
            names = [name if has_heads else name.replace(HEADS, "auto") for name in default]
            if arguments.corpus is not None:
                drafts, behind, stream = names[-1].partition(STREAM)
                names.append(drafts + CORPUS + behind + stream)
            if arguments.draft_model:
                names.append(DRAFT_MODEL)
        ends = map("".join, product(("", CORPUS), ("", STREAM), ("", COMPILE, STEPS, KERNELS)))
        treed = {HEADS + end: f"{HEADS}:{arguments.tree}{end}" for end in ends}
        return tuple(treed.get(name, name) for name in names)

    settings = [
        replace(setting, methods=methods(setting.methods))
        for setting in default_settings(arguments.dtypes)
        if setting.name in arguments.decodings
    ]
    given = [field.name for field in fields(Plan) if field.name != "settings"]
    return Plan(settings, **{name: getattr(arguments, name) for name in given})


def _prompts(arguments: BenchmarkArguments, source: Source) -> tuple[list[Prompt], int]:
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
        prompt_length=arguments.prompt_length or _PROMPT_LENGTH,
        seed=arguments.seed,
    )
    return [Prompt(tuple(window)) for window in windows], 0


main = command("medusa-heads benchmark", benchmark, __doc__, "checkpoint")
