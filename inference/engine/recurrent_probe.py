"""What a target makes of chains behind a recurrent state, read in every way that decoding takes.

Shapes: B rows, P paths, T tokens, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from medusa_heads.agreement import relative_error
from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.inference.engine.probe import Probe, Prober, Trial
from medusa_heads.inference.engine.recurrent import RecurrentState, decoding_state
from medusa_heads.inference.engine.rows import Row, StopCheck
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.tree import TokenTree, chain_shape


class RecurrentProber(Prober):
    """Verifies small chains from a state that is put back after each of them. Two chains that
    follow one another are read a token at a time, as generate() reads them; then the second one
    behind the first, as where all of that was accepted; and both in one forward, as where the first
    one is read again. Raises UnsupportedArchitecture: the target keeps its state elsewhere."""

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


_PROMPT, _PADDED, _NODES = 24, 5, 4
# Accepted nodes of two rows, step by step: neither stays behind the other, and either goes ahead.
_ACCEPTED = ((4, 2), (1, 2), (2, 4))


class BatchProber:
    """Verifies chains of two rows, which accept unequal numbers of drafts, and compares them with
    each row alone.

    Args:
        target: a target with a recurrent state.
        padded: the second row's prompt is shorter, and padded on the left.
    """

    def __init__(self, target: TargetModel, *, padded: bool) -> None:
        self._target = target
        self._padding = [0, _PADDED if padded else 0]
        length = _PROMPT + sum(max(step) for step in _ACCEPTED) + _NODES
        random = torch.Generator().manual_seed(0)
        ids_BT = torch.randint(target.vocab_size, (2, length), generator=random, device="cpu")
        self._ids_BT = ids_BT.to(target.device)

    @torch.no_grad()
    def probe(self) -> Probe:
        """How far what the rows make of each other is from what each makes alone."""
        state = self._read([0, 1], self._padding)
        written: list[list[Tensor]] = [[], []]
        for counts in _ACCEPTED:
            starts = [_PROMPT + len(row.tokens) - 1 for row in state.rows]
            ids_BN = torch.stack(
                [self._ids_BT[b, start : start + _NODES] for b, start in enumerate(starts)]
            )
            logits_BNV = state.verify(self._target, chain_shape(_NODES).tree(ids_BN))
            for b, count in enumerate(counts):
                written[b].append(logits_BNV[b, :count].float())
                end = starts[b] + count + 1
                state.rows[b].tokens = self._ids_BT[b, _PROMPT:end].tolist()
            state.keep([range(count) for count in counts])
        errors = []
        for b, logits in enumerate(written):
            alone_TV = self._alone(b, sum(map(len, logits)))
            errors.append(relative_error(torch.cat(logits), alone_TV))
        return Probe(max(errors), leak=0.0, effect=1.0)

    def _alone(self, b: int, tokens: int) -> Tensor:
        """Logits [T, V] of so many tokens of one row, without the other and without padding."""
        state = self._read([b], [0], skipped=self._padding[b])
        ids_1T = self._ids_BT[b : b + 1, _PROMPT : _PROMPT + tokens]
        return state.verify(self._target, chain_shape(tokens).tree(ids_1T))[0].float()

    def _read(self, batch: list[int], padding: list[int], skipped: int = 0) -> RecurrentState:
        """Where decoding stands behind the prompts of these rows, their first tokens skipped."""
        prompts_BT = self._ids_BT[batch, skipped:_PROMPT]
        positions_BT = torch.arange(prompts_BT.shape[1], device=prompts_BT.device)
        positions_BT = positions_BT - positions_BT.new_tensor(padding)[:, None]
        cache = self._target.new_cache(len(batch), self._ids_BT.shape[1] + _NODES)
        hidden_BTD = self._target.hidden(
            prompts_BT, (positions_BT >= 0).long(), positions_BT.clamp_min(0), cache
        )
        stop = StopCheck(StoppingCriteriaList())
        rows = [Row(i, len(batch), ids_T, stop) for i, ids_T in enumerate(prompts_BT)]
        for row, b in zip(rows, batch, strict=True):
            row.tokens = self._ids_BT[b, _PROMPT : _PROMPT + 1].tolist()
        state = decoding_state(rows, cache, padding)
        assert isinstance(state, RecurrentState)
        state.lengths = [prompts_BT.shape[1]] * len(batch)
        state.hidden_BD = hidden_BTD[:, -1]
        return state
