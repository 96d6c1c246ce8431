"""Rows with images: the tokens that stand for them, and what the target sees in their place.

What the tokens of an image are, and what is handed to the target with them, its own processor
says. Tables hold where images lie and a hash of what was seen there; the images themselves are
read for a batch, and let go with it. Shapes: B batch, T tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from medusa_heads.data.bad_rows import BadRow
from medusa_heads.data.chat import Rendered
from medusa_heads.data.encoding import Ragged
from medusa_heads.data.formats import Conversation
from medusa_heads.data.images import (
    IMAGES_COLUMN,
    Source,
    has_parts,
    may_hold_images,
    picture,
    read_image,
    unlike,
)
from medusa_heads.data.sources import Corpus
from medusa_heads.errors import first_line
from medusa_heads.files import at_home
from medusa_heads.hub_probe import asking_hub
from medusa_heads.target.target import TargetModel
from medusa_heads.training.data.columns import SEEN_COLUMN, collate

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

UNFIT = "no answer, or but a part of an image, is left of them"
"""Why a row with images is left out, and no broken one."""

_UNSEEN = "its text holds what stands for an image, and it has none"
_TEXT_ALONE = "only text is read here"
_OF_TOKENS = ("token_type_ids", "mm_token_type_ids")  # 1 where a token stands for an image
_OTHERWISE = "train it on rows without images"


@dataclass(frozen=True)
class Seen(Conversation):
    """A conversation whose images were looked at.

    Attributes:
        texts: what stands for each image in the text that is encoded.
        tokens: how many tokens of images there are up to each, from 0 before the first.
        digests: a hash of each.
    """

    texts: Sequence[str] = ()
    tokens: Sequence[int] = (0,)
    digests: Sequence[bytes] = ()


def find_sight(target: TargetModel, corpora: Sequence[Corpus], processor: Any = None) -> Sight:
    """How a target is shown images where conversations of these corpora may hold any; by a given
    processor (what has none of its own, such as a tokenizer, is none), or the one beside it."""
    tables = [part for part in corpora if not part.is_stream]
    kinds = target.model.input_modalities
    if "image" not in ((kinds,) if isinstance(kinds, str) else kinds):
        return Sight(why_not="the target reads text alone")
    if len(tables) < len(corpora):
        return Sight(why_not="a stream is read as text alone: leave streaming off")
    if not any(may_hold_images(part.rows, part.format.columns) for part in tables):
        return Sight()
    if hasattr(processor, "image_processor"):
        return Sight(processor)
    from transformers import AutoProcessor

    name, found = at_home(target.name_or_path), None
    try:
        if name:
            with asking_hub(name) as options:
                at = {"revision": target.revision or "main", **options}
                found = AutoProcessor.from_pretrained(name, **at)
    except Exception as error:  # of damaged files, and of what is not installed
        return Sight(why_not=f"the target's processor cannot be loaded ({first_line(error)})")
    if not hasattr(found, "image_processor"):  # the tokenizer, where there is no other
        return Sight(why_not=f"no processor of {name!r} is known: in Python give it as tokenizer")
    return Sight(found)


class Sight:
    """How a target is shown images: by its processor, or not at all, and `why_not`."""

    def __init__(self, processor: Any = None, why_not: str = _TEXT_ALONE) -> None:
        self.processor, self.why_not = processor, why_not
        images = getattr(processor, "image_processor", None)
        self._settings = b"" if images is None else str(images.to_json_string()).encode()

    @property
    def template(self) -> str | None:
        """The processor's chat template, where it has one."""
        found = getattr(self.processor, "chat_template", None)
        return found if isinstance(found, str) else None

    def of(self, talk: Conversation) -> Conversation:
        """A conversation with its images looked at, if it has any; a BadRow where one cannot be
        read, or the target is shown none. Raises ValueError: the processor does not tell which
        tokens stand for an image."""
        if not talk.images or (self.processor is None and not has_parts(talk.messages)):
            return talk
        if self.processor is None:
            raise BadRow(f"it holds an image, and {self.why_not}")
        contents = [*map(read_image, talk.images)]
        shown = [*map(picture, contents, talk.images)]
        told = self._told([shown]).get("text_replacement_offsets")
        if told is None:
            raise ValueError(
                f"{type(self.processor).__name__} does not tell which tokens stand for an image: "
                f"{_OTHERWISE}"
            )
        texts = [each["replacement"] for each in told[0]]
        ids = self.processor.tokenizer(texts, add_special_tokens=False)["input_ids"]
        counts = [*accumulate(map(self._count, ids), initial=0)]
        digests = [*map(_digest, contents)]
        return Seen(**vars(talk), texts=texts, tokens=counts, digests=digests)

    def filled(self, talk: Seen, rendered: Rendered | BadRow) -> Rendered | BadRow:
        """The texts of a conversation with what stands for its images in their places; a BadRow
        where the chat template writes more or fewer places than there are images."""
        if isinstance(rendered, BadRow):
            return rendered
        contents = [message["content"] for message in talk.messages]
        images = [
            0 if isinstance(parts, str) else sum(part["type"] == "image" for part in parts)
            for parts in contents
        ]
        if not any(images):
            return BadRow(unlike(len(talk.images), 0))
        mark, filled = self.processor.image_token, Rendered(rendered.spoken, [], [])
        for index, *pair in zip(*rendered, strict=True):
            expected = sum(images[:index])
            for text, texts in zip(pair, filled[1:], strict=True):
                first, *others = text.split(mark)
                if len(others) != expected:
                    return BadRow(
                        f"the chat template writes {mark!r} {len(others)} times for {expected} "
                        "images: no message may hold it as text"
                    )
                texts.append(first + "".join(map(str.__add__, talk.texts, others)))
        return filled

    def columns(
        self, talks: Mapping[int, Seen], rows: Ragged, sources: Sequence[int]
    ) -> tuple[list[list[Source]], list[int], list[str | None]]:
        """Of rows of tokens, each of a source, the images, a hash of them, and why one is left out
        that ends within an image."""
        images, hashes, problems = [], [], list[str | None]()
        for row, source in enumerate(sources):
            talk = talks.get(source, Seen([]))
            count = self._count(rows.row(row))
            whole = talk.tokens.index(count) if count in talk.tokens else 0
            images.append(talk.images[:whole])
            hashes.append(self._hash(talk.digests[:whole]))
            fits = count in talk.tokens and self._stand_alone(talk, whole)
            problems.append(None if fits else UNFIT if talk.images else _UNSEEN)
        return images, hashes, problems

    def _stand_alone(self, talk: Seen, count: int) -> bool:
        """Whether the first so many images of a conversation are what they are among all of them:
        some processors cut only a single image into tiles."""
        if count in (0, len(talk.images)):
            return True
        alone = self.of(Conversation([], images=talk.images[:count]))
        return isinstance(alone, Seen) and alone.texts == talk.texts[:count]

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A batch as `collate` makes it, with what the target is given besides for the images of
        its rows, as `media`. Raises ValueError: one is not there any more, or another one; in a
        worker of a data loader, whose errors come as a traceback, `unseen` says so instead."""
        batch: dict[str, Any] = dict(collate(rows))
        try:
            return batch | self._shown(rows, batch["input_ids"])
        except ValueError as error:
            if get_worker_info() is None:
                raise
            return batch | {"unseen": str(error)}

    def _shown(self, rows: Sequence[Mapping[str, Any]], ids_BT: Tensor) -> dict[str, Any]:
        shown = []
        for row in rows:
            own = row.get(IMAGES_COLUMN) or []
            contents = [*map(read_image, own)]
            if own and self._hash([*map(_digest, contents)]) != row[SEEN_COLUMN]:
                names = ", ".join(repr(source["path"]) for source in own)
                raise ValueError(
                    f"the images of a row ({names}) are others than when it was prepared: save the "
                    "data file anew, and its rows are prepared again"
                )
            if own:
                shown.append([*map(picture, contents, own)])
        return {"media": self._media(ids_BT, shown)} if shown else {}

    def _media(self, ids_BT: Tensor, shown: Sequence[Sequence[Picture]]) -> dict[str, Tensor]:
        told = self._told(shown)
        shape = told["input_ids"].shape
        given = {name: value for name, value in told.items() if isinstance(value, Tensor)}
        media = {name: given[name] for name in given.keys() - {"input_ids", "attention_mask"}}
        for name in [name for name, value in media.items() if value.shape[:2] == shape]:
            if name not in _OF_TOKENS:
                raise ValueError(
                    f"{type(self.processor).__name__} gives {name!r} for each token, and training "
                    f"does not know what that says: {_OTHERWISE}"
                )
            media[name] = torch.from_numpy(self._are_images(ids_BT.numpy())).long()
        return media

    def _told(self, shown: Sequence[Sequence[Picture]]) -> dict[str, Any]:
        """What the processor says of the images of some rows, as tensors; a BadRow where it takes
        one not."""
        try:
            return dict(
                self.processor(
                    text=[self.processor.image_token * len(row) for row in shown],
                    images=[[*row] for row in shown],
                    padding=True,
                    return_tensors="pt",
                    return_text_replacement_offsets=True,
                )
            )
        except Exception as error:  # of sizes that it was not made for, whatever comes of them
            raise BadRow(
                f"the target's processor refuses its images ({first_line(error)})"
            ) from error

    def _are_images(self, ids: Any) -> Any:
        """Which tokens stand for an image, an array like theirs."""
        return np.isin(ids, self.processor.image_token_ids)

    def _count(self, ids: Sequence[int]) -> int:
        return int(self._are_images(ids).sum())

    def _hash(self, digests: Sequence[bytes]) -> int:
        """Of images as the processor's settings show them; 0 of none."""
        if not digests:
            return 0
        told = self._settings + b"".join(digests)
        digest = hashlib.blake2b(told, digest_size=8).digest()
        return int.from_bytes(digest, "big", signed=True)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
