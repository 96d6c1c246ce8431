"""What a call of a decoder's generate() says that transformers' own is not to hear, and whether the
decoder is still made for its target."""

from __future__ import annotations

from typing import Any, NamedTuple

from medusa_heads.inference.engine.given.cache import mark_given
from medusa_heads.target.target import TargetModel

NOT_IN_STEP = "tree decoding does not keep sharded processes in step: gather first"


def take_own(options: dict[str, Any], assistant_model: Any) -> None:
    """Take it out of a call's options, which are left to transformers.

    Raises:
        ValueError: somebody else is to draft or to decode, or processes are to be kept in step.
    """
    if assistant_model is not None:
        raise ValueError("drafts come from elsewhere here: leave assistant_model out")
    if options.pop("custom_generate", None) is not None:
        raise ValueError(
            "this decoder is a decoding method itself: leave custom_generate out, or call the "
            "target's own generate()"
        )
    if options.pop("synced_gpus", None):  # of which generate() says nothing to `decode`
        raise ValueError(NOT_IN_STEP)
    mark_given(options)


class Vocabulary(NamedTuple):
    """Tokens that a target can write and read, for which drafters have made their tables."""

    written: int
    read: int

    @classmethod
    def of(cls, target: TargetModel) -> Vocabulary:
        return cls(target.vocab_size, target.readable)

    def check(self, target: TargetModel) -> None:
        """Raises ValueError: the target has another one by now."""
        for before, now in zip(self, Vocabulary.of(target), strict=True):
            if now != before:
                raise ValueError(
                    f"the target's vocabulary has changed from {before} to {now}: make the decoder "
                    "anew"
                )
