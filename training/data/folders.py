"""Corpora in folders: written by save_to_disk, or simply full of data files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_heads.data.data_files import SUFFIXES, has_known_suffix

if TYPE_CHECKING:
    from datasets import Dataset

# What a file's path may say about the split it belongs to.
_SPLIT_WORDS = {"train", "training", "held", "test", "validation", "valid", "val", "eval", "dev"}


def is_saved_dataset(folder: Path) -> bool:
    """Whether datasets' save_to_disk wrote the folder."""
    return any((folder / file).exists() for file in ("dataset_dict.json", "dataset_info.json"))


def saved_dataset(folder: Path, splits: Sequence[str]) -> Dataset:
    """The first of `splits` in a folder written by save_to_disk, or all of a folder without any.

    Raises:
        ValueError: it cannot be read, or has other splits.
    """
    from datasets import DatasetDict, load_from_disk

    try:
        found = load_from_disk(str(folder))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"the folder {str(folder)!r} cannot be read as a saved dataset ({error!r})"
        ) from error
    if not isinstance(found, DatasetDict):
        return found
    for split in splits:
        if split in found:
            return found[split]
    raise ValueError(
        f"{str(folder)!r} has the splits {sorted(found)}, expected one of {list(splits)}"
    )


def files_of_split(folder: Path, splits: Sequence[str]) -> list[Path]:
    """The data files of a folder, in order: those whose path names one of `splits` ("train.jsonl",
    "test/a.parquet"), else those that name no split.

    Raises:
        ValueError: there are none.
    """
    files = {
        file: _words(file.relative_to(folder))
        for file in sorted(folder.rglob("*"))
        if file.is_file() and has_known_suffix(file.name) and not file.name.startswith(".")
    }
    if not files:
        raise ValueError(
            f"the folder {str(folder)!r} was not written by save_to_disk, and holds no files of "
            f"the kinds {', '.join(SUFFIXES)}"
        )
    wanted = set().union(*(_words(Path(split)) for split in splits))
    named = [file for file, words in files.items() if words & wanted]
    unnamed = [file for file, words in files.items() if not words & (_SPLIT_WORDS | wanted)]
    if not named and not unnamed:
        some = ", ".join(str(file.relative_to(folder)) for file in list(files)[:3])
        raise ValueError(
            f"no file in the folder {str(folder)!r} belongs to the split {splits[0]!r} by its "
            f"name, among them {some}"
        )
    return named or unnamed


def _words(path: Path) -> set[str]:
    return {word for word in re.split(r"[^a-z]+", str(path).lower()) if word}
