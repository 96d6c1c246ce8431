"""A corpus's places by what is before them, against looking for it everywhere."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from medusa_heads.inference.drafters.text import TextSource
from medusa_heads.inference.lookup import corpus_index
from medusa_heads.inference.lookup.corpus_index import LONGEST, CorpusIndex

TOKENS = st.lists(st.integers(0, 2), max_size=40)


@settings(deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=4), TOKENS, st.integers(0, 5))
@example([[0] * 18], [0], 1)
def test_finds_what_a_search_finds(documents: list[list[int]], text: list[int], most: int) -> None:
    if all(len(document) < 2 for document in documents):
        return
    with patch.object(corpus_index, "_NEIGHBOURS", 4 * 40):  # all that match are counted
        found = CorpusIndex.build(documents).continuation(text, most)
    longest = next(
        (n for n in range(min(len(text), LONGEST), 0, -1) if behind(documents, text[-n:])), 0
    )
    assert found.match_length == longest
    assert len(found.shares) == len(found.tokens) <= most
    if not longest:
        assert not found.tokens
        return
    going_on = behind(documents, text[-longest:])
    for depth, (token, share) in enumerate(zip(found.tokens, found.shares, strict=True)):
        tokens = [rest[depth] if depth < len(rest) else None for rest in going_on]
        doubt = corpus_index._DOUBT / (longest + depth)
        assert share == pytest.approx(tokens.count(token) / (len(tokens) + doubt))
        assert tokens.count(token) == max(Counter(tokens).values())
        going_on = [rest for rest in going_on if rest[depth : depth + 1] == [token]]
    if len(found.tokens) < most:
        next_tokens = Counter(tuple(rest[len(found.tokens) :][:1]) for rest in going_on)
        usual = max(next_tokens.values())
        few = corpus_index._HOPELESS * len(behind(documents, text[-longest:]))
        assert next_tokens[()] == usual or usual < few  # most documents end here, or all differ


def behind(documents: list[list[int]], end: list[int]) -> list[list[int]]:
    """All that follows an occurrence within one document, where at least a token does."""
    return [
        document[place + len(end) :]
        for document in documents
        for place in range(len(document) - len(end))
        if document[place : place + len(end)] == end
    ]


@pytest.mark.parametrize("corpus", [[1, 2, 3], ["some text"], ["12"], [[1.5, 2.0]], [[[1, 2]]]])
def test_refuses_what_is_no_documents_of_ids(corpus: Any) -> None:
    with pytest.raises(ValueError, match="a corpus in memory is token ids, one sequence a doc"):
        CorpusIndex.build(corpus)


def test_nothing_crosses_two_documents() -> None:
    index = CorpusIndex.build([[1, 2, 3], [4, 5, 6]])
    assert index.continuation([3], 4).match_length == 0  # nothing follows the end of a document
    assert index.continuation([3, 4], 4)[:2] == (1, [5, 6])  # the match does not reach back
    assert index.continuation([9, 1], 4)[:2] == (1, [2, 3])
    assert index.continuation([], 4) == (0, [], [])
    assert len(index) == 6 and index.largest == 6


def test_long_repeats_are_sorted_too() -> None:
    document = [7] * 300 + [8] + list(range(60)) * 2
    index = CorpusIndex.build([document])
    assert index.continuation([7] * 100, 2).match_length == LONGEST
    assert index.continuation([3, 4, 5], 3)[:2] == (3, [6, 7, 8])
    assert index.continuation(list(range(40)), 3)[:2] == (LONGEST, [40, 41, 42])


def test_of_many_occurrences_some_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_index, "_NEIGHBOURS", 4)
    index = CorpusIndex.build([[1, 2]] * 50 + [[3, 2, 5, 6]])
    assert index.continuation([1], 1)[:2] == (1, [2])
    assert index.continuation([3, 2], 2)[:2] == (2, [5, 6])


def test_a_saved_index_comes_back(tmp_path: Path) -> None:
    index = CorpusIndex.build([[1, 2, 3, 1, 2, 4]], "abc")
    index.save(tmp_path / "index.safetensors")
    for tokenizer in (None, "abc"):
        loaded = CorpusIndex.load(tmp_path / "index.safetensors", tokenizer)
        assert loaded.tokenizer == "abc"
        assert loaded.continuation([9, 1, 2], 2) == index.continuation([9, 1, 2], 2)
    with pytest.raises(ValueError, match="token ids of another tokenizer than the target's"):
        CorpusIndex.load(tmp_path / "index.safetensors", "abd")


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "index.safetensors"
    with pytest.raises(ValueError, match="expected a corpus index at"):
        CorpusIndex.load(file)
    CorpusIndex.build([[1, 2, 3, 1, 4, 2, 5]]).save(file)
    whole, said = file.read_bytes(), {"kind": corpus_index._KIND}
    file.write_bytes(whole[:-3])
    with pytest.raises(ValueError, match="cannot be read"):
        CorpusIndex.load(file)
    halves = {name: torch.zeros(40, dtype=torch.bfloat16) for name in ("tokens", "order")}
    file.write_bytes(safetensors.torch.save(halves, {"kind": corpus_index._KIND}))
    with pytest.raises(ValueError, match="cannot be read"):
        CorpusIndex.load(file)
    file.write_bytes(whole)
    tensors = load_file(file)
    for name, damaged in {
        "order": tensors["order"] + np.int32(9),
        "tokens": np.abs(tensors["tokens"]),
    }.items():
        save_file(tensors | {name: damaged}, file, said)
        with pytest.raises(ValueError, match="damaged"):
            CorpusIndex.load(file)
    # A wrong order is not looked for, but does no harm.
    save_file(tensors | {"order": tensors["order"][::-1].copy()}, file, said)
    for text in ([1], [2], [1, 2], [5]):
        CorpusIndex.load(file).continuation(text, 4)
    save_file(tensors, file)
    with pytest.raises(ValueError, match="no corpus index of this version"):
        CorpusIndex.load(file)
    save_file({"tokens": tensors["tokens"]}, file, said)
    with pytest.raises(ValueError, match="cannot be read"):
        CorpusIndex.load(file)


@pytest.mark.parametrize(
    ("documents", "message"),
    [([], "no document of two tokens"), ([[1], []], "no document"), ([[1, -2]], "token ids, got")],
)
def test_what_is_no_corpus(documents: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CorpusIndex.build(documents)


def test_its_digest_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of millions of tokens it takes long, and texts that know of no other ask for it each."""
    index = CorpusIndex.build([[1, 2, 3]])
    digests = {TextSource(3, index).facts["corpus"]}
    monkeypatch.setattr(corpus_index.hashlib, "sha256", None)
    digests.add(TextSource(3, index).facts["corpus"])
    assert len(digests) == 1
