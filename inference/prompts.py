"""Prompts to generate from: a user's file, or windows of the embedded held-out packages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def held_out_prompts(
    tokenizer: PreTrainedTokenizerBase, *, num_prompts: int, prompt_length: int, seed: int
) -> list[list[int]]:
    """Token ids of prompts from the standard library packages that nothing here trains on.

    Raises:
        ValueError: more or longer prompts than those packages hold.
    """
    from medusa_heads.corpus import prompt_windows, standard_library

    windows = prompt_windows(
        standard_library("held_out"),
        tokenizer,
        num_prompts=num_prompts,
        prompt_length=prompt_length,
        seed=seed,
    )
    return list(windows["input_ids"])


def read_prompts(file: str | Path) -> list[str]:
    """Prompts of a file: `.jsonl` objects with a string under `prompt` or `text`, else one a line.

    Raises:
        ValueError: the file is missing, holds no prompt, or a line that cannot be read.
    """
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"expected a file of prompts at {str(file)!r}, found none")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: save it as UTF-8") from error
    is_json = path.suffix == ".jsonl"
    prompts = [
        _json_prompt(line, f"{path}, line {number}") if is_json else line
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise ValueError(f"{path} holds no prompts: write one a line")
    return prompts


def _json_prompt(line: str, place: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON ({error})") from error
    keys = [key for key in ("prompt", "text") if isinstance(row, dict) and key in row]
    found = row[keys[0]] if keys else None
    if not isinstance(found, str) or not found:
        raise ValueError(f"{place}: expected an object with a string under 'prompt' or 'text'")
    return found


def encode_prompts(
    prompts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, num_prompts: int
) -> list[list[int]]:
    """Token ids of the first `num_prompts` prompts, special tokens as the tokenizer adds them.

    Raises:
        ValueError: a prompt without tokens.
    """
    encoded = [list(tokenizer(text, verbose=False)["input_ids"]) for text in prompts[:num_prompts]]
    if empty := [i for i, ids in enumerate(encoded) if not ids]:
        raise ValueError(f"prompt {empty[0]} has no tokens: {prompts[empty[0]]!r}")
    return encoded
