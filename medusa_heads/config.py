"""What a set of heads is, in numbers. The one place that fixes the offset convention.

Offset convention: at position t the target's last hidden state h_t yields, through the target's
own lm_head, the token at t + 1. Head i (i = 0 .. num_heads - 1) predicts the token at t + 2 + i
from the same h_t.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args

from medusa_heads.decoder_shape import BlockShape, DecoderShape, LayerShape
from medusa_heads.settings import MOST, NO_FLAG, as_flag, one_of, sizes, switches

HeadsKind = Literal["medusa", "hydra", "block", "eagle3"]
VocabMatrix = Literal["shared", "own"]

RankPath = tuple[int, ...]
"""A node of a tree by ranks: (0, 2) is head 0's best token, then head 1's third best."""

IGNORED = -100
"""Label of a token that nothing learns from: a prompt's, padding's."""

MOST_STEPS = 64  # of a layer that reads its own output
_SHAPES: dict[str, type[LayerShape]] = {"block": BlockShape, "eagle3": DecoderShape}
# What heads of a kind cannot have, and why.
_IDLE: dict[str, tuple[tuple[str, ...], str]] = {
    "block": (
        ("prefix_attention", "induction", "linear_shortcut", "raw_embeddings"),
        "heads of kind 'block' attend over the text so far, and read embeddings, as they are",
    ),
    "eagle3": (
        ("prefix_attention", "induction", "linear_shortcut", "correction_rank", "raw_embeddings"),
        "eagle3 heads read the text and the token before by themselves",
    ),
}


def head_offset(head: int) -> int:
    """How far ahead head `head` looks: from h_t it predicts the token at t + offset."""
    return head + 2


@dataclass(frozen=True)
class HeadsConfig:
    """Shape of a set of heads.

    Args:
        kind: `"medusa"`, heads that predict independently of each other (Cai et al. 2024,
            arXiv:2401.10774, section 2.1); `"hydra"`, sequential heads that also see the tokens
            drafted before theirs (Ankner et al. 2024, arXiv:2402.05109); `"block"`, queries that
            attend over the text so far and to each other (DFlash, arXiv:2602.06036); or `"eagle3"`,
            one decoder layer that goes on from its own output (Li et al. 2025, arXiv:2503.01840).
        num_heads: K, how many tokens beyond the target's own next token are predicted.
        num_layers: residual blocks in each head; of kind `"block"` the layers that all share.
        vocab_matrix: `"shared"` projects with the target's own frozen lm_head; `"own"` gives each
            head, and the layers of a block or of eagle3, a trainable copy of it.
        draft_vocab_size: how many tokens the heads can draft; None for all of the target's. Which
            ones is stored with the heads.
        prefix_attention: a layer of the heads' own attends over the text so far (prefix.py).
        induction: of kinds `"medusa"` and `"hydra"`, each head reads what followed the places of
            the text so far that are like this one (induction.py).
        linear_shortcut: of kind `"medusa"`, the first block of each head adds to a product of what
            it read, and not to that itself (medusa.py). Those of `"hydra"` do so by themselves.
        correction_rank: of the product by which the token before corrects each head's logits
            (correction.py); None for none.
        features: layers of the target, counted from 0, whose outputs the heads read beside its last
            hidden state (fusion.py), in the order of their weights; None for none.
        raw_embeddings: token embeddings are read as the target has them, as the heads of Hydra's
            authors do, and not brought to unit scale.
        logit_scale: what the heads' products with their vocabulary matrices are multiplied by, as
            the target's own are: `train_heads` reads it off the target.
        decoder: of kinds `"block"` and `"eagle3"`, the shape of their layers; None for a usual one
            of the target's width.
        hidden_size: D of the target; filled in by `from_target`.
        vocab_size: V of the target; filled in by `from_target`.

    Raises:
        ValueError: a size below one or beyond reason, an unknown word, or parts that do not go
            together.
    """

    # Fields of dataclasses itself, which the page of the Python names reads the defaults of.
    kind: HeadsKind = field(
        default="medusa",
        metadata=as_flag(
            "Independent heads (medusa), heads that also see the drafts before them (hydra), or "
            "a block that attends over the text so far (block), or one decoder layer that goes on "
            "from its own output (eagle3). vLLM serves medusa and eagle3 heads, and reads block "
            "heads (not run there)."
        ),
    )
    num_heads: int = field(
        default=4, metadata=as_flag("Number of heads; each looks one token further ahead.")
    )
    num_layers: int = field(
        default=1,
        metadata=as_flag("Residual blocks in each head, or layers of a block that all share."),
    )
    vocab_matrix: VocabMatrix = field(
        default="shared",
        metadata=as_flag(
            "Project with the target's lm_head, or with a trained copy for each head."
        ),
    )
    draft_vocab_size: int | None = field(default=None, metadata=NO_FLAG)
    prefix_attention: bool = field(
        default=False,
        metadata=as_flag(
            "Give the heads a layer that attends over the text so far. Such heads guess better, "
            "and no other engine can serve them."
        ),
    )
    induction: bool = field(
        default=False,
        metadata=as_flag(
            "Let the heads read what followed the places of the text so far that are like this "
            "one. Such heads guess better yet, and no other engine can serve them."
        ),
    )
    linear_shortcut: bool = field(
        default=False,
        metadata=as_flag(
            "Let each of the medusa heads begin with the linear map that comes closest to what it "
            "should say, and learn from there. Such heads guess better; of other engines only vLLM "
            "can serve them, with this package's plugin."
        ),
    )
    correction_rank: int | None = field(
        default=None,
        metadata=as_flag(
            "Correct what each head says by the token before its own, with a product of this rank "
            "(128 to 256). Drafts stay one pass of the heads. Default: no correction."
        ),
    )
    features: Sequence[int] | None = field(
        default=None,
        metadata=as_flag(
            "Layers of the target, counted from 0, that the heads read beside its last hidden "
            "state: a low, a middle and a high one. Default: none."
        ),
    )
    raw_embeddings: bool = field(default=False, metadata=NO_FLAG)
    logit_scale: float = field(default=1.0, metadata=NO_FLAG)
    decoder: LayerShape | None = field(default=None, metadata=NO_FLAG)
    hidden_size: int | None = field(default=None, metadata=NO_FLAG)
    vocab_size: int | None = field(default=None, metadata=NO_FLAG)

    def __post_init__(self) -> None:
        optional = ("draft_vocab_size", "correction_rank", "hidden_size", "vocab_size")
        given = [name for name in optional if getattr(self, name) is not None]
        sizes(self, "num_heads", "num_layers", *given)
        switches(self, "prefix_attention", "induction", "linear_shortcut", "raw_embeddings")
        if type(self.logit_scale) not in (int, float) or not 0 < self.logit_scale < math.inf:
            raise ValueError(f"logit_scale must be a number above 0, got {self.logit_scale!r}")
        if self.features is not None:
            object.__setattr__(self, "features", _layers(self.features))
        one_of(self, "kind", get_args(HeadsKind))
        one_of(self, "vocab_matrix", get_args(VocabMatrix))
        if (self.draft_vocab_size or 0) > (self.vocab_size or MOST):
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} is more than the target's "
                f"{self.vocab_size} tokens: lower it, or leave it out"
            )
        if self.kind == "hydra":  # whose blocks have it by themselves
            object.__setattr__(self, "linear_shortcut", False)
        if self.prefix_attention and self.induction:
            raise ValueError(
                "prefix_attention and induction both read the text so far: leave one out "
                "(induction false, where a recipe has it)"
            )
        if self.kind in _SHAPES:
            self._check_layers()
        elif self.decoder is not None:
            raise ValueError(f"{self.kind} heads have no decoder layer: leave decoder out")
        if not isinstance(self.decoder, _SHAPES.get(self.kind, LayerShape) | None):
            shape = type(self.decoder).__name__
            raise ValueError(f"{self.kind} heads have no decoder of the shape {shape}")

    def _check_layers(self) -> None:
        """Raises ValueError, by name: what heads that are decoder layers have no use for."""
        idle, why = _IDLE[self.kind]
        if name := next((name for name in idle if getattr(self, name)), None):
            raise ValueError(f"{why}: leave {name} out")
        if self.features is not None and list(self.features) != sorted(self.features):
            raise ValueError(
                f"{self.kind} heads read features from the lowest layer on, got "
                f"{list(self.features)}"
            )
        if self.kind == "eagle3" and (self.num_layers != 1 or self.num_heads > MOST_STEPS):
            raise ValueError(
                f"eagle3 heads are one layer, read at most {MOST_STEPS} times: set num_layers 1 "
                f"and num_heads accordingly, got {self.num_layers} and {self.num_heads}"
            )
        if self.num_heads > MOST_STEPS:
            raise ValueError(f"a block has at most {MOST_STEPS} heads, got {self.num_heads}")
        mask = getattr(self.decoder, "mask_token_id", None)
        if (mask or 0) >= (self.vocab_size or MOST + 1):
            raise ValueError(
                f"mask_token_id {mask} is none of the target's {self.vocab_size} tokens"
            )

    def for_target(self, hidden_size: int, vocab_size: int) -> HeadsConfig:
        """This configuration with the target's sizes filled in.

        Raises:
            ValueError: the configuration already names other sizes.
        """
        for name, got in (("hidden_size", hidden_size), ("vocab_size", vocab_size)):
            expected = getattr(self, name)
            if expected is not None and expected != got:
                raise ValueError(
                    f"the heads were made for {name} {expected}, but this target's is {got}: "
                    "attach them to the target they were trained on"
                )
        return replace(self, hidden_size=hidden_size, vocab_size=vocab_size)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they are written to a checkpoint. Versions that know of no correction,
        no features, no decoder, no linear shortcut and no scale still read heads that have none."""
        values = asdict(self) | {"features": self.features and list(self.features)}
        values["decoder"] = self.decoder and self.decoder.to_dict()
        later = ("correction_rank", "features", "decoder")
        for name in ("induction", "linear_shortcut"):
            if not values[name]:
                del values[name]
        if self.logit_scale == 1:
            del values["logit_scale"]
        return {k: v for k, v in values.items() if k not in later or v is not None}

    @property
    def reads_text(self) -> bool:
        """Whether heads read every position of a text, and not only those that they draft from."""
        return self.prefix_attention or self.induction or self.kind in _SHAPES

    @property
    def vocab_bias(self) -> str:
        """Name of the bias of the first own vocabulary matrix, where it has one."""
        return f"0.{self.num_blocks}.bias" if self.num_blocks else "lm_head.bias"

    @property
    def num_blocks(self) -> int:
        """Residual blocks of each head, behind which its own vocabulary matrix stands."""
        return 0 if self.kind in _SHAPES else self.num_layers

    @property
    def served_as(self) -> Literal["dspark", "dflash", "eagle3"] | None:
        """What engines call layers such as these heads have; None where they hold none such."""
        if self.kind == "block" and self.features:
            return "dspark" if self.correction_rank else "dflash"
        return "eagle3" if self.kind == "eagle3" else None

    @property
    def is_plain_medusa(self) -> bool:
        """Whether these are heads as Medusa's paper has them, which other engines can hold."""
        layers = self.prefix_attention or self.induction or self.linear_shortcut or self.features
        return self.kind == "medusa" and not (
            layers or self.draft_vocab_size or self.correction_rank
        )

    @property
    def num_candidates(self) -> int:
        """How many tokens a head can draft."""
        size = self.draft_vocab_size or self.vocab_size
        assert size is not None
        return size

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HeadsConfig:
        """Read what `to_dict` wrote.

        Raises:
            ValueError: an unknown key, named in the message.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"unknown heads configuration keys {unknown}; known: {sorted(known)}")
        decoder = values.get("decoder")
        if decoder is not None:
            shape = BlockShape if values.get("kind") == "block" else DecoderShape
            values = {**values, "decoder": shape.from_dict(decoder)}
        return cls(**values)


def _layers(given: Any) -> tuple[int, ...]:
    """Numbers of layers, as they were given."""
    numbers = given if isinstance(given, list | tuple) else ()
    plain = all(type(number) is int and 0 <= number <= MOST for number in numbers)
    if not numbers or not plain or len(set(numbers)) < len(numbers):
        raise ValueError(
            "features must be different numbers of layers, counted from 0, such as [2, 4], got "
            f"{given!r}"
        )
    return tuple(numbers)
