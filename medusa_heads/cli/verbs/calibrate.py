"""Measure a checkpoint's heads on text, and store what they are worth in the checkpoint.

medusa-heads calibrate vicuna-heads --dataset answers.jsonl
medusa-heads calibrate vicuna-heads --dataset articles.txt --self_distill
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from medusa_heads.cli.decoding import load_model
from medusa_heads.cli.flags.arguments import parse_arguments, run_command
from medusa_heads.cli.flags.decoding import ModelArguments
from medusa_heads.contents import instead_of_heads, is_heads
from medusa_heads.errors import at_least
from medusa_heads.files import check_folder, expanded
from medusa_heads.inference.regeneration.arguments import DistillArguments
from medusa_heads.training.arguments.data import DataArguments

if TYPE_CHECKING:
    from rich.table import Table

    from medusa_heads.data.sources import Corpus
    from medusa_heads.target.target import TargetModel
    from medusa_heads.trees.statistics import HeadStatistics

MAX_POSITIONS = 8192
_NODES = 32
_TOP = (1, 2, 5)


@dataclass
class CalibrateArguments(ModelArguments):
    """Which heads, and on what text."""

    checkpoint: str = field(
        metadata={"help": "Heads checkpoint: a folder that train-heads, convert or pull wrote."}
    )
    dataset: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Text like that to be written, best the target's own answers: a file, a "
            "folder, a hub id or 'stdlib', as train-heads reads them."
        },
    )
    dataset_config: str | None = field(
        default=None, metadata={"help": "Configuration (subset) of a hub dataset."}
    )
    dataset_split: str = field(
        default="train",
        metadata={"help": "Split to measure on. Of stdlib it is always the held-out packages."},
    )
    text_column: str | None = field(
        default=None, metadata={"help": "Column that holds plain text, if not 'text'."}
    )
    self_distill: bool = field(
        default=False,
        metadata={
            "help": "Let the target continue prompts from plain text first, and measure on what it "
            "wrote: what the heads will meet."
        },
    )
    max_length: int = field(default=512, metadata={"help": "Longest row in tokens."})
    max_positions: int = field(
        default=MAX_POSITIONS,
        metadata={"help": "Positions of text to measure, about. They are drawn from all of it."},
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""

    def work() -> None:
        (arguments,) = parse_arguments(
            (CalibrateArguments,),
            argv,
            prog="medusa-heads calibrate",
            description=__doc__ or "",
            positional="checkpoint",
        )
        calibrate(arguments)

    return run_command(work)


def calibrate(arguments: CalibrateArguments) -> HeadStatistics:
    """Measure the heads, store the result in their checkpoint, and show it.

    Raises:
        ValueError: checkpoint, target, text or a setting is unusable. The checkpoint is as it was.
        OSError: its folder cannot be written, or the target has no tokenizer.
    """
    at_least(arguments, 1, "max_positions")
    folder = _folder(arguments.checkpoint)
    corpus, settings = find_text(arguments)
    from datasets import disable_progress_bars
    from rich.console import Console
    from tqdm import tqdm

    disable_progress_bars()  # those of a small table; the target's work has one of its own
    # "chain": attaching must not measure already.
    model, tokenizer = load_model(arguments, tree="chain")
    from medusa_heads.checkpoint.checkpoint import replace_statistics
    from medusa_heads.checkpoint.provenance import provenance
    from medusa_heads.training.hidden.states import HiddenStates
    from medusa_heads.training.measure.calibration import measure_heads
    from medusa_heads.training.measure.measured_text import draw_rows, measurable

    if arguments.self_distill:
        corpus = _own_text(model.target, tokenizer, corpus, arguments.max_positions)
    num_heads = model.heads.config.num_heads
    rows = draw_rows(
        model.target,
        corpus,
        tokenizer,
        settings,
        num_heads=num_heads,
        tokens=arguments.max_positions,
    )
    measure = partial(measure_heads, model.heads, HiddenStates(model.target))
    console = Console()
    positions = measurable(rows, num_heads)
    longest = max(range(len(rows)), key=positions.__getitem__)
    start = time.perf_counter()
    measure(rows.select([longest]))  # all of it, for one row: what the whole text will take
    seconds = (time.perf_counter() - start) * sum(positions) / positions[longest]
    console.print(
        f"Measuring {num_heads} heads at {sum(positions):,} positions: about {seconds:.0f} s",
        highlight=False,
    )
    statistics, _ = measure(rows, watch=partial(tqdm, desc="reading", unit="batch", leave=False))
    replace_statistics(folder, statistics, provenance({"text": asdict(arguments)}))
    console.print(make_table(statistics))
    nodes = len(statistics.choices(_NODES))
    console.print(
        f"A static tree of {nodes} nodes is expected to give "
        f"{statistics.expected_tokens_per_step(nodes):.2f} tokens per step in such text.",
        highlight=False,
    )
    console.print(f"Stored in {folder}", soft_wrap=True, highlight=False)
    return statistics


def find_text(arguments: CalibrateArguments) -> tuple[Corpus, DataArguments]:
    """The corpus to measure on, and how it is read.

    Raises:
        ValueError: none is named, or it cannot be read.
    """
    if not arguments.dataset:
        raise ValueError(
            "--dataset is missing: name text to measure on, best the target's own answers (a "
            "file, a folder, a hub id or 'stdlib')"
        )
    settings = DataArguments(
        dataset=arguments.dataset,
        text_column=arguments.text_column,
        max_length=arguments.max_length,
    )
    from medusa_heads.data.finding import HELD_OUT
    from medusa_heads.data.sources import load_corpus

    embedded = arguments.dataset == ["stdlib"]
    corpus = load_corpus(
        arguments.dataset,
        HELD_OUT if embedded else arguments.dataset_split,
        config=arguments.dataset_config,
        text_column=arguments.text_column,
    )
    return corpus, settings


def _own_text(target: TargetModel, tokenizer: Any, corpus: Corpus, tokens: int) -> Corpus:
    """About so many tokens that the target writes itself, from prompts of plain text."""
    from medusa_heads.data.corpus import prompt_windows
    from medusa_heads.data.sources import as_corpus
    from medusa_heads.inference.regeneration.regenerate import regenerate

    if corpus.format.name != "text":
        raise ValueError(
            f"self_distill draws prompts from plain text, got {corpus.found_as}: have such text "
            "answered with medusa-heads regenerate, and measure on the answers"
        )
    as_trained = DistillArguments()
    prompts = prompt_windows(
        corpus.rows,
        tokenizer,
        num_prompts=-(-tokens // as_trained.continuation_length),
        prompt_length=as_trained.prompt_length,
        seed=0,
    )
    with TemporaryDirectory() as cache:
        rows = regenerate(
            target,
            prompts,
            max_new_tokens=as_trained.continuation_length,
            batch_size=as_trained.generation_batch_size,
            greedy_share=as_trained.greedy_share,
            temperature=as_trained.temperature,
            cache_dir=cache,
        )
    return as_corpus(rows, "the target's own text")


def make_table(statistics: HeadStatistics) -> Table:
    """How often each head holds the true token, and its temperature."""
    from rich.table import Table

    from medusa_heads.config import head_offset

    table = Table(title=f"{statistics.positions:,} positions")
    for column in ("head", "token ahead", *(f"top-{k}" for k in _TOP), "T"):
        table.add_column(column, justify="right")
    shares = zip(*(statistics.top_k_accuracy(k) for k in _TOP), strict=True)
    for head, (of_head, temperature) in enumerate(
        zip(shares, statistics.temperatures, strict=True)
    ):
        held = (f"{share:.3f}" for share in of_head)
        table.add_row(str(head), str(head_offset(head)), *held, f"{temperature:.2f}")
    return table


def _folder(name: str) -> Path:
    folder = expanded(name)
    if not folder.exists():
        raise ValueError(
            f"expected the folder of a heads checkpoint at {name!r}, found none: what is measured "
            "is stored there, so bring a hub's repository here first, with medusa-heads pull"
        )
    if not is_heads(folder):
        raise ValueError(
            f"expected a heads checkpoint (a folder) at {name!r}, " + instead_of_heads(folder)
        )
    check_folder(folder)
    return folder
