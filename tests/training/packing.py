"""Rows packed as a run packs them, in memory."""

from datasets import Dataset

from medusa_heads.training.data.columns import row_lengths
from medusa_heads.training.data.pack import fill_bins, pack_rows


def packed_rows(rows: Dataset, max_length: int) -> Dataset:
    """Rows of up to `max_length` tokens, each of several of the given rows."""
    return pack_rows(rows, Dataset(fill_bins(row_lengths(rows), max_length)))
