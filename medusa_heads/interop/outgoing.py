"""Heads on their way to another engine: what it can hold of them, and how files are written.

Shapes: D hidden, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_heads.checkpoint.stored_heads import DRAFT_TOKENS, StoredHeads
from medusa_heads.config import HeadsConfig
from medusa_heads.interop.source import CONFIG_FILE


@dataclass
class Outgoing:
    """Heads to be written for an engine.

    Attributes:
        stored: the heads, and what is known of them.
        matrix_VD: gives the vocabulary matrix of the target, or says where to get it.
        notices: what the user should know.
    """

    stored: StoredHeads
    matrix_VD: Callable[[], Tensor]
    notices: list[str] = field(default_factory=list)

    @property
    def config(self) -> HeadsConfig:
        """The heads' shape."""
        return self.stored.config

    @property
    def shared(self) -> bool:
        """Whether the heads share the target's vocabulary matrix."""
        return self.config.vocab_matrix == "shared"

    def require_plain(self, engine: str, *, reduced: bool = False) -> None:
        """Refuse by name what `engine` cannot hold.

        Args:
            engine: as the user knows it.
            reduced: it can hold a reduced vocabulary, where that is part of the target's.

        Raises:
            ValueError: sequential heads, a prefix layer, a vocabulary matrix with a bias, ...
        """
        config = self.config
        if config.kind != "medusa":
            raise ValueError(f"{engine} holds no {config.kind} heads: train kind 'medusa' for it")
        if config.prefix_attention:
            raise ValueError(f"{engine} holds no prefix layer: train without prefix_attention")
        if f"0.{config.num_layers}.bias" in self.stored.tensors:
            raise ValueError(f"{engine} holds no bias in the heads' vocabulary matrices")
        if config.draft_vocab_size is not None and not (reduced and self.shared):
            others = "; --full_vocabulary lets them draft every token" if self.shared else ""
            raise ValueError(
                f"{engine} cannot hold these heads' reduced vocabulary of "
                f"{config.draft_vocab_size} tokens{others}"
            )

    def with_own_matrices(self) -> dict[str, Tensor]:
        """The heads' tensors, each head with a vocabulary matrix: a copy of what they share."""
        tensors = dict(self.stored.tensors)
        if self.shared:
            matrix_VD = self.matrix_VD()
            for i in range(self.config.num_heads):
                tensors[f"{i}.{self.config.num_layers}.weight"] = matrix_VD.clone()
        return tensors

    def over_full_vocabulary(self) -> Outgoing:
        """Heads that draft every token of the target's: those they were not trained to draft, too.

        Raises:
            ValueError: they have matrices of their own, without rows for other tokens.
        """
        if self.config.draft_vocab_size is None:
            return self
        if not self.shared:
            raise ValueError(
                "heads with a reduced vocabulary and matrices of their own have no rows for other "
                "tokens: train them without draft_vocab_size"
            )
        tensors = {name: t for name, t in self.stored.tensors.items() if name != DRAFT_TOKENS}
        stored = replace(
            self.stored, config=replace(self.config, draft_vocab_size=None), tensors=tensors
        )
        notice = (
            f"the heads learnt to draft {self.config.draft_vocab_size} tokens and now draft all "
            f"{self.config.vocab_size}: other drafts, never other text"
        )
        return Outgoing(stored, self.matrix_VD, [*self.notices, notice])


def save(folder: Path, file: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write tensors as the suffix of `file` says, and config.json beside them.

    Raises:
        OSError: the folder cannot be written.
    """
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if file.endswith(".safetensors"):
        from safetensors.torch import save_file

        save_file(contiguous, folder / file, metadata={"format": "pt"})
    else:
        torch.save(contiguous, folder / file)
    text = json.dumps(config, indent=2) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
