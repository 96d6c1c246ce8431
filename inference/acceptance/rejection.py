"""The exact rule for drafts that were drawn: each is kept with the chance that the target's
distribution gives it over the draft's, and what is lost so is made up by the rest.

Shapes: B active rows, N tree nodes, V vocabulary.
Source: Leviathan et al. 2022, "Fast inference from transformers via speculative decoding",
arXiv:2211.17192, algorithm 1; Chen et al. 2023, arXiv:2302.01318. Over several siblings: Miao et
al. 2023, "SpecInfer", arXiv:2305.09781, section 4.3; drawn without putting back: Jeon et al. 2024,
"Recursive speculative decoding", arXiv:2402.14160.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_heads.inference.acceptance.lossless import SampleThenMatch
from medusa_heads.inference.engine.rows import Row
from medusa_heads.trees.tree import TokenTree


class RejectionSampling(SampleThenMatch):
    """Exact for drafts of both kinds: below nodes whose children were drawn, recursive rejection;
    below all others, and where no token is drawn, sample-then-match.

    A drawn token x is kept with probability min(1, p(x) / q(x)); else the token comes from what p
    has above q, the positive part of p - q. Both ways together give every token exactly p: x is
    kept in min(p, q) of all cases, and the rest of p is what a rejection draws from. With several
    siblings that rest is put to the next of them, and only after the last one drawn from. Siblings
    differ, so the second was drawn from q without the first one's token, and so on.

    Committed text follows the target's distribution, but not generate()'s random numbers: the same
    seed gives other text of the same law. By keyed noise nothing is rejected: what it draws it
    draws whatever was drafted, and so drafters choose what it is about to draw.
    """

    def __call__(self, tree: TokenTree, logits_BNV: Tensor, rows: Sequence[Row]) -> list[list[int]]:
        if not self._do_sample or self.noise is not None or not tree.drawn_from:
            return super().__call__(tree, logits_BNV, rows)
        tokens, parents = torch.stack([tree.tokens_BN, tree.parents_BN]).tolist()
        return [
            [] if row.done else self._walk_drawn(tree, tokens[b], parents[b], logits_BNV[b], row, b)
            for b, row in enumerate(rows)
        ]

    def _walk_drawn(
        self,
        tree: TokenTree,
        tokens: Sequence[int],
        parents: Sequence[int],
        logits_NV: Tensor,
        row: Row,
        b: int,
    ) -> list[int]:
        path = [0]
        while True:
            node = path[-1]
            p_V = torch.softmax(self._scores(logits_NV, row, node)[0], dim=-1)
            children = [n for n in range(node + 1, len(tokens)) if parents[n] == node]
            drafted = [tokens[child] for child in children]
            if node in tree.drawn_from:
                token, place = self._keep(p_V, tree.drawn_from[node][b].to(p_V.device), drafted)
            else:
                token = int(torch.multinomial(p_V, num_samples=1))
                place = drafted.index(token) if token in drafted else None
            if row.watch is not None:
                row.watch(logits_NV[node], token)
            if row.commit(token) or place is None:
                return path
            path.append(children[place])

    def _keep(self, p_V: Tensor, q_V: Tensor, drawn: Sequence[int]) -> tuple[int, int | None]:
        """The next token, and which of the drawn ones it is, if any."""
        for place, token in enumerate(drawn):
            if not q_V[token] > 0:
                break  # q has fewer tokens than siblings: the rest of them were never drawn
            q_V = q_V / q_V.sum()
            if torch.rand((), device=p_V.device) * q_V[token] < p_V[token]:
                return token, place
            rest_V = (p_V - q_V).clamp_min(0)
            # Equal but for rounding leaves nothing, and p is then as good as its rest.
            p_V = rest_V / rest_V.sum() if rest_V.sum() > 0 else p_V
            q_V = q_V.index_fill(0, torch.tensor([token], device=q_V.device), 0.0)
        return int(torch.multinomial(p_V, num_samples=1)), None
