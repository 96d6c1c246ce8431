"""What a call of a decoder's generate() says that transformers' own is not to hear."""

from __future__ import annotations

from typing import Any

from medusa_heads.inference.engine.given.cache import mark_given

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
