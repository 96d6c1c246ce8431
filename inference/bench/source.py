"""What a benchmark was given to measure: heads with their target, or a target alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from medusa_heads.contents import is_draft, is_model
from medusa_heads.files import expanded
from medusa_heads.hub.names import split_revision
from medusa_heads.hub.pull import find_checkpoint
from medusa_heads.inference.bench.methods import Models
from medusa_heads.inference.lookup.corpus_files import find_corpus
from medusa_heads.inference.models.drafted import load_drafts
from medusa_heads.inference.models.medusa import MedusaModel
from medusa_heads.inference.models.named_target import load_target, named_target


@dataclass(frozen=True)
class Source:
    """Where heads lie, if there are any, and their target: hub id or path, perhaps with a revision,
    or None for the one that the heads name."""

    checkpoint: Path | None
    target: str | None

    def target_name(self, *, trust_remote_code: bool = False) -> tuple[str, str | None]:
        """Hub id or path of the target, and a hub id's revision; see `named_target`. Raises
        ValueError: the heads name none, or code of what they name would be run."""
        if self.target is not None:
            return split_revision(self.target)
        assert self.checkpoint is not None
        return named_target(self.checkpoint, trust_remote_code=trust_remote_code)


def find_source(name: str | os.PathLike[str], target: str | None, *, heads: bool) -> Source:
    """Tell a heads checkpoint from a target, by the folder or hub id of either; where heads are to
    be measured, nothing else will do. `target` is another than the one that the heads name. Raises
    ValueError: neither stands there, or a draft model does."""
    folder = expanded(name)
    if is_draft(folder):
        raise ValueError(
            f"{str(name)!r} is a draft model: name its target first, and this as --draft_model"
        )
    if not is_model(folder):
        try:
            return Source(find_checkpoint(name), target)
        except ValueError:
            # A hub's name may be a target's, which is found out when it is loaded.
            if heads or folder.exists():
                raise
    if target is not None:
        raise ValueError(
            f"{str(name)!r} is taken for the target, as it holds no heads: leave out --target"
        )
    return Source(None, str(folder) if folder.exists() else str(name))


def load_models(
    source: Source,
    draft_models: Sequence[str] = (),
    corpus: str | os.PathLike[str] | None = None,
    *,
    dtype: torch.dtype,
    **options: Any,
) -> Models:
    """Target and heads, draft models, and the index of a file or folder of text, in one dtype.

    Further options are `device` and `trust_remote_code`. Raises ValueError: one of them is missing,
    damaged, or does not fit the target."""
    medusa = None
    if source.checkpoint is not None:
        medusa = MedusaModel.from_pretrained(
            source.checkpoint,
            target=source.target,
            tree="none",
            dtype=dtype,
            compile=False,
            **options,
        )
        target = medusa.target
    else:
        assert source.target is not None
        target = load_target(source.target, source.target, dtype=dtype, **options)
    trusted = bool(options.get("trust_remote_code"))
    index = find_corpus(corpus, target, trust_remote_code=trusted)
    drafts = load_drafts(draft_models, target, trust_remote_code=trusted)
    return Models(target, medusa, tuple(drafts), index)
