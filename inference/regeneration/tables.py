"""Tables of prompts: the embedded corpus, files, folders and the hub."""

from __future__ import annotations

from typing import TYPE_CHECKING

from medusa_heads.data.data_files import read_rows
from medusa_heads.files import expanded

if TYPE_CHECKING:
    from datasets import Dataset

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def read_table(name: str, split: str = "train", *, config: str | None = None) -> Dataset:
    """Find and read a table.

    Args:
        name: `stdlib`, a .jsonl, .json, .parquet, .csv or .txt file (the last is one document, all
            fields of the one before are texts), a folder (written by `save_to_disk`, or of data
            files), or a hub id.
        split: of a corpus that has some; of `stdlib`, `train` or `held_out`.
        config: of a hub dataset.

    Raises:
        ValueError: nothing stands there, it cannot be read, or it has no such split.
    """
    from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
    from datasets.exceptions import DatasetGenerationError

    if name == "stdlib":
        from medusa_heads.data.corpus import standard_library

        if split not in ("train", "held_out"):
            raise ValueError(f"stdlib has the splits train and held_out, got {split!r}")
        return standard_library("held_out" if split == "held_out" else "train")
    path = expanded(name)
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            found = load_from_disk(str(path))
            if not isinstance(found, DatasetDict):
                return found
            if split not in found:
                raise ValueError(f"it has the splits {sorted(found)}, not {split!r}")
            return found[split]
        if not path.is_file():
            if not path.is_dir() and (path.is_absolute() or name.startswith((".", "~"))):
                raise ValueError("there is nothing")
            return load_dataset(str(path) if path.is_dir() else name, config, split=split)
        if not path.stat().st_size:
            raise ValueError("the file is empty")
        if path.suffix in (".csv", ".txt"):
            # Not through datasets: it takes texts such as "NA" or "7" for something else.
            rows = [row for _, row in read_rows(path, _refuse)]
            if not rows:
                raise ValueError("it has no rows")
            return Dataset.from_list(rows)
        if path.suffix not in _BUILDERS:
            raise ValueError(f"its suffix is none of {sorted([*_BUILDERS, '.csv', '.txt'])}")
        builder = _BUILDERS[path.suffix]
        return load_dataset(builder, data_files=str(path), split="train")
    except (ValueError, OSError, DatasetGenerationError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(f"expected a corpus of prompts at {name!r}: {reason}") from error


def _refuse(place: str, reason: str) -> None:
    raise ValueError(f"{place}: {reason}")
