"""Drafters whose memory of the text is compared with the text itself at every step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from medusa_heads import HeadsConfig, TargetModel, new_heads
from medusa_heads.heads import DraftHeads
from medusa_heads.inference.drafters.prefix import encoded_hidden
from medusa_heads.inference.engine.decoding import decode
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.trees.tree import TokenTree
from tests.conftest import DEVICE
from tests.inference.planted import PlantedDrafter

TOLERANCE: Any = {"atol": 1e-5, "rtol": 1e-5} if DEVICE == "cpu" else {"atol": 2e-4, "rtol": 1e-3}


def random_heads(model: Any, **config: Any) -> DraftHeads:
    size = config.get("draft_vocab_size")
    vocab_size = len(model.get_output_embeddings().weight)
    tokens_V = None if size is None else torch.randperm(vocab_size)[:size]
    heads = new_heads(model, HeadsConfig(num_heads=3, **config), tokens_V)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in heads.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.add_(noise.to(parameter.device))
    return heads


class RereadingDrafter(PlantedDrafter):
    """Compares at every step what heads read with what they read of the whole text, which a target
    with their features reads anew."""

    def __init__(self, heads: DraftHeads, target: TargetModel, *args: Any) -> None:
        super().__init__(*args)
        self.reads_prompt = heads.config.prefix_attention
        self.heads, self.target = heads, target.with_features(heads.config.features)
        self.compared = 0

    def propose(self, state: DecodingState) -> TokenTree:
        encoded_BD = encoded_hidden(self.heads, state)
        for b, row in enumerate(state.rows):
            if row.done:  # it stays in a compiled batch, and nobody reads what is made of it
                continue
            ids_1T = row.ids_1T()[:, state.padding[b] :]
            hidden_1TX = self.target.hidden(ids_1T[:, :-1])
            expected_1TD = self.heads.encode(F.pad(hidden_1TX, (0, 0, 0, 1)), ids_1T)
            torch.testing.assert_close(encoded_BD[b], expected_1TD[0, -2], **TOLERANCE)
            self.compared += 1
        return super().propose(state)


def run(target: TargetModel, drafter: Any, _model: Any, input_ids: Tensor, **kwargs: Any) -> Any:
    kwargs.pop("synced_gpus", None)
    return decode(target, drafter, input_ids, **kwargs)
