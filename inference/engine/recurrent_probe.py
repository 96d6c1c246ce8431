"""What a target makes of chains behind a recurrent state, read in every way that decoding takes.

Shapes: P paths, T tokens, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.inference.engine.probe import Probe, Prober, Trial, relative_error
from medusa_heads.inference.engine.recurrent import RecurrentState
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.tree import TokenTree


class RecurrentProber(Prober):
    """Verifies small chains from a state that is put back after each of them.

    Two chains that follow one another are read a token at a time, as generate() reads them; then
    the second one behind the first, as where all of that was accepted; and both in one forward, as
    where the first one is read again.

    Raises:
        UnsupportedArchitecture: the target keeps its state elsewhere.
    """

    _state: RecurrentState

    def __init__(self, target: TargetModel) -> None:
        super().__init__(target)
        if not self._state.cache.holds_something():
            raise UnsupportedArchitecture(
                f"{target.config.model_type} does not keep its state in the cache it is given"
            )

    @torch.no_grad()
    def probe(self, trial: Trial) -> Probe:
        found, shape = super().probe(trial), trial.shape
        nodes, row = shape.num_nodes, self._state.rows[0]
        chains = [shape.tree(of[:, :nodes]) for of in (self._nodes_1N, self._others_1N)]
        tokens_1T = torch.cat([chain.tokens_BN for chain in chains], dim=1)
        alone_NV = self._read(tokens_1T)[0]
        together = [self._in_turn(chains)]
        row.tokens = tokens_1T[0, : nodes + 1].tolist()
        together.append(self._in_turn(chains[1:]))
        row.tokens = []
        errors = [relative_error(logits_TV[-nodes:], alone_NV[-nodes:]) for logits_TV in together]
        return replace(found, error=max(found.error, *errors))

    def _read(self, paths_PT: Tensor) -> Tensor:
        """Logits [P, T, V] of these tokens behind the text, read one at a time."""
        paths = [[TokenTree.root_only(token) for token in path_T[:, None]] for path_T in paths_PT]
        return torch.stack([self._in_turn(path) for path in paths])

    def _in_turn(self, chains: Sequence[TokenTree]) -> Tensor:
        """Logits [T, V] of all nodes of these chains, each of which goes on from the one before."""
        state, before = self._state, self._state.lengths
        state.cache.hold()
        logits = []
        for chain in chains:
            logits.append(state.verify(self._target, chain)[0].float())
            state.lengths = [state.lengths[0] + chain.num_nodes]
        state.lengths = before
        state.forget()
        return torch.cat(logits)
