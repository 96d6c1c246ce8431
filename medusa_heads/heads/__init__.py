"""The kinds of heads, one file each, and the registry that finds them by name."""

from __future__ import annotations

from torch import Tensor

from medusa_heads.config import HeadsConfig
from medusa_heads.heads.base import DraftHeads, product_dtype
from medusa_heads.heads.block import BlockHeads
from medusa_heads.heads.decoder import DecoderHeads
from medusa_heads.heads.eagle3 import Eagle3Heads
from medusa_heads.heads.hydra import HydraHeads
from medusa_heads.heads.medusa import MedusaHeads
from medusa_heads.heads.vocabulary import HasVocabulary, frequent_tokens

__all__ = [
    "KINDS",
    "BlockHeads",
    "DecoderHeads",
    "DraftHeads",
    "Eagle3Heads",
    "HasVocabulary",
    "HydraHeads",
    "MedusaHeads",
    "frequent_tokens",
    "new_heads",
    "product_dtype",
]

KINDS: dict[str, type[DraftHeads]] = {
    cls.kind: cls for cls in (MedusaHeads, HydraHeads, BlockHeads, Eagle3Heads)
}


def new_heads(
    target: HasVocabulary, config: HeadsConfig | None = None, draft_tokens: Tensor | None = None
) -> DraftHeads:
    """Fresh heads of the kind that `config` names; see `DraftHeads.from_target`."""
    config = config or HeadsConfig()
    return KINDS[config.kind].from_target(target, config, draft_tokens)
