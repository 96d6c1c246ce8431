"""Rows packed as a run packs them, in memory; and prepared as it prepares them, on disk."""

from pathlib import Path
from typing import Any

from datasets import Dataset

from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.data import DataArguments
from medusa_heads.training.data.columns import row_lengths
from medusa_heads.training.data.pack import fill_bins, pack_rows
from medusa_heads.training.data.prepare import load_corpora, prepare_data

SIZE = 24


def packed_rows(rows: Dataset, max_length: int) -> Dataset:
    """Rows of up to `max_length` tokens, each of several of the given rows."""
    return pack_rows(rows, Dataset(fill_bins(row_lengths(rows), max_length)))


def prepare(target: TargetModel, tokenizer: Any, rows: Any, folder: Path, **given: Any) -> Any:
    """What a run prepares from rows in memory, kept in a folder; rows of at most 24 tokens."""
    settings = DataArguments(prepared_dir=str(folder), **{"max_length": SIZE, **given})
    corpora = load_corpora(settings, rows if isinstance(rows, Dataset) else Dataset.from_list(rows))
    return prepare_data(target, *corpora, tokenizer, settings, num_heads=2, seed=3)


def table(rows: Dataset) -> list[Any]:
    """input_ids and labels of each row, as lists."""
    return [(list(row["input_ids"]), list(row["labels"])) for row in rows]
