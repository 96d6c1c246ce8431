"""Measure a checkpoint's heads on text, and store what they are worth in the checkpoint.

medusa-heads calibrate vicuna-heads --dataset answers.jsonl
medusa-heads calibrate vicuna-heads --dataset articles.txt --self_distill
"""

from __future__ import annotations

import time
from dataclasses import MISSING, asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from medusa_heads.cli.decoding import load_model
from medusa_heads.cli.flags.arguments import command
from medusa_heads.cli.flags.decoding import ModelArguments
from medusa_heads.cli.training import continue_prompts
from medusa_heads.config import head_offset
from medusa_heads.contents import instead_of_heads, is_heads
from medusa_heads.data.finding import HELD_OUT
from medusa_heads.files import check_folder, expanded
from medusa_heads.inference.regeneration.arguments import DistillArguments
from medusa_heads.settings import at_least, flag
from medusa_heads.shared_flags import TextFlags
from medusa_heads.tables import on_screen
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
class CalibrateArguments(ModelArguments, TextFlags):
    """Which heads, and on what text."""

    checkpoint: str = flag(MISSING, "Heads checkpoint: a folder of train-heads, convert or pull.")
    dataset: list[str] = flag(
        [],
        "Text like that to be written, best the target's own answers: a file, a folder, a hub id "
        "or 'stdlib', as train-heads reads them.",
        required=True,
    )
    dataset_split: str = flag("train", "Split to measure on; of stdlib the held-out packages.")
    self_distill: bool = flag(
        False, "Let the target continue prompts from plain text first, and measure its own words."
    )
    max_length: int = flag(512, "Longest row in tokens.")
    max_positions: int = flag(MAX_POSITIONS, "Positions to measure, about, from all of the text.")


def calibrate(arguments: CalibrateArguments) -> None:
    """Measure the heads, store the result in their checkpoint, and show it."""
    at_least(arguments, 1, "max_positions")
    folder = _folder(arguments.checkpoint)
    corpus, settings = _find_text(arguments)
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
    tokens = arguments.max_positions
    rows = draw_rows(model.target, corpus, tokenizer, settings, num_heads=num_heads, tokens=tokens)
    measure = partial(measure_heads, model.heads, HiddenStates(model.target))
    positions = measurable(rows, num_heads)
    longest = max(range(len(rows)), key=positions.__getitem__)
    start = time.perf_counter()
    measure(rows.select([longest]))  # all of it, for one row: what the whole text will take
    seconds = (time.perf_counter() - start) * sum(positions) / positions[longest]
    print(f"Measuring {num_heads} heads at {sum(positions):,} positions: about {seconds:.0f} s")
    statistics, _ = measure(rows, watch=partial(tqdm, desc="reading", unit="batch", leave=False))
    replace_statistics(folder, statistics, provenance({"text": asdict(arguments)}))
    Console().print(_table(statistics))
    nodes = len(statistics.choices(_NODES))
    expected = f"{statistics.expected_tokens_per_step(nodes):.2f} tokens per step"
    print(f"A static tree of {nodes} nodes is expected to give {expected} in such text.")
    print(f"Stored in {folder}")


def _find_text(arguments: CalibrateArguments) -> tuple[Corpus, DataArguments]:
    """The corpus to measure on, and how it is read."""
    from medusa_heads.data.sources import load_corpus

    settings = DataArguments(
        dataset=arguments.dataset,
        text_column=arguments.text_column,
        max_length=arguments.max_length,
    )
    embedded = "stdlib" in arguments.dataset
    if embedded and len(arguments.dataset) > 1:
        raise ValueError(
            "of stdlib the held-out packages alone are measured on: give it without other names"
        )
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
        return continue_prompts(target, prompts, "the target's own text", as_trained, cache)


def _table(statistics: HeadStatistics) -> Table:
    """How often each head holds the true token, and its temperature."""
    columns = ["head", "token ahead", *(f"top-{k}" for k in _TOP), "T"]
    shares = zip(*(statistics.top_k_accuracy(k) for k in _TOP), strict=True)
    cells = [
        [str(head), str(head_offset(head)), *(f"{share:.3f}" for share in of_head), f"{t:.2f}"]
        for head, (of_head, t) in enumerate(zip(shares, statistics.temperatures, strict=True))
    ]
    return on_screen(f"{statistics.positions:,} positions", (columns, cells))


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


main = command("medusa-heads calibrate", calibrate, __doc__, "checkpoint")
