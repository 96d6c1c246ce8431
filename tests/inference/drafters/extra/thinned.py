"""A target some of whose layers change little, and what drafts without them say."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from medusa_heads.inference.drafters.extra.early_exit import ThinnedTarget
from medusa_heads.inference.drafters.extra.layer_stack import LayerStack
from medusa_heads.inference.engine.rows import Row, StopCheck
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.target.target import TargetModel
from tests.conftest import DEVICE, TinyLlama

STEPS = {1: 1.0, 2: 1.02, 4: 1.04, 8: 1.1, 16: 1.2}  # seconds by tokens: drafting pays


def layered(tiny_llama: TinyLlama) -> Any:
    """Five layers; from the third on they change little, so that drafts without them are often
    right."""
    made = tiny_llama(num_layers=5, vocab_size=24)
    with torch.no_grad():
        for layer in made.model.layers[2:]:
            layer.self_attn.o_proj.weight *= 0.1
            layer.mlp.down_proj.weight *= 0.1
    return made.to(DEVICE)


def read_state(target: TargetModel, ids_BT: Tensor, mask_BT: Tensor) -> DecodingState:
    """All but the last token of every row in the cache, as decoding would have it."""
    stop, batch = StopCheck(StoppingCriteriaList()), len(ids_BT)
    prompts = [Row(i, batch, ids_T[:-1], stop) for i, ids_T in enumerate(ids_BT)]
    padding = (1 - mask_BT).sum(1)
    cache = target.new_cache(batch)
    slots_T = torch.arange(ids_BT.shape[1] - 1, device=ids_BT.device)
    positions_BT = (slots_T - padding[:, None]).clamp_min(0)
    target.hidden(ids_BT[:, :-1], mask_BT[:, :-1], positions_BT, cache=cache)
    state = DecodingState(prompts, cache, padding.tolist())
    state.roots_B = ids_BT[:, -1]
    return state


def drafted(target: TargetModel, state: DecodingState, skipped: Sequence[int], n: int) -> list[Any]:
    """Each row's next n tokens, level by level."""
    thinned = ThinnedTarget(target, LayerStack(target), skipped)
    with closing(thinned.continuation(state)) as continuation:
        return [[row[0] for row in tokens] for tokens, _ in islice(continuation, n)]
