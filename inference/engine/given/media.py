"""What a prompt holds besides text: images, videos, sound. The model reads it with the prompt, and
what is written behind it is text alone.

Shapes: A axes of positions, B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from medusa_heads.inference.engine.given.cache import held_tokens

# Besides those that transformers itself drops behind the prompt: which tokens stand for images, and
# how large these are. Of new tokens they would say that they are text.
_OF_TOKENS = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
_OF_SIZES = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
_POSITIONS = "position_ids"
_IN_SPACE = 3  # axes: time, height and width; before them there may be one that counts tokens


def names_of_media(model: Any) -> frozenset[str]:
    """The arguments that a model is given with a prompt alone; none where it reads text alone."""
    kinds = model.input_modalities
    if not {*((kinds,) if isinstance(kinds, str) else kinds)} - {"text"}:
        return frozenset()
    from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL as ONCE

    return frozenset({*ONCE, *_OF_TOKENS, *_OF_SIZES})


def is_said(value: Any) -> bool:
    """Whether an argument says anything. Of text alone, generate() itself gives multimodal models
    no images, in an empty dict."""
    return not (value is None or value is False or (isinstance(value, Mapping) and not value))


def has_media(model: Any, model_kwargs: Mapping[str, Any]) -> bool:
    """Whether a prompt holds anything besides text."""
    names = names_of_media(model).difference(_OF_TOKENS)
    return any(is_said(model_kwargs.get(name)) for name in names)


def goes_on_behind_media(
    model: Any, model_kwargs: Mapping[str, Any], tokens: int, padding: Sequence[int]
) -> bool:
    """Whether texts of so many tokens go on from a cache at other positions than those of their
    tokens, by the same number in all of a row: so a model counts on behind images that it has
    read."""
    given: Tensor | None = model_kwargs.get(_POSITIONS)
    if given is None or not names_of_media(model) or not held_tokens(model_kwargs):
        return False
    rows = given.shape[-2] if given.ndim in (2, 3) else 0
    if given.shape[-1] != tokens or rows not in (1, len(padding)):
        return False
    slots_T = torch.arange(tokens, device=given.device)
    own_BT = slots_T - torch.tensor(padding, device=given.device)[:, None]
    ahead = given - own_BT
    alike = (ahead == ahead[..., -1:]) | (own_BT < 0)
    return bool(alike.all() and ahead[..., -1].any())


@contextmanager
def positions_given(model: Any, *, media: bool) -> Iterator[list[Tensor]]:
    """Within the block, the list holds the positions that the model was last given in this thread,
    where they need not be those of its tokens: some models count on in ways of their own. Raises
    ValueError: it was given images and no positions."""
    from transformers import GenerationMixin

    seen, own = list[Tensor](), get_ident()
    usual = GenerationMixin.prepare_inputs_for_generation
    if not media and getattr(type(model), usual.__name__, usual) is usual:
        yield seen
        return

    def keep(_module: Any, _args: tuple[Any, ...], given: dict[str, Any]) -> None:
        if get_ident() == own and isinstance(given.get(_POSITIONS), Tensor):
            seen[:] = [given[_POSITIONS]]

    with model.register_forward_pre_hook(keep, with_kwargs=True):
        yield seen
        if media and not seen:
            raise ValueError(
                "generate() tells the target no positions, and those behind an image may be other "
                "ones than those of its tokens: call the target's own generate()"
            )


def positions_ahead(given: Sequence[Tensor], own_B: Sequence[int]) -> list[int]:
    """By how much the positions of each row are ahead of its tokens behind the prompt, or behind
    them: an image may take fewer positions than tokens. Raises ValueError: no single position is
    next.

    Args:
        given: the positions of the prompts, where they were seen: [B, T] or [A, B, T].
        own_B: where the last token of each prompt stands in its text.
    """
    if not given or given[0].ndim > 3 or given[0].shape[-2] not in (1, len(own_B)):
        return [0] * len(own_B)
    last_AB = given[0][..., -1].reshape(-1, given[0].shape[-2])
    if len(last_AB) > _IN_SPACE:
        last_AB = last_AB[-_IN_SPACE:]
    if (last_AB != last_AB[0]).any():
        raise ValueError(
            "the prompt ends with an image, behind which no single position is next: end it with "
            "text, or call the target's own generate()"
        )
    last_B: list[int] = last_AB[0].expand(len(own_B)).tolist()
    return [last - own for last, own in zip(last_B, own_B, strict=True)]
