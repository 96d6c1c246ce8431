"""Drafts from a small language model of the same vocabulary: the chain of its own likeliest tokens,
or its likeliest tree.

Drafts are chosen, not drawn, so sample-then-match verifies them without loss, also where the target
samples.

Shapes: B active rows, F paths, J tokens of a path, R ranks, V vocabulary.
Source: Leviathan et al. 2022, "Fast inference from transformers via speculative decoding",
arXiv:2211.17192; trees in the manner of EAGLE-2 (Li et al. 2024, arXiv:2406.16858, section 4.1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.inference.drafters.model.drafted_text import drafted_text
from medusa_heads.inference.engine.capability import capability
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.dynamic_tree import DYNAMIC_RANKS, best_first_tree
from medusa_heads.trees.tree import TokenTree, TreeShape, cartesian_choices

if TYPE_CHECKING:
    from medusa_heads.inference.engine.state import DecodingState


class DraftModelDrafter:
    """A chain of `depth` tokens, or at `width` above 1 the best tree of `num_drafted` nodes.

    A tree is grown level by level: the `width` likeliest paths of a level are read by the draft
    model together; of all that they offer next, the likeliest nodes are proposed.

    Args:
        draft: the draft model, frozen; its token ids are the target's.
        vocab_size: of the target; where the draft's vocabulary matrix is padded to more rows, those
            are left out.
        depth: levels, and so forwards of the draft model a step.
        width: paths read together.
        num_drafted: nodes besides the root; `depth` for a chain.

    Raises:
        ValueError: a size below 1, or a tree of more nodes than the draft model will offer.
        UnsupportedArchitecture: the draft model cannot go back on what it has read, or reads only
            chains and a tree was asked for.
    """

    reads_prompt = False

    def __init__(
        self,
        draft: TargetModel,
        vocab_size: int,
        *,
        depth: int = 4,
        width: int = 1,
        num_drafted: int | None = None,
    ) -> None:
        if depth < 1 or width < 1:
            raise ValueError(
                f"drafts are at least 1 token deep and wide, got depth {depth} and width {width}"
            )
        chain_only = capability(draft) == "chain"
        if chain_only and width > 1:
            raise UnsupportedArchitecture(
                f"the draft model ({draft.config.model_type}) reads one path at a time",
                "let it draft a chain",
            )
        self._ranks = min(DYNAMIC_RANKS, vocab_size) if width > 1 else 1
        most, read = 0, 1
        for _ in range(depth):
            offered = read * self._ranks
            most, read = most + offered, min(width, offered)
        num_drafted = depth * width if num_drafted is None else num_drafted
        if not 1 <= num_drafted <= most:
            raise ValueError(
                f"a tree of depth {depth} and width {width} has 1 to {most} nodes, "
                f"got {num_drafted}"
            )
        self._draft = draft
        self._vocab_size = vocab_size
        self._depth, self._width, self._num_drafted = depth, width, num_drafted
        self._chain = TreeShape(cartesian_choices([1] * depth))

    @property
    def num_nodes(self) -> int:
        """Nodes of every proposed tree, the root included."""
        return self._num_drafted + 1

    def propose(self, state: DecodingState) -> TokenTree:
        """The draft model's likeliest continuation of every active row."""
        text = drafted_text(self._draft, state, self)
        device = state.roots_B.device
        logits_BFV = text.catch_up(state)[:, None]
        seen_BFJ: Tensor | None = None

        def guess(level: int, paths_BFJ: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal logits_BFV, seen_BFJ
            if seen_BFJ is not None:
                # No two paths are alike, so a path's beginning says which node it hangs below.
                begins_BFF = (paths_BFJ[:, :, None, :-1] == seen_BFJ[:, None]).all(dim=-1)
                logits_BFV = text.write(paths_BFJ[..., -1], begins_BFF.int().argmax(-1), level)
            seen_BFJ = paths_BFJ
            tokens_BFR, log_probs_BFR = self._candidates(logits_BFV)
            return tokens_BFR.to(device), log_probs_BFR.to(device)

        if self._width > 1:
            return best_first_tree(
                state.roots_B, guess, self._num_drafted, self._depth, self._width
            )
        tokens = [state.roots_B[:, None]]
        log_probs = [torch.zeros(len(state.rows), 1, device=device)]
        for level in range(self._depth):
            tokens_B11, log_probs_B11 = guess(level, torch.cat(tokens, dim=1)[:, None])
            tokens.append(tokens_B11[:, 0])
            log_probs.append(log_probs_B11[:, 0])
        return self._chain.tree(torch.cat(tokens, dim=1), torch.cat(log_probs, dim=1))

    def _candidates(self, logits_BFV: Tensor) -> tuple[Tensor, Tensor]:
        """Each node's likeliest next tokens, with their log-probabilities."""
        logits_BFV = logits_BFV[..., : self._vocab_size].float()
        best_BFR, tokens_BFR = logits_BFV.topk(self._ranks, dim=-1)
        return tokens_BFR, best_BFR - logits_BFV.logsumexp(dim=-1, keepdim=True)
