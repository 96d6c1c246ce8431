"""From a corpus to rows: token ids, and labels that say which tokens are learnt.

A row is a document, or a part of one: `input_ids`, and `labels` of the same length, unshifted, -100
where the text was not generated. Shapes: B batch, T tokens.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from medusa_heads.target import TargetModel
from medusa_heads.training.rows import IGNORED

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class RowFacts:
    """What was counted while a dataset was checked."""

    rows: int
    tokens: int
    supervised_tokens: int
    sha256: str  # over the token ids and labels, row by row


def load_corpus(name: str, split: Literal["train", "held_out"] = "train") -> Dataset:
    """Read a corpus: `stdlib`, a folder written by `save_to_disk`, or a .jsonl, .json or .txt file.

    Returns:
        A dataset with a column `text` (one document a row), or with `input_ids` and `labels`.

    Raises:
        ValueError: nothing stands there, or it cannot be read.
    """
    if name == "stdlib":
        from medusa_heads.corpus import standard_library

        return standard_library(split)
    from datasets import Dataset, DatasetDict, load_from_disk
    from datasets.exceptions import DatasetGenerationError

    path = Path(name)
    if not path.exists():
        raise ValueError(
            f"expected a corpus at {name!r}, found none: give 'stdlib', a folder written by "
            "datasets' save_to_disk, or a .jsonl or .txt file"
        )
    if path.is_dir():
        try:
            found = load_from_disk(str(path))
        except FileNotFoundError as error:
            raise ValueError(f"the folder {name!r} was not written by save_to_disk") from error
        if isinstance(found, DatasetDict):
            wanted = ("train",) if split == "train" else ("held_out", "test", "validation")
            splits = [known for known in wanted if known in found]
            if not splits:
                raise ValueError(
                    f"{name!r} has the splits {sorted(found)}, expected one of {list(wanted)}"
                )
            return found[splits[0]]
        return found
    if not path.stat().st_size:
        raise ValueError(f"the corpus {name!r} is empty: give one with text in it")
    if path.suffix == ".txt":
        return Dataset.from_list([{"text": path.read_text(encoding="utf-8")}])
    if path.suffix not in (".jsonl", ".json"):
        raise ValueError(f"expected a .jsonl or .txt file, got {name!r}")
    try:
        return Dataset.from_json(str(path))
    except DatasetGenerationError as error:
        reason = error.__cause__ or error
        raise ValueError(f"{name!r} is not valid JSON lines ({reason})") from error


def prepare_rows(
    corpus: Dataset, tokenizer: PreTrainedTokenizerBase | None, max_length: int
) -> Dataset:
    """Rows of at most `max_length` tokens; a document's tokens are all labels of their own.

    A dataset that already has `input_ids` and `labels` is taken as it is.

    Returns:
        Columns `input_ids`, `labels` and `document` (which one the row is a part of).

    Raises:
        ValueError: the corpus is empty, has other columns, or is text and there is no tokenizer.
    """
    if not len(corpus):
        raise ValueError("the corpus is empty: give one with text in it")
    columns = set(corpus.column_names)
    if {"input_ids", "labels"} <= columns:
        rows = corpus.select_columns(["input_ids", "labels"])
        return rows.add_column("document", list(range(len(rows))))
    if "text" not in columns:
        raise ValueError(
            "expected a corpus with a column 'text', or 'input_ids' and 'labels', "
            f"got {sorted(columns)}"
        )
    if tokenizer is None:
        raise ValueError("text needs the target's tokenizer, and none was found beside the target")

    def cut(batch: Mapping[str, list[str]], documents: list[int]) -> dict[str, list[Any]]:
        # verbose=False: a whole document may be longer than the model's maximum, its blocks are not
        encoded = tokenizer(batch["text"], verbose=False)["input_ids"]
        blocks = [
            (ids[start : start + max_length], document)
            for ids, document in zip(encoded, documents, strict=True)
            for start in range(0, len(ids), max_length)
        ]
        return {
            "input_ids": [ids for ids, _ in blocks],
            "labels": [ids for ids, _ in blocks],
            "document": [document for _, document in blocks],
        }

    rows = corpus.map(
        cut,
        batched=True,
        with_indices=True,
        remove_columns=corpus.column_names,
        load_from_cache_file=False,
        desc="Tokenising",
    )
    if not len(rows):
        raise ValueError("the corpus is empty: give one with text in it")
    return rows


def hold_out(rows: Dataset, share: float, seed: int) -> tuple[Dataset, Dataset]:
    """Split into rows to train on and rows to measure on, by document.

    Without a column `document` each row is one; only where all rows are of one document are they
    drawn row by row.

    Raises:
        ValueError: there is only one row.
    """
    documents = np.arange(len(rows))
    if "document" in rows.column_names and len(set(rows["document"])) > 1:
        documents = np.asarray(rows["document"])
    known = np.unique(documents)
    if len(known) < 2:
        raise ValueError(
            "the corpus has a single row, so none can be held out: give more text or an "
            "eval_dataset"
        )
    count = min(max(round(share * len(known)), 1), len(known) - 1)
    drawn = np.random.default_rng(seed).permutation(known)[:count]
    held = np.isin(documents, drawn)
    return rows.select(np.flatnonzero(~held)), rows.select(np.flatnonzero(held))


def check_rows(rows: Dataset, target: TargetModel, *, name: str, heads_reached: int) -> RowFacts:
    """Read every row once and refuse what training could not use.

    Args:
        rows: columns `input_ids` and `labels`.
        target: whose vocabulary and context the rows must fit.
        name: what the messages call the dataset.
        heads_reached: how many heads must have a true token at one position somewhere.

    Raises:
        ValueError: token ids outside the vocabulary, rows longer than the target's context, labels
            that are shifted or of another length, or too little supervised text.
    """
    facts = {"rows": 0, "tokens": 0, "supervised_tokens": 0}
    digest = hashlib.sha256()
    longest_run = 0
    for batch in rows.select_columns(["input_ids", "labels"]).with_format("numpy").iter(256):
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            _check_row(ids, labels, target, f"row {facts['rows']} of the {name}")
            supervised = labels != IGNORED
            longest_run = max(longest_run, _longest_run(supervised))
            digest.update(np.int64(len(ids)).tobytes())
            digest.update(np.asarray(ids, np.int64).tobytes())
            digest.update(np.asarray(labels, np.int64).tobytes())
            facts["rows"] += 1
            facts["tokens"] += len(ids)
            facts["supervised_tokens"] += int(supervised.sum())
    if not facts["supervised_tokens"]:
        raise ValueError(f"the {name} has no supervised token: every label is {IGNORED}")
    if longest_run < heads_reached + 1:
        raise ValueError(
            f"the {name} has no {heads_reached + 1} supervised tokens in a row "
            f"(at most {longest_run}): give longer text or fewer heads"
        )
    return RowFacts(**facts, sha256=digest.hexdigest())


def check_length(max_length: int, target: TargetModel) -> None:
    """Raises ValueError where rows of `max_length` would not fit the target's context."""
    limit = target.max_positions
    if limit is not None and max_length > limit:
        raise ValueError(
            f"rows of {max_length} tokens are longer than the target's context of {limit} tokens: "
            "ask for shorter ones"
        )


def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """A batch padded on the right: input_ids_BT, attention_mask_BT (0 is padding), labels_BT."""
    shape = (len(rows), max(len(row["input_ids"]) for row in rows))
    input_ids_BT = torch.zeros(shape, dtype=torch.long)
    attention_mask_BT = torch.zeros(shape, dtype=torch.long)
    labels_BT = torch.full(shape, IGNORED)
    for b, row in enumerate(rows):
        length = len(row["input_ids"])
        input_ids_BT[b, :length] = torch.as_tensor(row["input_ids"])
        attention_mask_BT[b, :length] = 1
        labels_BT[b, :length] = torch.as_tensor(row["labels"])
    return {
        "input_ids": input_ids_BT,
        "attention_mask": attention_mask_BT,
        "labels": labels_BT,
    }


def find_tokenizer(
    name_or_path: str | os.PathLike[str], *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """The tokenizer that lies beside a target, None where there is none."""
    from transformers import AutoTokenizer

    if not str(name_or_path):
        return None
    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(name_or_path), trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError):
        return None
    return found


def _check_row(ids: Any, labels: Any, target: TargetModel, where: str) -> None:
    limit = target.max_positions
    if len(ids) != len(labels):
        raise ValueError(f"{where} has {len(ids)} input_ids but {len(labels)} labels")
    if limit is not None and len(ids) > limit:
        raise ValueError(
            f"{where} has {len(ids)} tokens, more than the target's context of {limit}: "
            "cut it, or ask for shorter rows"
        )
    if len(ids) and (ids.min() < 0 or ids.max() >= target.vocab_size):
        raise ValueError(
            f"{where} has token ids from {ids.min()} to {ids.max()}, the target's vocabulary has "
            f"{target.vocab_size}: tokenise with the target's own tokenizer"
        )
    if ((labels != ids) & (labels != IGNORED)).any():
        raise ValueError(
            f"{where} has labels that are neither {IGNORED} nor its input_ids at the same place: "
            "labels are not shifted here"
        )


def _longest_run(mask: Any) -> int:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return int((edges[1::2] - edges[::2]).max(initial=0))
