"""What heads and their trees take beside the target, in bytes.

Shapes: B batch, T tokens, N tree nodes, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from medusa_heads.heads import DraftHeads
from medusa_heads.target.target import TargetModel


def memory_overhead(
    target: TargetModel, heads: DraftHeads, nodes: int, batch_size: int = 1
) -> dict[str, int]:
    """Bytes of each part.

    Args:
        target: the target.
        heads: attached to it.
        nodes: drafted nodes of a tree; its root is what plain decoding would run as well.
        batch_size: rows that draft a tree each.

    Returns:
        `target`: the target's weights. `heads`: theirs, with the second copy of their blocks that
        medusa heads keep in one piece while they decode, with the rows of the vocabulary matrix
        that a reduced vocabulary copies, and with the preview of a large one. `cache_per_token`:
        the target's keys and values of one token; `prefix_per_token`: those of the heads' own
        layer, if they have one. `tree_cache`: the rows of all drafted nodes, held until the walk
        has dropped most of them. `tree_logits`: the target's logits of these nodes, for as long as
        a step takes.
    """
    per_token = cache_bytes_per_token(target)
    drafted = nodes * batch_size
    return {
        "target": _bytes(target.model.parameters()),
        "heads": _heads_bytes(heads),
        "cache_per_token": per_token,
        "prefix_per_token": _prefix_bytes_per_token(heads),
        "tree_cache": drafted * per_token,
        "tree_logits": drafted * target.vocab_size * target.dtype.itemsize,
    }


@torch.inference_mode()
def cache_bytes_per_token(target: TargetModel) -> int:
    """Of the keys and values in all layers, seen on a token that the target really reads."""
    cache = target.new_cache()
    ids_BT = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    target.hidden(ids_BT, cache=cache)
    held: list[Any] = [side for layer in cache.row_layers for side in (layer.keys, layer.values)]
    return _bytes(side for side in held if side is not None)


def _heads_bytes(heads: DraftHeads) -> int:
    total = _bytes(heads.parameters())
    if heads.kind == "medusa":
        blocks = (name for name, _ in heads.named_parameters() if ".linear." in name)
        total += _bytes(heads.get_parameter(name) for name in blocks)
    if heads.draft_tokens is not None and heads.config.vocab_matrix == "shared":
        total += _bytes([heads.vocab_matrix(0)[0]])
    return total + _bytes(tensor for preview in heads.previews or () for tensor in preview.held)


def _prefix_bytes_per_token(heads: DraftHeads) -> int:
    if heads.prefix is None:
        return 0
    assert heads.config.hidden_size is not None
    return 2 * heads.config.hidden_size * heads.prefix.dtype.itemsize


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
