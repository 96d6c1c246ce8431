"""Where the name of a corpus leads: to the embedded one, to files and folders, to the hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_heads.contents import is_model
from medusa_heads.data.data_files import SUFFIXES
from medusa_heads.errors import first_line
from medusa_heads.files import expanded, is_path
from medusa_heads.hub_probe import Together, hub_failure

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

HELD_OUT = "held_out"
"""The split to measure on: `held_out`, or what else a corpus calls it."""

_HELD_OUT_NAMES = (HELD_OUT, "test", "validation", "valid", "val", "eval", "dev")
# What a file's path may say about the split it belongs to.
_SPLIT_WORDS = {"train", "training", "held", *_HELD_OUT_NAMES[1:]}


def find_names(name: str | Sequence[str]) -> list[str]:
    """Names of corpora one by one: lists taken apart, globs replaced by the files they match; a
    ValueError where nothing stands behind one."""
    found = []
    for one in _split_lists([name] if isinstance(name, str) else name):
        path = expanded(one)
        if path.exists():
            found.append(one)
        elif any(sign in one for sign in "*?["):
            files = sorted(glob(str(path), recursive=True))
            if not files:
                raise ValueError(f"expected a corpus at {one!r}, found no such file")
            found += files
        elif is_path(one) or one.endswith(SUFFIXES):
            raise ValueError(
                f"expected a corpus at {one!r}, found none: give 'stdlib', a hub id, a folder, or "
                f"a file of the kinds {', '.join(SUFFIXES)}"
            )
        else:
            found.append(one)
    return found


def _split_lists(names: Sequence[str]) -> Iterator[str]:
    """`a.jsonl,b.jsonl` and `a.jsonl b.jsonl` are two names, unless a file is called so."""
    for name in names:
        if re.fullmatch(r"[,\s]*", name):
            raise ValueError("expected the name of a corpus, got an empty one")
        if expanded(name).exists():
            yield name
        else:
            yield from (part for part in re.split(r"[,\s]+", name) if part)


def find_rows(
    name: str,
    split: str,
    config: str | None = None,
    *,
    streaming: bool = False,
    exact: bool = False,
) -> Dataset | IterableDataset | list[Path]:
    """The dataset that one name stands for (`stdlib`, a hub id, a folder written by save_to_disk),
    or the data files (of a folder, or one file) that are to be read; `config` is of a hub dataset.
    The split `"held_out"` stands for the usual names, and what has no splits is all of `"held_out"`
    and all of `"train"`; with `exact` there must be a split of that very name. Raises ValueError:
    nothing stands there, it cannot be read, or it has other splits."""
    exact = exact or split not in ("train", HELD_OUT)
    splits = (split,) if exact or split != HELD_OUT else _HELD_OUT_NAMES
    if name == "stdlib":
        from medusa_heads.data.corpus import standard_library

        if split not in ("train", *_HELD_OUT_NAMES):
            raise ValueError(f"stdlib has the splits train and held_out, got {split!r}")
        return standard_library("train" if split == "train" else "held_out")
    path = expanded(name)
    if path.is_file():
        if not path.name.endswith(SUFFIXES):
            raise ValueError(
                f"expected a folder or a file of the kinds {', '.join(SUFFIXES)}, got {name!r}"
            )
        if exact:
            raise ValueError(f"{name!r} is a file, and files have no split {split!r}")
        return [path]
    if not path.is_dir():
        return _hub_dataset(name, splits, config, streaming)
    if any((path / file).exists() for file in ("dataset_dict.json", "dataset_info.json")):
        return _saved_dataset(path, splits, exact)
    return _files_of_split(path, splits, exact)


def _saved_dataset(folder: Path, splits: Sequence[str], exact: bool) -> Dataset:
    """The first of `splits` in a folder written by save_to_disk; or, unless it must be there, all
    of a folder without any."""
    from datasets import DatasetDict, load_from_disk

    try:
        found = load_from_disk(str(folder))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"the folder {str(folder)!r} cannot be read as a saved dataset ({error!r})"
        ) from error
    if not isinstance(found, DatasetDict):
        if exact:
            raise ValueError(
                f"{str(folder)!r} was saved without splits, and has no split {splits[0]!r}"
            )
        return found
    for split in splits:
        if split in found:
            return found[split]
    raise ValueError(
        f"{str(folder)!r} has the splits {sorted(found)}, expected one of {list(splits)}"
    )


def _files_of_split(folder: Path, splits: Sequence[str], exact: bool) -> list[Path]:
    """The data files of a folder, in order: those whose path names one of `splits` ("train.jsonl",
    "test/a.parquet"), else, unless it must be there, those that name no split."""
    files = {
        file: _words(file.relative_to(folder))
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name.endswith(SUFFIXES) and not file.name.startswith(".")
    }
    if not files:
        raise ValueError(
            f"the folder {str(folder)!r} was not written by save_to_disk, and holds no files of "
            f"the kinds {', '.join(SUFFIXES)}"
        )
    # Its files are JSON too, of which each line would be told as a broken row.
    has_model = (folder / "tokenizer.json").is_file() or any(folder.glob("*.safetensors"))
    if has_model and is_model(folder):
        raise ValueError(
            f"{str(folder)!r} is the folder of a model, not of text: give a corpus here, and the "
            "model where a target is asked for"
        )
    wanted = set().union(*(_words(Path(split)) for split in splits))
    if exact:  # "test_sft" is not in "test.jsonl"
        named = [file for file, words in files.items() if wanted and wanted <= words]
        unnamed = []
    else:
        named = [file for file, words in files.items() if words & wanted]
        unnamed = [file for file, words in files.items() if not words & (_SPLIT_WORDS | wanted)]
    if not named and not unnamed:
        some = ", ".join(str(file.relative_to(folder)) for file in list(files)[:3])
        raise ValueError(
            f"the folder {str(folder)!r} has no split {splits[0]!r}: no file belongs to it by its "
            f"name, among them {some}"
        )
    return named or unnamed


def _words(path: Path) -> set[str]:
    return set(re.findall(r"[a-z]+|[0-9]+", str(path).lower()))


def _hub_dataset(
    name: str, splits: Sequence[str], config: str | None, streaming: bool
) -> Dataset | IterableDataset:
    """The first of `splits` that a hub dataset has; from the local cache if there is no network."""
    from datasets import load_dataset

    problem = hub_failure()
    with nullcontext() if problem is None else _offline():
        for split in splits:
            try:
                return load_dataset(name, config, split=split, streaming=streaming)
            except (ValueError, OSError, RuntimeError) as error:
                # "Unknown split", "Bad split": the next name may fit.
                if "split" in str(error).lower() and split != splits[-1]:
                    continue
                raise ValueError(
                    f"expected a corpus at {name!r}: no such file or folder, and no hub dataset "
                    f"that can be read ({problem or first_line(error)})"
                ) from error
    raise AssertionError("at least one split is asked for")


def _switch_off() -> Callable[[], object]:
    import datasets
    from huggingface_hub import constants

    holders: list[Any] = [constants, datasets.config]
    before = [(holder, holder.HF_HUB_OFFLINE) for holder in holders]
    for holder in holders:
        holder.HF_HUB_OFFLINE = True

    def undo() -> None:
        for holder, value in before:
            holder.HF_HUB_OFFLINE = value

    return undo


_offline = Together(_switch_off)
