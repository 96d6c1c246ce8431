"""Token ids of many texts at once, in one array: no token is an object of Python."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_CHARACTERS_AT_ONCE = 1 << 20  # of texts whose encodings are in memory together
# What fastokens raises of a tokenizer that it does not read, and of a text with bytes that have no
# token, which tokenizers leaves out.
_NOT_READ = (ValueError, RuntimeError)
_COMPARED = 256  # texts of which both libraries must give the same tokens
# Characters from which on fastokens may encode a text by a pool of threads (it does from 64 KiB
# on), for which a fork of the process that has the pool would wait for ever.
_BY_THREADS = 1 << 14
_has_threads: int | None = None  # the last process that had a text encoded so
# Where tokenizers part: cases and accents, runs of white space, digits, joined characters, and
# scripts without spaces.
_HARD = (
    "",
    " ",
    "\n\n \t x  \r\n   y",
    "It's  we'LL\u00a0n\u00ba 12345,678.9e-10 !!!???",
    "Stra\u00dfe \u0130stanbul e\u0301 \u1e9b\u0323 \ufb01 \u00bd",
    "\u65e5\u672c\u8a9e\u306e\u6587\u3002\u0e44\u0e17\u0e22",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u0939\u093f\u0928\u094d\u0926\u0940",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \ufeff\u200b\u0000\ufffd",
    "def f(x):\n\t\treturn  x**2  # <s> </s> <|x|> [INST]\n" * 3,
)


Stretches = tuple[Any, Any, Any]
"""Values, and of each stretch of them its start and its length."""


class Ragged(NamedTuple):
    """Rows of numbers of any length: row i is `values[offsets[i] : offsets[i + 1]]`."""

    values: Any  # [numbers] int32
    offsets: Any  # [rows + 1] int64

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        values = np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum()))
        return cls(values, ends_of(lengths))

    @classmethod
    def joined(cls, parts: Sequence[Ragged]) -> Ragged:
        lengths = [part.lengths for part in parts]
        values = np.concatenate([np.empty(0, np.int32), *(part.values for part in parts)])
        return cls(values, ends_of(np.concatenate([np.empty(0, np.int64), *lengths])))

    @property
    def starts(self) -> Any:
        """Where each row begins, [rows]."""
        return self.offsets[:-1]

    @property
    def lengths(self) -> Any:
        """How many numbers each row has, [rows]."""
        return np.diff(self.offsets)

    @property
    def stretches(self) -> Stretches:
        return self.values, self.starts, self.lengths

    def row(self, number: int) -> list[int]:
        return self.values[slice(*self.offsets[number : number + 2])].tolist()

    def take(self, numbers: Any) -> Ragged:
        return self.part(self.starts[numbers], self.lengths[numbers])

    def part(self, starts: Any, lengths: Any) -> Ragged:
        """Rows that begin at the given places of `values`, and have the given lengths."""
        return Ragged(self.values[places(starts, lengths)], ends_of(lengths))


def ends_of(lengths: Any) -> Any:
    """Offsets of rows of these lengths, [rows + 1] int64."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def places(starts: Any, lengths: Any) -> Any:
    """The places of stretches, one stretch behind the other."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)


def begins(short: Stretches, whole: Stretches) -> Any:
    """Whether each stretch of the second begins with that of the first, [stretches] bool."""
    (values, starts, lengths), (others, other_starts, other_lengths) = short, whole
    fits = lengths <= other_lengths
    compared = np.where(fits, lengths, 0)
    unequal = values[places(starts, compared)] != others[places(other_starts, compared)]
    fits[np.searchsorted(np.cumsum(compared), np.flatnonzero(unequal), side="right")] = False
    return fits


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text that is to be continued, with what the tokenizer puts before it, unless
    it stands there already, and nothing that it puts behind."""
    return to_continue(tokenizer, text, tokenizer(text, verbose=False)["input_ids"])


def to_continue(tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int]) -> list[int]:
    """The same of the tokenizer's own ids: without its token for the start where the text begins
    with one, as a chat template may have written it, and without its token for the end where the
    text does not end with one, or is given another."""
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    doubled = start is not None and [*ids[:2]] == [start] * 2
    doubled = doubled and text.startswith(tokenizer.bos_token)
    kept = ids[doubled:]
    ended = end is not None and len(kept) > 1 and kept[-1] == end
    if ended and text.endswith(tokenizer.eos_token):
        ended = kept[-2] == end and appends_end(tokenizer)
    return [*kept[: len(kept) - ended]]


def appends_end(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer puts its token for the end behind a text."""
    return [*tokenizer("a")["input_ids"][-1:]] == [tokenizer.eos_token_id]


def is_blank(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Whether a token stands for white space, or for nothing."""
    return not str(tokenizer.decode([token])).strip()


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokens that stand for no text."""
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(token for token, entry in added if entry.special)}


class Chosen(Exception):
    """It is known which library encodes, and no more was asked."""


class Encoder:
    """A tokenizer for many texts. Where the library `fastokens` is installed and reads the
    tokenizer, it encodes, once it gave the tokens of `tokenizers` for hard texts and for the first
    ones; they are the same, and come in an array, about ten times as fast."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        # Whether `fastokens` encodes; None before the first text.
        self.is_fast: bool | None = None
        self.only_chooses = False  # raises Chosen in place of encoding
        self._fast: Any = None  # each process makes its own

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_fast": None}

    def __call__(self, texts: Sequence[str], *, special_tokens: bool) -> Ragged:
        """Token ids, with or without what the tokenizer puts around a text."""
        encode = self._engine(texts)
        if self.only_chooses and self.is_fast is not None:
            raise Chosen
        return Ragged.joined([encode(part, special_tokens) for part in _in_parts(texts)])

    def choose(self, texts: Sequence[str]) -> None:
        """Choose the library by the first texts, none of which is encoded whole for that."""
        if self.is_fast is None:
            self._engine(texts)

    def _engine(self, texts: Sequence[str]) -> Callable[[list[str], bool], Ragged]:
        if self.is_fast is None and not texts:
            return self._usual
        if self._fast is None and self.is_fast is not False:
            self._fast = _fast_tokenizer(self.tokenizer)
        if self.is_fast is None:
            self.is_fast = self._fast is not None and self._agree(texts)
            return self._usual  # by no pool, which processes that are forked next would not have
        return self._quick_or_usual if self.is_fast else self._usual

    def _agree(self, texts: Sequence[str]) -> bool:
        step = -(-len(texts) // _COMPARED)
        added = (token.content for token in self.tokenizer.added_tokens_decoder.values())
        hard = [*_HARD, *(f"x{token} x\n{token}\n{token}x {token}" for token in added)]
        beginnings = [text[: _BY_THREADS - 1] for text in texts[::step]]  # no pool, before forks
        for part in _in_parts([*hard, *beginnings]):
            for with_special in (True, False):
                usual = self._usual(part, with_special)
                try:
                    quick = self._quick(part, with_special)
                except _NOT_READ:
                    return False
                if not all(map(np.array_equal, quick, usual)):
                    logger.warning(
                        "fastokens gives other tokens than tokenizers for this tokenizer: it is "
                        "left out, and text is tokenised more slowly"
                    )
                    return False
        return True

    def _usual(self, texts: list[str], special: bool) -> Ragged:
        # verbose=False: texts may be longer than the model's maximum, and are cut later
        found = self.tokenizer(
            texts, add_special_tokens=special, verbose=False, return_attention_mask=False
        )
        return Ragged.of(found["input_ids"])

    def _quick_or_usual(self, texts: list[str], special: bool) -> Ragged:
        global _has_threads
        if max(map(len, texts)) >= _BY_THREADS:
            if _has_threads not in (None, os.getpid()):  # a fork of that, which has none
                return self._usual(texts, special)
            _has_threads = os.getpid()
        try:
            return self._quick(texts, special)
        except _NOT_READ:
            return self._usual(texts, special)

    def _quick(self, texts: list[str], special: bool) -> Ragged:
        values, offsets = self._fast.encode_batch_flat(texts, add_special_tokens=special)
        return Ragged(
            np.frombuffer(values, np.uint32).astype(np.int32),
            np.frombuffer(offsets, np.uint64).astype(np.int64),
        )


def _fast_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The same tokenizer in `fastokens`; None without that library, or where it cannot read it."""
    from transformers import PreTrainedTokenizerFast

    usual = isinstance(tokenizer, PreTrainedTokenizerFast) and not tokenizer.split_special_tokens
    own, known = (
        getattr(kind, "_encode_plus", None) for kind in (type(tokenizer), PreTrainedTokenizerFast)
    )
    if not usual or known is None or own is not known:
        return None
    try:
        from fastokens import Tokenizer

        state = json.loads(tokenizer.backend_tokenizer.to_str())
        if state["model"].get("dropout"):  # it draws tokens, and fastokens does not
            return None
        return Tokenizer.from_json_str(json.dumps(state | {"truncation": None, "padding": None}))
    except (ImportError, *_NOT_READ):
        return None


def _in_parts(texts: Sequence[str]) -> Iterator[list[str]]:
    """Texts in parts, none so large that its encodings would fill the memory."""
    part: list[str] = []
    size = 0
    for text in texts:
        part.append(text)
        size += len(text)
        if size >= _CHARACTERS_AT_ONCE:
            yield part
            part, size = [], 0
    if part:
        yield part
