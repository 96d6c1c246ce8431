"""Drafts drawn from a draft model: a chain, or a tree of several different tokens behind each node.

A drawn token is accepted with the whole overlap of both models' distributions, sum min(p, q), a
chosen one with p of that token alone. Each sibling is a second chance at what the first one missed.

Shapes: B active rows, F nodes of a level, J tokens of a path behind the committed text, R children,
V vocabulary.
Source: Leviathan et al. 2022, arXiv:2211.17192, algorithm 1; siblings without putting back: Jeon et
al. 2024, "Recursive speculative decoding", arXiv:2402.14160, with a constant branching a level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.inference.drafters.model.drafted_text import drafted_text
from medusa_heads.inference.drafters.model.drawing import draft_probs, draw_different
from medusa_heads.inference.engine.capability import capability
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.tree import TokenTree, TreeShape, cartesian_choices

if TYPE_CHECKING:
    from medusa_heads.inference.engine.state import DecodingState


class SampledTreeDrafter:
    """A tree with `branching[i]` tokens behind every node of level i, drawn where the target's are
    drawn, under the same warpers; where they are not, the likeliest.

    Each level is one forward of the draft model, however wide it is.

    Args:
        draft: the draft model, frozen; its token ids are the target's.
        vocab_size: of the target.
        branching: children of each node, by level; ones make a chain.

    Raises:
        ValueError: no level, or a number of children below 1 or above the vocabulary.
        UnsupportedArchitecture: the draft model cannot go back on what it has read, or reads only
            chains and a tree was asked for.
    """

    reads_prompt = False

    def __init__(self, draft: TargetModel, vocab_size: int, branching: Sequence[int]) -> None:
        if not branching or min(branching) < 1 or max(branching) > vocab_size:
            raise ValueError(
                f"every level of a drawn tree has 1 to {vocab_size} tokens behind each node, got "
                f"{list(branching)}"
            )
        chain_only = capability(draft) == "chain"
        if chain_only and max(branching) > 1:
            raise UnsupportedArchitecture(
                f"the draft model ({draft.config.model_type}) reads one path at a time",
                "let it draft a chain",
            )
        self._draft, self._vocab_size, self._branching = draft, vocab_size, list(branching)
        # In the order of the levels, as the nodes are drafted.
        self._shape = TreeShape(cartesian_choices(self._branching))

    @property
    def num_nodes(self) -> int:
        """Nodes of every proposed tree, the root included."""
        return self._shape.num_nodes

    def propose(self, state: DecodingState) -> TokenTree:
        """The draft model's own tokens for every active row."""
        text = drafted_text(self._draft, state, self)
        device = state.roots_B.device
        paths_BFJ = state.roots_B[:, None, None][..., :0]
        logits_BFV = text.catch_up(state)[:, None]
        tokens = [state.roots_B[:, None]]
        log_probs = [torch.zeros(len(state.rows), 1, device=device)]
        drawn_from: dict[int, Tensor] = {}
        for level, children in enumerate(self._branching):
            if level:
                nodes_F = torch.arange(paths_BFJ.shape[1], device=device)
                above_BF = (nodes_F // self._branching[level - 1]).expand(len(state.rows), -1)
                logits_BFV = text.write(paths_BFJ[..., -1], above_BF, level)
            probs_BFV = draft_probs(
                logits_BFV.to(device), paths_BFJ, state.rows, state.warpers, self._vocab_size
            )
            if state.warpers is None:
                tokens_BFR = probs_BFV.topk(children, dim=-1).indices
            else:
                tokens_BFR = draw_different(probs_BFV, children)
                first = self._shape.depth.index(level)
                drawn_from |= {first + f: probs_BFV[:, f] for f in range(probs_BFV.shape[1])}
            tokens_BF = tokens_BFR.flatten(1)
            above_BFJ = paths_BFJ.repeat_interleave(children, dim=1)
            paths_BFJ = torch.cat([above_BFJ, tokens_BF[..., None]], dim=2)
            tokens.append(tokens_BF)
            log_probs.append(probs_BFV.gather(2, tokens_BFR).flatten(1).log())
        tree = self._shape.tree(torch.cat(tokens, dim=1), torch.cat(log_probs, dim=1))
        return replace(tree, drawn_from=drawn_from)
