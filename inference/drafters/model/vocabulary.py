"""What the vocabularies of a draft model and its target share: tokens that stand for the same
bytes, whatever their ids.

Drafts are drawn from the draft model's distribution over the shared tokens alone, so that they are
tokens of the target, and every rule that accepts drafts stays as exact as it is.

Shapes: B rows, F nodes read at once, S shared tokens, T and V ids of the target.
Source: Timor et al. 2025, "Lossless speculative decoding algorithms for heterogeneous
vocabularies", arXiv:2502.05202, token-level intersection.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from medusa_heads.checkpoint.draft_checkpoint import same_vocabulary
from medusa_heads.data.encoding import special_ids
from medusa_heads.target.loading import find_tokenizer
from medusa_heads.target.target import TargetModel

if TYPE_CHECKING:  # heavy to import
    from transformers import PreTrainedTokenizerBase

LEAST_SHARE = 0.01  # of the smaller vocabulary; with fewer shared tokens hardly a draft is right
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_SPACE = "\u2581"  # as SentencePiece writes a space
_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}

Spelling = bytes | str  # the bytes that a token stands for; of a special token, its name


class SharedVocabulary:
    """The tokens of a draft model that are tokens of its target as well.

    Special tokens are shared by name; those that begin and end a text by what they do. Raises
    ValueError: less than a hundredth is shared.

    Args:
        draft, target: the models' tokenizers.
        draft_size, target_size: rows of their vocabulary matrices.
        device: of the draft model.

    Attributes:
        own: the draft model's ids of the target's tokens, where it has them.
        share: of the target's tokens, how many are shared.
        begin: what the draft model's texts begin with, perhaps nothing.
    """

    def __init__(
        self,
        draft: PreTrainedTokenizerBase,
        target: PreTrainedTokenizerBase,
        draft_size: int,
        target_size: int,
        device: torch.device,
    ) -> None:
        self._tokenizer, self._target_size = draft, target_size
        self._spelled = dict(_spellings(draft, draft_size))
        theirs = dict(_spellings(target, target_size))
        ids, target_ids = _by_spelling(self._spelled), _by_spelling(theirs)
        pairs = {token: ids[each] for each, token in target_ids.items() if each in ids}
        for role in ("bos_token_id", "eos_token_id"):
            token, own = getattr(target, role), getattr(draft, role)
            if token in theirs and own in self._spelled and own not in pairs.values():
                pairs.setdefault(token, own)
        smaller = min(len(self._spelled), len(theirs))
        if len(pairs) < LEAST_SHARE * smaller or not pairs:
            raise ValueError(
                f"the draft model's vocabulary ({len(self._spelled)} tokens) and the target's "
                f"({len(theirs)} tokens) share {len(pairs)} tokens, too few to draft from: give a "
                "draft model whose tokens are more like the target's"
            )
        self.share = len(pairs) / len(theirs)
        self._target_ids_S = torch.tensor(list(pairs), device=device)
        self._own_ids_S = torch.tensor(list(pairs.values()), device=device)
        self._own_ids_T = torch.zeros(target_size, dtype=torch.long, device=device)
        self._own_ids_T[self._target_ids_S] = self._own_ids_S
        self.own = {t: ids[each] for t, each in theirs.items() if each in ids} | pairs
        self._bytes = {t: each for t, each in theirs.items() if isinstance(each, bytes)}
        self._ids = {each: own for each, own in ids.items() if isinstance(each, bytes)}
        self._longest = max(map(len, self._ids), default=0)
        first = draft("")["input_ids"][:1]
        self.begin: list[int] = first if first == [draft.bos_token_id] else []
        ends = (draft.bos_token_id, draft.eos_token_id, draft.pad_token_id)
        self.nothing = next((token for token in ends if token in self._spelled), 0)

    def drafted(self, tokens_BF: Tensor) -> Tensor:
        """The draft model's ids of drafted tokens. Of a token that it does not have, which is
        drafted only where it has too few others, it reads any."""
        return self._own_ids_T[tokens_BF]

    def of_target(self, logits: Tensor) -> Tensor:
        """The draft model's logits [.., its vocabulary] as logits of the target's tokens [.., V];
        what is not shared cannot be."""
        spread = logits.new_full((*logits.shape[:-1], self._target_size), float("-inf"))
        spread[..., self._target_ids_S] = logits[..., self._own_ids_S]
        return spread

    def spelled(self, token: int) -> bytes:
        """The bytes that a token of the target stands for; of a special one, none."""
        return self._bytes.get(token, b"")

    def encode(self, text: bytes) -> list[int]:
        """In the draft model's tokens: as its tokenizer splits the text, where that gives it back,
        which one that puts spaces before words, or meets half a character, may not do; else the
        longest tokens from the left."""
        with suppress(UnicodeDecodeError):
            ids: list[int] = self._tokenizer.encode(text.decode(), add_special_tokens=False)
            spelled = [self._spelled.get(token) for token in ids]
            if b"".join(each for each in spelled if isinstance(each, bytes)) == text:
                return ids
        ids, at = [], 0
        while at < len(text):
            ends = range(min(at + self._longest, len(text)), at, -1)
            end = next((end for end in ends if text[at:end] in self._ids), None)
            if end is not None:
                ids.append(self._ids[text[at:end]])
            at = end or at + 1  # a byte that nothing stands for is left out
        return ids


class ForeignDraft(TargetModel):
    """A draft model whose tokens are not all the target's."""

    def __init__(self, draft: TargetModel, vocabulary: SharedVocabulary) -> None:
        super().__init__(draft.model)
        self.vocabulary = vocabulary


def fitted(
    draft: TargetModel,
    target: TargetModel,
    draft_tokenizer: PreTrainedTokenizerBase | None = None,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
) -> TargetModel:
    """The draft model as one that drafts tokens of the target; itself, where its token ids are the
    target's. Tokenizers that are not given are looked for where the models came from. Raises
    ValueError: something that is no tokenizer; or the vocabularies differ, and a tokenizer is
    missing or damaged, or too little is shared."""
    if isinstance(draft, ForeignDraft):
        return draft
    given = {"draft_tokenizer": draft_tokenizer, "target_tokenizer": target_tokenizer}
    for name, tokenizer in given.items():
        if tokenizer is not None and not hasattr(tokenizer, "get_vocab"):
            raise ValueError(f"{name} must be a tokenizer, got {type(tokenizer).__name__}")
    own, others = (
        find_tokenizer(model.name_or_path, model.revision) if tokenizer is None else tokenizer
        for model, tokenizer in zip((draft, target), given.values(), strict=True)
    )
    half_known = (own is None) != (others is None) and any(given.values())
    if not half_known and same_vocabulary(draft, target, own, others):
        return draft
    if own is None or others is None:
        missing = "draft_tokenizer" if own is None else "target_tokenizer"
        raise ValueError(
            f"the draft model has a vocabulary of {draft.vocab_size} tokens, the target one of "
            f"{target.vocab_size}, and no {missing} can be read where the model came from: pass "
            f"{missing}="
        )
    shared = SharedVocabulary(own, others, draft.vocab_size, target.vocab_size, draft.device)
    return ForeignDraft(draft, shared)


def _spellings(tokenizer: PreTrainedTokenizerBase, size: int) -> Iterator[tuple[int, Spelling]]:
    """What each token stands for, in the order of the ids, those that name a byte last; ids beyond
    the vocabulary matrix are no tokens."""
    decoder = _decoder(tokenizer)
    added, special = tokenizer.added_tokens_decoder, special_ids(tokenizer)
    named = '"ByteFallback"' in decoder or not decoder
    tokens = [
        (named and _BYTE.fullmatch(token) is not None, number, token)
        for token, number in tokenizer.get_vocab().items()
        if number < size
    ]
    for names_byte, number, token in sorted(tokens):
        if number in special:
            yield number, token
        elif names_byte:
            yield number, bytes([int(token[3:5], 16)])
        elif number in added:
            yield number, token.encode()
        elif '"ByteLevel"' in decoder and _BYTE_OF.keys() >= set(token):
            yield number, bytes(map(_BYTE_OF.__getitem__, token))
        elif _SPACE in decoder or not decoder:
            yield number, token.replace(_SPACE, " ").encode()
        else:
            yield number, token.encode()


def _decoder(tokenizer: PreTrainedTokenizerBase) -> str:
    """How tokens become text, as JSON; empty for a tokenizer that does not say."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    return "" if decoder is None else str(decoder.__getstate__().decode())


def _by_spelling(spelled: dict[int, Spelling]) -> dict[Spelling, int]:
    """Of several tokens for the same, the first: a byte goes by its name where nothing else stands
    for it."""
    by: dict[Spelling, int] = {}
    for token, spelling in spelled.items():
        by.setdefault(spelling, token)
    return by
