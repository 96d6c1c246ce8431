"""A draft model on disk: an ordinary transformers folder, and beside it a file that says whose
drafts it makes.

config.json, model.safetensors, tokenizer files   what transformers reads, and writes
draft_model.json                                  target fingerprint, measured figures, provenance
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from medusa_heads.checkpoint.checkpoint import vouch
from medusa_heads.checkpoint.files import filled, read_record
from medusa_heads.contents import DRAFT_FILE
from medusa_heads.target.loading import find_tokenizer
from medusa_heads.target.target import TargetModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def save_draft(
    folder: str | os.PathLike[str],
    draft: PreTrainedModel,
    target: TargetModel,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    measured: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Path:
    """Write a draft model in the target's dtype, beside its place first and then renamed, file by
    file."""
    folder = Path(folder)
    stored: Any = copy.deepcopy(draft).to(target.dtype)  # type: ignore[arg-type]
    with filled(folder, DRAFT_FILE) as made:
        stored.save_pretrained(made)
        if tokenizer is not None:
            tokenizer.save_pretrained(made)
        vouch(made / DRAFT_FILE, folder, target, measured, provenance)
    return folder


def read_draft_sidecar(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What `save_draft` wrote beside the model. Raises ValueError: there is none, or it cannot be
    read."""
    path = Path(folder) / DRAFT_FILE
    if not path.is_file():
        raise ValueError(
            f"the draft model {str(folder)!r} does not name its target (it has no {DRAFT_FILE}): "
            "pass target= (--target)"
        )
    return read_record(path, needed=("target", "measured", "provenance"))


def load_draft(
    name_or_path: str | os.PathLike[str],
    target: TargetModel,
    *,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> TargetModel:
    """Load a causal LM that is to draft for the target, on its device, by default in its dtype.
    Raises ValueError: nothing loadable."""
    return TargetModel.from_pretrained(
        str(name_or_path), dtype=dtype or target.dtype, device=target.device, **options
    )


def check_vocabulary(draft: TargetModel, target: TargetModel) -> None:
    """The draft model's token ids must be the target's, as a loss over both distributions needs it.
    Vocabulary matrices may be padded to different sizes (as those of Qwen2.5 are) if the tokenizers
    are known and equal. Raises ValueError: they are not."""
    own, others = (find_tokenizer(model.name_or_path, model.revision) for model in (draft, target))
    if same_vocabulary(draft, target, own, others):
        return
    if own is not None and others is not None:
        raise ValueError(
            f"the draft model {draft.name_or_path!r} has another vocabulary ({len(own)} tokens) "
            f"than the target {target.name_or_path!r} ({len(others)} tokens): give one with the "
            "target's tokenizer"
        )
    raise ValueError(
        f"the draft model has a vocabulary of {draft.vocab_size} tokens, the target one of "
        f"{target.vocab_size}: give one with the target's tokenizer"
    )


def same_vocabulary(
    draft: TargetModel,
    target: TargetModel,
    own: PreTrainedTokenizerBase | None,
    others: PreTrainedTokenizerBase | None,
) -> bool:
    """Whether the draft model's token ids are the target's, by their tokenizers; where one is not
    known, by the sizes of the vocabulary matrices."""
    if own is None or others is None:
        return draft.vocab_size == target.vocab_size
    return own.get_vocab() == others.get_vocab()
