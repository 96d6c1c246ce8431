"""The flags and YAML keys of corpora. Light: nothing here imports torch or transformers."""

import os
from dataclasses import dataclass
from typing import Any

from medusa_heads.files import expanded
from medusa_heads.settings import at_least, flag, mapping
from medusa_heads.shared_flags import BadRowFlag, TextFlags

STREAM_EVAL_ROWS = 256
EVAL_ROWS = 2048  # so that no evaluation grows with the text
EVAL_SHARE = 0.05


@dataclass
class DataArguments(TextFlags, BadRowFlag):
    """Text to learn from."""

    dataset: list[str] = flag(
        [],
        "Text to learn from: a hub id, a folder (of data files, or written by save_to_disk or by "
        "medusa-heads regenerate), .jsonl, .json, .parquet, .csv or .txt files, or 'stdlib' (the "
        "sources of Python's own standard library); several names and globs are joined.",
        required=True,
    )
    dataset_split: str = flag("train", "Split to train on.")
    eval_dataset: list[str] | None = flag(
        None,
        "Held-out text, given like --dataset. Default: the held-out packages of stdlib, or a "
        "share of the documents.",
    )
    eval_split: str | None = flag(
        None,
        "Split of eval_dataset (without one: of dataset) to hold out. Default: the first there is "
        "of held_out, test and validation.",
    )
    eval_share: float | None = flag(
        None,
        "Share of the documents held out where nothing else is given, all of them measured. "
        f"Default: {EVAL_SHARE}, and of these at most {EVAL_ROWS} documents and rows.",
    )
    eval_rows: int | None = flag(
        None,
        f"Documents held out instead; of a stream the first (default {STREAM_EVAL_ROWS}); of "
        f"eval_dataset the rows measured at most (default {EVAL_ROWS}), drawn from all.",
    )
    chat_template: str | None = flag(None, "File of a Jinja chat template, not the tokenizer's.")
    chat_template_kwargs: dict | str | None = flag(
        None,
        "What the chat template is told besides the messages, such as enable_thinking, as a YAML "
        "mapping (on the command line: as JSON).",
    )
    max_length: int = flag(
        512,
        "Longest row in tokens: longer text becomes several rows, a longer conversation is cut on "
        "the right. Rows of tokens likewise.",
    )
    packing: bool = flag(False, "Fill rows with several documents, which do not see each other.")
    streaming: bool = flag(False, "Read the corpus while training, never whole; needs max_steps.")
    shuffle_buffer: int = flag(1000, "Rows of a stream that are shuffled at a time; 1: none.")
    dataset_num_proc: int | None = flag(None, "Processes that tokenise; not for streams.")
    prepared_dir: str | None = flag(
        None,
        "Folder in which prepared rows are kept for later runs. Default: in the cache of datasets.",
    )

    def __post_init__(self) -> None:
        for name in ("dataset", "eval_dataset"):
            value = getattr(self, name)
            if isinstance(value, str):
                setattr(self, name, [value])
        if self.eval_dataset is not None and not self.eval_dataset:
            raise ValueError("eval_dataset must name at least one corpus, got none")
        at_least(self, 1, "max_length", "shuffle_buffer", "eval_rows", "dataset_num_proc")
        if self.eval_share is not None and not 0 < self.eval_share < 1:
            raise ValueError(f"eval_share must lie between 0 and 1, got {self.eval_share}")
        if self.on_bad_row not in ("error", "skip"):
            raise ValueError(f"on_bad_row must be 'error' or 'skip', got {self.on_bad_row!r}")
        if self.streaming and self.dataset_num_proc is not None:
            raise ValueError("a stream is tokenised as it is read: leave dataset_num_proc out")
        self.template_text()
        self.template_kwargs()

    def template_text(self) -> str | None:
        """What stands in the file `chat_template`; ValueError where it cannot be read."""
        if self.chat_template is None:
            return None
        try:
            return expanded(self.chat_template).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(
                f"expected a file with a Jinja template at {self.chat_template!r} (chat_template): "
                f"{error}"
            ) from error

    def template_kwargs(self) -> dict[str, Any]:
        """`chat_template_kwargs` as a mapping; ValueError where it is none."""
        return mapping(self, "chat_template_kwargs")


def corpus_names(given: Any, argument: str) -> list[str]:
    """Names of corpora as texts. Raises ValueError: `argument` is given something else."""
    names = list(given) if isinstance(given, list | tuple) else [given]
    for name in names:
        if not isinstance(name, str | os.PathLike):
            raise ValueError(
                f"{argument} must be the names of corpora, or a dataset, got a "
                f"{type(name).__name__}: make a dataset of rows in memory with "
                "datasets.Dataset.from_list"
            )
    return [os.fspath(name) for name in names]
