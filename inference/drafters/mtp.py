"""Drafts of a target's own multi-token-prediction modules.

Module k (counted from 0) reads, at position t of the text, what came out below it at t (of module 0
the target's hidden state) and the token t+1+k; what comes out yields, through the target's lm_head,
the token t+2+k. Tokens it has not got yet are those drafted before. Behind the last module a chain
goes on with that module, which reads what itself has put out, as vLLM and SGLang let it.

Every module keeps keys and values of its own along the text. Those of module k's last k positions
were made from drafts, and are made again from what was committed.

Shapes: B active rows, F positions read at once, P positions drafted so far, R ranks, D
hidden.
Source: DeepSeek-AI 2024, "DeepSeek-V3", arXiv:2412.19437, section 2.2.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from medusa_heads.checkpoint.mtp_checkpoint import check_mtp
from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.adapt.measure import target_clock
from medusa_heads.inference.drafters.base import Memory, along_paths, behind_texts
from medusa_heads.inference.drafters.chains import ChainSource, Level, OneToken
from medusa_heads.inference.drafters.coupling import best_drafts, coupling
from medusa_heads.inference.engine.rows import Row
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.target.attention import tree_attention
from medusa_heads.target.cache import RowCache
from medusa_heads.target.mtp import load_mtp
from medusa_heads.target.target import TargetModel

_RANKS = 4  # tokens offered at each place of a chain
_AGREEMENT = 0.7  # of a drafted token behind right ones, before any was drafted
_REUSED = 3  # places behind the last module's own that are believed for themselves
_ALL = "a token of each module"


class MtpDrafts:
    """What a target's modules draft: those of its own checkpoint, or of a folder in which they were
    trained for it. Raises ValueError: there are no modules that can be read, or they are another
    target's."""

    def __init__(self, target: TargetModel, folder: str | os.PathLike[str] | None = None) -> None:
        # Modules that were trained on learn for themselves.
        self.facts = {"modules": None if folder is None else check_mtp(folder, target)}
        self.target, self.modules = target, load_mtp(target, folder)
        self.ranks = min(_RANKS, target.vocab_size)

    def __len__(self) -> int:
        return len(self.modules.layers)

    def continuation(self, state: DecodingState) -> Generator[Level, None, None]:
        """The likeliest next tokens of every active row and their probabilities, then those behind
        the likeliest one, and so on for as long as it is asked."""
        text: MtpText | None = state.memories.get(self)
        if text is None:
            text = state.memories[self] = MtpText(self, state.rows)
        for tokens_BR, probs_BR in text.advance(state):
            yield tokens_BR.tolist(), probs_BR.tolist()
        while True:
            tokens_BR, probs_BR = text.go_on()
            yield tokens_BR.tolist(), probs_BR.tolist()


class MtpText(Memory):
    """What the modules have read of one batch of texts. Row b's positions lie in slots [0,
    length_b) of the modules' cache, without padding: `lengths` count the target's hidden states
    that were read."""

    def __init__(self, drafts: MtpDrafts, rows: Sequence[Row]) -> None:
        super().__init__(rows)
        self.lengths = [0] * len(rows)
        self._drafts, self._modules = drafts, drafts.modules
        self._cache = RowCache(drafts.modules.config)
        # The target's last hidden states, as many as are read again.
        self._last_BFD: Tensor | None = None
        # What came out at the end of every row, the token that it yields, and where drafts stand.
        self._end_B1D: Tensor
        self._token_B1: Tensor
        self._index_BP: Tensor

    def advance(self, state: DecodingState) -> list[tuple[Tensor, Tensor]]:
        """Take in what was committed since last time; of each module its likeliest tokens [B, R]
        behind every row, and their probabilities."""
        kept = self.follow(state.rows)
        if kept is not None and self._last_BFD is not None:
            self._cache.select_batch(kept)
            self._cache.fit(self.most_slots)
            self._last_BFD = self._last_BFD[kept]
        self._coupling, self._ahead = coupling(state), 0
        starts, (hidden_BFD, tokens_BF, counts) = self._unread(state)
        most, device = hidden_BFD.shape[1], hidden_BFD.device
        self._batch_B1 = torch.arange(len(counts), device=device)[:, None]
        end_B1 = torch.tensor(counts, device=device)[:, None] - 1
        order_F = torch.arange(most, device=device)
        sees_BFF = (order_F <= order_F[:, None]).expand(len(counts), -1, -1)
        index_BF = torch.tensor(starts, device=device)[:, None] + order_F
        self.lengths = starts
        levels = []
        for k in range(len(self._drafts)):
            hidden_BFD = self._read(k, tokens_BF, hidden_BFD, index_BF, sees_BFF)
            self._end_B1D = hidden_BFD[self._batch_B1, end_B1]
            levels.append(self._best())
            tokens_BF = torch.cat([tokens_BF[:, 1:], tokens_BF[:, :1]], dim=1)
            tokens_BF[self._batch_B1, end_B1] = self._token_B1
        self.lengths = self._cache.keep_paths([range(count) for count in counts], starts)
        self._index_BP = index_BF[:, :0]
        return levels

    def go_on(self) -> tuple[Tensor, Tensor]:
        """The likeliest tokens behind the one drafted last, and their probabilities, [B, R]."""
        written, device = self._index_BP.shape[1], self._index_BP.device
        index_B1 = torch.tensor(self.lengths, device=device)[:, None] + written
        sees_B1P = torch.ones(len(index_B1), 1, written + 1, dtype=torch.bool, device=device)
        self._end_B1D = self._read(
            len(self._drafts) - 1, self._token_B1, self._end_B1D, index_B1, sees_B1P
        )
        self._index_BP = torch.cat([self._index_BP, index_B1], dim=1)
        return self._best()

    def _unread(self, state: DecodingState) -> tuple[list[int], tuple[Tensor, Tensor, list[int]]]:
        """At which position of each row begins what is to be read; and that, as `unread` has it."""
        hidden_BND, nodes = state.fresh()
        again, held = len(self._drafts) - 1, 0
        if self._last_BFD is not None:
            held = self._last_BFD.shape[1]
            hidden_BND = torch.cat([self._last_BFD, hidden_BND], dim=1)
        kept = [min(again, length) for length in self.lengths]
        paths = [
            [*range(held - count, held), *(held + node for node in path)]
            for count, path in zip(kept, nodes, strict=True)
        ]
        last = [(path[:1] * again + path)[len(path) :] for path in paths]
        last_BF = torch.tensor(last, dtype=torch.long, device=hidden_BND.device)
        self._last_BFD = hidden_BND[
            torch.arange(len(last), device=last_BF.device)[:, None], last_BF
        ]
        starts = [length - count for length, count in zip(self.lengths, kept, strict=True)]
        return starts, along_paths(state, hidden_BND, paths)

    def _read(
        self, k: int, tokens_BF: Tensor, below_BFD: Tensor, index_BF: Tensor, sees_BFP: Tensor
    ) -> Tensor:
        """What comes out of module k at new positions [B, F, D]; its rows are written behind those
        of the longest text and of the positions drafted so far."""
        within, drafted = self._drafts.target.within, sees_BFP.shape[2] > sees_BFP.shape[1]
        position_BF = within(index_BF + k + 1)
        written_BP = within(self._index_BP + k + 1) if drafted else None
        offsets_B1 = torch.full_like(index_BF[:, :1], -k - 1)
        mask = behind_texts(self.lengths, offsets_B1, sees_BFP, position_BF, written_BP)
        self._cache.row_layers[k].length = mask.first_slot
        with tree_attention(mask):
            out: Tensor = self._modules.forward_layer(
                k, below_BFD, position_BF, self._cache, input_ids=tokens_BF
            )
        return out

    def _best(self) -> tuple[Tensor, Tensor]:
        """The likeliest tokens [B, R] of the last module that was read, and their probabilities;
        they are the next ones of this step's chain."""
        logits_B1V = self._drafts.target.get_output_embeddings()(self._end_B1D)
        tokens_BR, probs_BR = best_drafts(
            logits_B1V, self._drafts.ranks, self._coupling, self._ahead
        )
        self._token_B1, self._ahead = tokens_BR[:, :1], self._ahead + 1
        return tokens_BR, probs_BR


def mtp_source(drafts: MtpDrafts, most: int, clock: Clock | None) -> tuple[ChainSource, Clock]:
    """The modules as a source of chains of at `most` so many tokens, and the clock of the target's
    steps that knows what these take; where none is given it is measured."""
    target, modules = drafts.target, len(drafts)
    if clock is None:
        clock = target_clock(target, {_ALL: (OneToken(drafts.continuation), {"modules": modules})})
    token = clock.drafting(_ALL) / modules or clock.step(1) / target.config.num_hidden_layers
    source = ChainSource(
        "mtp",
        drafts.continuation,
        clock,
        lambda rows: token * clock.step(rows) / clock.step(1),
        most,
        _AGREEMENT,
        apart=modules + _REUSED,
        reads_prompt=True,
        facts=drafts.facts,
    )
    return source, clock
