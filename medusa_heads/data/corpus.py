"""The embedded corpus: the sources of the running interpreter's own standard library.

Every machine that can run this package has it, so training and measuring need no download. The
packages in `HELD_OUT` are kept for evaluation: nothing here trains on them.
"""

from __future__ import annotations

import random
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from medusa_heads.data.encoding import prompt_ids

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

HELD_OUT = ("asyncio", "email", "json", "http", "unittest", "logging")
"""Top-level packages of the standard library that are kept for evaluation, by name."""

# Installed packages are not the standard library; the other two hold sources in odd encodings and
# broken on purpose, as data for the interpreter's own tests.
_SKIPPED = ("site-packages", "dist-packages", "lib2to3/tests/data", "test/encoded_modules")
# Shorter files are empty package markers, longer ones generated tables.
_MIN_CHARACTERS, _MAX_CHARACTERS = 200, 400_000
# First guess of how much text a window needs; doubled until the window is full.
_CHARACTERS_PER_TOKEN = 8
# Tokens after the window that must be known too, so that the cut never changes a token inside it.
_LOOKAHEAD_TOKENS = 8
_LINE_START = re.compile(r"^(?=.*\S)", re.MULTILINE)
_WORD_START = re.compile(r"(?<=\s)(?=\S)")


def standard_library(split: Literal["train", "held_out"]) -> Dataset:
    """The rows of `library_files` as a dataset."""
    from datasets import Dataset

    return Dataset.from_list(library_files(split))


def library_files(split: Literal["train", "held_out"]) -> list[dict[str, str]]:
    """The standard library's sources in the order of their paths, `"held_out"` those of the
    packages of `HELD_OUT`: rows with `path` (relative, with forward slashes) and `text`. Raises
    ValueError at an unknown split, or an interpreter that ships without its sources."""
    if split not in ("train", "held_out"):
        raise ValueError(f"unknown split {split!r}: expected 'train' or 'held_out'")
    root = Path(sysconfig.get_path("stdlib"))
    rows = list(_read_sources(root, held_out=split == "held_out"))
    if not rows:
        raise ValueError(
            f"this Python has no standard library sources in {root}: "
            "use another interpreter, or give a corpus of your own"
        )
    return rows


def _read_sources(root: Path, *, held_out: bool) -> Iterator[dict[str, str]]:
    # Folders of the other split and of what is installed, which can hold far more than the library,
    # are not looked into.
    tops = [
        top
        for top in sorted(root.glob("*"))
        if (top.name in HELD_OUT) == held_out and not top.name.startswith(_SKIPPED)
    ]
    for file in (file for top in tops for file in (sorted(top.rglob("*.py")) or [top])):
        path = file.relative_to(root).as_posix()
        if file.suffix != ".py" or path.startswith(_SKIPPED):
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if _MIN_CHARACTERS < len(text) < _MAX_CHARACTERS:
            yield {"path": path, "text": text}


def prompt_windows(corpus: Dataset, tokenizer: PreTrainedTokenizerBase, **windows: int) -> Dataset:
    """`draw_windows` from the column `text`, as a dataset with the columns `input_ids` and `path`,
    the latter empty where the corpus has none."""
    from datasets import Dataset

    if "text" not in corpus.column_names:
        raise ValueError(f"expected a corpus with a column 'text', got {corpus.column_names}")
    texts: list[str] = list(corpus["text"])
    paths = list(corpus["path"]) if "path" in corpus.column_names else [""] * len(texts)
    drawn = draw_windows(texts, tokenizer, **windows)
    return Dataset.from_list(
        [{"input_ids": input_ids, "path": paths[document]} for document, input_ids in drawn]
    )


def draw_windows(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_prompts: int,
    prompt_length: int,
    seed: int,
) -> list[tuple[int, list[int]]]:
    """Draw prompts of equal length from texts, as (which text, token ids): different places, none
    across two of them. Raises ValueError: there is no text, or not that many windows of that
    length. A window starts at the start of a line; only where there are too few lines does it start
    at a word. Long texts give more windows than short ones. The same arguments give the same
    windows. Special tokens at the start (such as BOS) count towards the length."""
    if num_prompts < 1 or prompt_length < 1:
        raise ValueError(
            f"expected at least 1 prompt of at least 1 token, got {num_prompts} of {prompt_length}"
        )
    if not any(text.strip() for text in texts):
        raise ValueError("the corpus is empty: give one with text in it")
    windows: list[tuple[int, list[int]]] = []
    for document, start in _shuffled_starts(texts, random.Random(seed)):
        input_ids = _window(texts[document], start, tokenizer, prompt_length)
        if input_ids is not None:
            windows.append((document, input_ids))
        if len(windows) == num_prompts:
            break
    if not windows:
        raise ValueError(
            f"no document of the corpus is {prompt_length} tokens long: "
            "ask for shorter prompts or give longer documents"
        )
    if len(windows) < num_prompts:
        raise ValueError(
            f"the corpus holds only {len(windows)} windows of {prompt_length} tokens, "
            f"{num_prompts} were asked for: ask for fewer or shorter prompts, or give more text"
        )
    return windows


def _shuffled_starts(texts: Sequence[str], rng: random.Random) -> Iterator[tuple[int, int]]:
    """Every place where a window may start, as (document, character): lines first, then words."""
    lines = [(i, m.start()) for i, text in enumerate(texts) for m in _LINE_START.finditer(text)]
    rng.shuffle(lines)
    yield from lines
    taken = set(lines)
    words = [(i, m.start()) for i, text in enumerate(texts) for m in _WORD_START.finditer(text)]
    rng.shuffle(words)
    yield from (start for start in words if start not in taken)


def _window(
    text: str, start: int, tokenizer: PreTrainedTokenizerBase, length: int
) -> list[int] | None:
    """The first `length` token ids from `start` on, None where the document ends sooner."""
    characters = (length + _LOOKAHEAD_TOKENS) * _CHARACTERS_PER_TOKEN
    while True:
        piece = text[start : start + characters]
        # The cut is ours, so a tokenizer's warning about its model's maximum would mislead.
        input_ids = prompt_ids(tokenizer, piece)
        if len(input_ids) >= length + _LOOKAHEAD_TOKENS or start + characters >= len(text):
            return input_ids[:length] if len(input_ids) >= length else None
        characters *= 2
