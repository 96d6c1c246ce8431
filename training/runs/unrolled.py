"""A target's multi-token-prediction modules, run over whole texts as drafting runs them.

Depth i (counted from 0) predicts token t + 2 + i. The first depths are those of the modules; behind
them the last module reads what itself has put out, at the next position: of the text it sees what
it read of it in its own depth, and of later depths its own chain alone.

Shapes: B batch, T tokens, S slots, R rows, K depths, D hidden, E = K * D.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from medusa_heads.config import HeadsConfig
from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.heads import DraftHeads
from medusa_heads.heads.chains import Chains
from medusa_heads.target.attention import SUPPORTED_ATTENTION, TreeMask, tree_attention
from medusa_heads.target.mtp import own_parts
from medusa_heads.target.target import TargetModel


class UnrolledModules(DraftHeads):
    """Modules that learn, in fp32 and in place, as heads of so many depths; they share the target's
    lm_head and embeddings. Raises ValueError: fewer depths than modules; UnsupportedArchitecture:
    the target's attention takes no mask."""

    kind = "medusa"  # as their labels are

    def __init__(self, modules: Any, target: TargetModel, depths: int | None = None) -> None:
        depths = check_depths(modules, depths)
        if modules.config._attn_implementation not in SUPPORTED_ATTENTION:
            raise UnsupportedArchitecture(
                f"attention implementation {modules.config._attn_implementation!r} takes no mask "
                "of chains",
                "load the target with attn_implementation='sdpa'",
            )
        sizes = target.hidden_size, target.vocab_size
        super().__init__(HeadsConfig(num_heads=depths).for_target(*sizes))
        self.share(target)
        self.own = own_parts(modules)
        self._dtypes = {name: tensor.dtype for name, tensor in self.own.state_dict().items()}
        self.own.float().requires_grad_(True)
        self._limit = target.max_positions
        # In a tuple, because embeddings and lm_head are no part of what learns.
        self._modules_of = (modules,)

    def _blocks(self, head: int) -> list[nn.Module]:
        return []

    def encoder(self) -> nn.Module:
        return self.own

    def encode(
        self, hidden_BTD: Tensor, input_ids_BT: Tensor, position_ids_BT: Tensor | None = None
    ) -> Tensor:
        """What comes out of every depth at every position, [B, T, E]; see DraftHeads."""
        modules, dtype = self._modules_of[0], next(self.own.parameters()).dtype
        last, hidden_BTD = len(modules.layers) - 1, hidden_BTD.to(dtype)
        chains, cache = Chains(input_ids_BT, position_ids_BT), DynamicCache()
        read: list[Tensor] = []  # where what the modules have read stands, and what came out
        out: list[Tensor] = []
        for depth in range(self.config.num_heads):
            module = min(depth, last)
            again = depth - module
            positions_BT = chains.positions_BT.expand_as(input_ids_BT) + depth + 1
            if self._limit is not None:
                positions_BT = positions_BT.clamp_max(self._limit - 1)
            mask = TreeMask(
                chains.visible(again).expand(len(input_ids_BT), -1, -1),
                positions_BT,
                again * input_ids_BT.shape[1],
                written_positions_BP=torch.cat(read[last:], dim=1) if again else None,
            )
            with torch.no_grad():
                embedded_BTD = modules.embed_tokens(chains.following(depth)).to(dtype)
            with tree_attention(mask):
                hidden_BTD = modules.forward_layer(
                    module, hidden_BTD, positions_BT, cache, inputs_embeds=embedded_BTD
                )
            read.append(positions_BT)
            out.append(hidden_BTD)
        return torch.cat(out, dim=-1)

    def features(self, hidden_RE: Tensor, tokens_RK: Tensor | None = None) -> Tensor:
        """See DraftHeads: what `encode` has made of each depth."""
        return hidden_RE.unflatten(-1, (self.config.num_heads, -1))

    def restore_dtypes(self) -> None:
        """Back to the dtypes in which the modules came."""
        weights = self.own.state_dict()
        rounded = {name: weights[name].to(dtype) for name, dtype in self._dtypes.items()}
        self.own.load_state_dict(rounded, assign=True)
        self.own.requires_grad_(False)


def check_depths(modules: Any, depths: int | None) -> int:
    """How many depths modules are trained in, by default as many as they are. Raises ValueError:
    fewer."""
    count = len(modules.layers)
    if depths is not None and depths < count:
        raise ValueError(
            f"mtp_depth must be at least {count}, as many as the target has modules, got {depths}"
        )
    return depths or count
