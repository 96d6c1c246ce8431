"""Token ids of a static corpus, sorted by what stands before each: where a text's end occurs in it.

The places of the corpus are in the order of the tokens before them, read backwards, so that places
behind which a text could go on stand together: a suffix array of the corpus reversed. What occurs
in it of a text's end is found by one bisection, whatever its length.

Sources: suffix arrays by prefix doubling (Manber and Myers 1993); a corpus as a drafter, REST (He
et al. 2023, arXiv:2311.08252) and the static automaton of SAM-Decoding (arXiv:2411.10666).

Shapes: C tokens of the corpus with the marks between its documents, P places, M matching places.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from medusa_heads.files import replace_file
from medusa_heads.inference.lookup.suffix_automaton import Continuation

LONGEST = 32  # tokens of a match; longer ones are as good as this
_MARK = -1  # before and behind every document; no token, so nothing matches it
_NEIGHBOURS = 16  # matching places looked at on either side
_TOGETHER = 8  # tokens over which they are followed together, then one of them alone
_HOPELESS = 0.1  # share of them below which a draft is not worth going on with
# As if so many places more, by the tokens that match, had gone on in other ways: what is seen once
# behind two tokens is hardly ever what comes.
_DOUBT = 8.0
_KIND = "medusa-heads corpus index 1"


class CorpusIndex:
    """A corpus, and in it the places behind the longest match of a text's end.

    Args:
        tokens_C: int32: documents with a mark between two of them, `LONGEST` marks before the
            first and one behind the last.
        order_P: int32: all places that have a token and a token before it, by what is before them.
        tokenizer: digest of the tokenizer that made the tokens; None where nobody said.
    """

    def __init__(
        self, tokens_C: np.ndarray, order_P: np.ndarray, tokenizer: str | None = None
    ) -> None:
        self.tokenizer, self._tokens_C, self._order_P = tokenizer, tokens_C, order_P

    @classmethod
    def build(cls, documents: Iterable[Sequence[int]], tokenizer: str | None = None) -> CorpusIndex:
        """Sort a corpus; takes seconds for a few million tokens. Nothing matches, and nothing is
        drafted, across two documents. Raises ValueError: something else than sequences of token
        ids, a negative one, or nowhere two tokens of one document in a row."""
        parts = [np.full(LONGEST, _MARK, np.int32)]
        for document in documents:
            ids = _ids(document)
            if ids.size and not 0 <= ids.min() <= ids.max() < np.iinfo(np.int32).max:
                raise ValueError(f"a corpus holds token ids, got {ids.min()} to {ids.max()}")
            parts += [ids.astype(np.int32), parts[0][:1]]
        tokens_C = np.concatenate(parts)
        if len(tokens_C) >= np.iinfo(np.int32).max:
            raise ValueError(f"a corpus has at most 2**31 tokens, got {len(tokens_C)}")
        places_P = 1 + np.flatnonzero((tokens_C[1:] != _MARK) & (tokens_C[:-1] != _MARK))
        if not len(places_P):
            raise ValueError("the corpus has no document of two tokens or more: give it text")
        ranks_C = _ranks_of_what_is_before(tokens_C)
        order_P = places_P[np.argsort(ranks_C[places_P], kind="stable")]
        return cls(tokens_C, order_P.astype(np.int32), tokenizer)

    def __len__(self) -> int:
        return int(np.count_nonzero(self._tokens_C != _MARK))

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self._tokens_C.tobytes()).hexdigest()

    @property
    def largest(self) -> int:
        """The largest token id."""
        return int(self._tokens_C.max())

    def continuation(self, text: Sequence[int], most: int) -> Continuation:
        """What follows most often, up to so many tokens, where the longest match of the text's end
        stands; its last `LONGEST` tokens are looked for."""
        before = list(text[: -LONGEST - 1 : -1])
        middle = bisect_left(self._order_P, before, key=self._window(len(before)))
        nearest = self._order_P[max(middle - 1, 0) : middle + 1].tolist()
        longest = max(self._common(place, before) for place in nearest)
        if not longest:
            return Continuation(0, [], [])
        match, window = before[:longest], self._window(longest)
        first = bisect_left(self._order_P, match, max(middle - _NEIGHBOURS, 0), middle, key=window)
        last = min(middle + _NEIGHBOURS, len(self._order_P))
        behind = bisect_right(self._order_P, match, middle, last, key=window)
        return self._usual(self._order_P[first:behind], longest, most)

    def _window(self, length: int) -> Callable[[int], list[int]]:
        """So many tokens before a place, the nearest first."""

        def window(place: int) -> list[int]:
            return self._tokens_C[place - length : place][::-1].tolist()

        return window

    def _common(self, place: int, before: list[int]) -> int:
        """How many of these tokens, the nearest first, are before a place."""
        pairs = zip(self._window(len(before))(place), before, strict=True)
        return next((n for n, (here, there) in enumerate(pairs) if here != there), len(before))

    def _usual(self, places_M: np.ndarray, length: int, most: int) -> Continuation:
        """Token by token what most of these places go on with, as long as many do."""
        depths = np.arange(min(most, _TOGETHER))
        ahead = self._tokens_C[np.minimum(places_M[:, None] + depths, len(self._tokens_C) - 1)]
        going = list(zip(places_M.tolist(), ahead.tolist(), strict=True))
        tokens: list[int] = []
        shares: list[float] = []
        while len(going) > 1 and len(tokens) < len(depths):
            depth = len(tokens)
            token, times = Counter(text[depth] for _, text in going).most_common(1)[0]
            if token == _MARK or times < _HOPELESS * len(places_M):
                return Continuation(length, tokens, shares)
            tokens.append(token)
            shares.append(times / (len(going) + _DOUBT / (length + depth)))
            going = [(place, text) for place, text in going if text[depth] == token]
        place = going[0][0]
        rest: list[int] = self._tokens_C[place + len(tokens) : place + most].tolist()
        rest = rest[: rest.index(_MARK)] if _MARK in rest else rest
        matching = range(length + len(tokens), length + len(tokens) + len(rest))
        shares += [1 / (1 + _DOUBT / matched) for matched in matching]
        return Continuation(length, tokens + rest, shares)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file, whole or not at all. Raises OSError: the folder is missing or
        cannot be written."""
        from safetensors.numpy import save

        tensors = {"tokens": self._tokens_C, "order": self._order_P}
        replace_file(path, save(tensors, {"kind": _KIND, "tokenizer": self.tokenizer or ""}))

    @classmethod
    def load(cls, path: str | os.PathLike[str], tokenizer: str | None = None) -> CorpusIndex:
        """Read a saved index; the file is mapped, so that processes share one copy of it. Raises
        ValueError: there is none, it is damaged, or it holds the ids of another tokenizer than the
        one with this digest."""
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise ValueError(f"expected a corpus index at {str(path)!r}, found none")
        try:
            with safe_open(path, "pt") as file:
                said = file.metadata() or {}
                if said.get("kind") != _KIND:
                    raise ValueError(f"{path} is no corpus index of this version: index it anew")
                tokens_C, order_P = (file.get_tensor(n).numpy() for n in ("tokens", "order"))
        except (SafetensorError, OSError, TypeError) as error:  # numpy has no bfloat16
            raise ValueError(f"{path} cannot be read ({error}): index the corpus anew") from error
        made_by = said.get("tokenizer") or None
        if tokenizer is not None and made_by not in (None, tokenizer):
            raise ValueError(
                f"{path} holds the token ids of another tokenizer than the target's: index the "
                "corpus anew, from its text"
            )
        if not _is_sound(tokens_C, order_P):
            raise ValueError(f"{path} is damaged: index the corpus anew")
        return cls(tokens_C, order_P, made_by)


def _ids(document: Sequence[int]) -> np.ndarray:
    try:
        ids = np.asarray(document)
    except ValueError:  # sequences of unequal lengths
        ids = np.empty((0, 0))
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(
            "a corpus in memory is token ids, one sequence a document, got a document of "
            f"{type(document).__name__}: tokenise text first, or give the path of a file"
        )
    return ids


def _ranks_of_what_is_before(tokens_C: np.ndarray) -> np.ndarray:
    """For every place the rank of its last `LONGEST` tokens, the nearest first, among all."""
    before_C = np.concatenate([[_MARK], tokens_C[:-1]])
    ranks_C = np.unique(before_C, return_inverse=True)[1].astype(np.int64)
    known = 1
    while known < LONGEST and ranks_C.max() + 1 < len(tokens_C):
        further_C = np.zeros_like(ranks_C)
        further_C[known:] = ranks_C[:-known]
        ranks_C = np.unique(ranks_C * len(tokens_C) + further_C, return_inverse=True)[1]
        known *= 2
    return ranks_C


def _is_sound(tokens_C: np.ndarray, order_P: np.ndarray) -> bool:
    """Whether no look-up can leave the corpus, or draft what is no token."""
    numbers = all(each.dtype == np.int32 and each.ndim == 1 for each in (tokens_C, order_P))
    return bool(
        numbers
        and len(order_P)
        and LONGEST <= order_P.min() <= order_P.max() < len(tokens_C)
        and tokens_C.min() == tokens_C[-1] == _MARK
    )
