"""What a set of heads is, in numbers. The one place that fixes the offset convention.

Offset convention: at position t the target's last hidden state h_t yields, through the target's
own lm_head, the token at t + 1. Head i (i = 0 .. num_heads - 1) predicts the token at t + 2 + i
from the same h_t.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

VocabMatrix = Literal["shared", "own"]


def head_offset(head: int) -> int:
    """How far ahead head `head` looks: from h_t it predicts the token at t + offset."""
    return head + 2


@dataclass(frozen=True)
class HeadsConfig:
    """Shape of a set of Medusa heads (Cai et al. 2024, arXiv:2401.10774, section 2.1).

    Args:
        num_heads: K, how many tokens beyond the target's own next token are predicted.
        num_layers: residual blocks in each head.
        vocab_matrix: `"shared"` projects with the target's own frozen lm_head; `"own"` gives each
            head a trainable copy of it.
        hidden_size: D of the target; filled in by `MedusaHeads.from_target`.
        vocab_size: V of the target; filled in by `MedusaHeads.from_target`.

    Raises:
        ValueError: a size below one, or an unknown `vocab_matrix`.
    """

    num_heads: int = 4
    num_layers: int = 1
    vocab_matrix: VocabMatrix = "shared"
    hidden_size: int | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_layers", "hidden_size", "vocab_size"):
            value = getattr(self, name)
            optional = name in ("hidden_size", "vocab_size")
            if optional and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.vocab_matrix not in get_args(VocabMatrix):
            raise ValueError(
                f"vocab_matrix must be one of {list(get_args(VocabMatrix))}, "
                f"got {self.vocab_matrix!r}"
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
        """Plain values, as they are written to a checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HeadsConfig:
        """Read what `to_dict` wrote.

        Raises:
            ValueError: an unknown key, named in the message.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"unknown heads configuration keys {unknown}; known: {sorted(known)}")
        return cls(**values)
