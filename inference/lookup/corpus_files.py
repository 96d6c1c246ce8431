"""A user's corpus for drafting: files and folders made into an index, which is kept on disk.

A row of a data file is a document: its `text`, its `prompt` with its `completion`, its `messages`
through the tokenizer's chat template, or its `input_ids`. Every other file is one document, such as
a source file. Of a folder all files are read, however deep; names that begin with a dot are not.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from medusa_heads.data.data_files import SUFFIXES, read_rows
from medusa_heads.data.encoding import Encoder
from medusa_heads.errors import first_line, warn
from medusa_heads.files import expanded, remove_leftovers
from medusa_heads.inference.lookup.corpus_index import CorpusIndex
from medusa_heads.machine.measurements import measurement_folder
from medusa_heads.target.fingerprint import file_sha256
from medusa_heads.target.loading import load_tokenizer
from medusa_heads.target.target import TargetModel

Corpus = str | os.PathLike[str] | CorpusIndex | Sequence[Sequence[int]]
INDEX_SUFFIX = ".safetensors"
_COLUMNS = "'text', 'prompt' and 'completion', 'messages' or 'input_ids'"
_TOGETHER = 64  # texts that are tokenised at a time
_MOST_KEPT = 16  # indexes: those that were used last


def find_corpus(
    corpus: Corpus | None, target: TargetModel, *, trust_remote_code: bool = False
) -> CorpusIndex | None:
    """The index that a user's corpus means: a file or a folder of text, read by the target's
    tokenizer, a saved index, token ids, one sequence a document, or None for none. Raises
    ValueError: nothing readable stands there, or its token ids are not the target's."""
    if corpus is None:
        return None
    if isinstance(corpus, str | os.PathLike):
        if not os.fspath(corpus):
            raise ValueError("expected a corpus, a file or a folder, got an empty path")
        index = _find_files(expanded(corpus), target, trust_remote_code)
    else:
        index = corpus if isinstance(corpus, CorpusIndex) else CorpusIndex.build(corpus)
    if index.largest >= target.vocab_size:
        raise ValueError(
            f"the corpus holds token ids up to {index.largest}, and the target has "
            f"{target.vocab_size}: index it with the target's own tokenizer"
        )
    return index


def _find_files(path: Path, target: TargetModel, trust_remote_code: bool) -> CorpusIndex:
    if not path.exists():
        raise ValueError(f"expected a corpus at {str(path)!r}, a file or a folder, found nothing")
    name = target.name_or_path
    try:
        tokenizer = load_tokenizer(
            name, revision=target.revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"a corpus of text needs the tokenizer beside the target {name!r} "
            f"({first_line(error)}): give token ids"
        ) from error
    if path.name.endswith(INDEX_SUFFIX):
        return CorpusIndex.load(path, vocabulary_sha256(tokenizer))
    return index_files(path, tokenizer)


def index_files(path: str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase) -> CorpusIndex:
    """Index a file or a folder of text, or read the index that was made of it before. Raises
    ValueError: it is neither, or there is no text in it."""
    path = Path(path)
    files = _files(path)
    digest = vocabulary_sha256(tokenizer)
    contents, readable = list[list[str]](), list[Path]()
    left_out: list[str] = []
    for file in files:
        try:
            # How a file is read hangs on its name.
            name = file.name if file == path else file.relative_to(path).as_posix()
            contents.append([name, file_sha256(file)])
        except OSError as error:
            left_out.append(f"{file}: {error.strerror or first_line(error)}")
        else:
            readable.append(file)
    made_of = [digest, tokenizer.chat_template, contents]
    key = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:24]
    kept = measurement_folder() / "corpora" / f"{key}{INDEX_SUFFIX}"
    remove_leftovers(kept.parent)
    with suppress(ValueError):  # nothing there, or damaged: made anew
        index = CorpusIndex.load(kept, digest)
        with suppress(OSError):
            kept.touch()
        return index
    try:
        index = CorpusIndex.build(_documents(readable, tokenizer, left_out), digest)
    except ValueError as error:
        reason = f" ({left_out[0]})" if left_out else ""
        raise ValueError(f"{str(path)!r} cannot be indexed: {error}{reason}") from error
    if left_out:
        count = "1 row or file" if len(left_out) == 1 else f"{len(left_out)} rows or files"
        warn(f"left out of the corpus: {count}, such as {left_out[0]}")
    with suppress(OSError):  # a read-only home: made again next time
        kept.parent.mkdir(parents=True, exist_ok=True)
        index.save(kept)
        _forget_oldest(kept.parent)
    return index


def _forget_oldest(folder: Path) -> None:
    """Every change of a file makes another index; who has one mapped goes on with it."""
    kept = sorted(folder.glob(f"*{INDEX_SUFFIX}"), key=lambda file: file.stat().st_mtime)
    for oldest in kept[:-_MOST_KEPT]:
        oldest.unlink(missing_ok=True)


def vocabulary_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest of what each token id stands for."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"the corpus {str(path)!r} is neither a file nor a folder: give one")
    files = [
        file
        for file in sorted(path.rglob("*"))
        if file.is_file() and not any(p.startswith(".") for p in file.relative_to(path).parts)
    ]
    if not files:
        raise ValueError(f"the corpus {str(path)!r} is an empty folder: give one with text in it")
    return files


def _documents(
    files: Sequence[Path], tokenizer: PreTrainedTokenizerBase, left_out: list[str]
) -> Iterator[Sequence[int]]:
    """Token ids of each document. `left_out` is told what is none, and why."""
    from tqdm.auto import tqdm

    bar = tqdm(files, desc="Reading the corpus", unit="file", delay=2)
    found = (document for file in bar for document in _documents_of(file, tokenizer, left_out))
    encoder = Encoder(tokenizer)
    while batch := list(islice(found, _TOGETHER)):
        texts = [document for document in batch if isinstance(document, str)]
        encoder.choose(texts)
        encoded = map(encoder(texts, special_tokens=False).row, range(len(texts)))
        for document in batch:
            yield next(encoded) if isinstance(document, str) else document


def _documents_of(
    file: Path, tokenizer: PreTrainedTokenizerBase, left_out: list[str]
) -> Iterator[str | list[int]]:
    if not file.name.endswith(SUFFIXES):
        try:
            yield file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            left_out.append(f"{file}: not UTF-8")
        return
    refused: list[str] = []

    def refuse(place: str, reason: str) -> None:
        refused.append(f"{place}: {reason}")

    is_data = False
    try:
        for place, row in read_rows(file, refuse):
            try:
                document = _document(row, tokenizer)
            except ValueError as error:
                refuse(place, str(error))
            else:
                is_data = True
                yield document
    except ValueError as error:
        refuse(str(file), str(error))
    if len(refused) > 1 and not is_data:
        # Such as a program's settings over many lines: one thing of another kind.
        refused = [f"{file}: none of {len(refused)} rows is a document ({refused[0]})"]
    left_out += refused


def _document(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> str | list[int]:
    """Text, or token ids."""
    text, prompt, completion = row.get("text"), row.get("prompt"), row.get("completion")
    ids, messages = row.get("input_ids"), row.get("messages")
    if isinstance(text, str):
        pass
    elif isinstance(prompt, str) and isinstance(completion, str):
        text = prompt + completion
    elif isinstance(ids, list):
        if not all(type(token) is int and 0 <= token < len(tokenizer) for token in ids):
            raise ValueError(f"expected 'input_ids' from 0 to {len(tokenizer) - 1}")
        return ids
    elif isinstance(messages, list):
        try:
            text = str(tokenizer.apply_chat_template(messages, tokenize=False))
        # A template may raise whatever Jinja does, and its own exceptions.
        except Exception as error:
            raise ValueError(f"the target's chat template refuses this: {error}") from error
    else:
        raise ValueError(f"expected {_COLUMNS}, got {sorted(row)}")
    text.encode()  # JSON can spell halves of characters, of which no text consists: a ValueError
    return text
