"""Tables of prompts, found and read."""

from __future__ import annotations

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError

from medusa_heads.data.data_files import SUFFIXES, has_known_suffix, read_rows
from medusa_heads.data.finding import find_rows
from medusa_heads.files import expanded


def read_table(name: str, split: str = "train", *, config: str | None = None) -> Dataset:
    """Find and read a table of prompts, by a name, split and configuration as `find_rows` takes
    them. A text file is one document, and all fields of a .csv are texts. Raises ValueError:
    nothing stands there, it cannot be read, or it has no such split."""

    def refuse(place: str, reason: str) -> None:
        raise ValueError(f"{place}: {reason}")

    path = expanded(name)
    try:
        if path.is_file() and not path.stat().st_size:
            raise ValueError("the file is empty")
        if path.is_file() and not has_known_suffix(path.name):
            raise ValueError(f"its suffix is none of {sorted(SUFFIXES)}")
        if not path.exists() and (path.is_absolute() or name.startswith((".", "~"))):
            raise ValueError("there is nothing")
        found = find_rows(name, split, config)
        if not isinstance(found, list):
            return found
        kinds = {file.name.removesuffix(".gz").rpartition(".")[2] for file in found}
        if kinds <= {"json", "jsonl"} or kinds == {"parquet"}:
            builder = "parquet" if kinds == {"parquet"} else "json"
            return load_dataset(builder, data_files=[str(file) for file in found], split="train")
        # Not through datasets: it takes texts such as "NA" or "7" for something else.
        rows = [row for file in found for _, row in read_rows(file, refuse)]
        if not rows:
            raise ValueError("it has no rows")
        return Dataset.from_list(rows)
    except (ValueError, OSError, DatasetGenerationError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(f"expected a corpus of prompts at {name!r}: {reason}") from error
