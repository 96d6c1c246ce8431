"""What a draft model has read of the texts being decoded: its own cache, never taken on trust.

Before each step the nodes written in the last one are walked along the tokens that the target
really committed; what lies on that path is kept, the rest is rolled back, and what the draft model
has not read yet is fed to it. A draft model with another vocabulary reads a translation, whose end
may change as it grows.

Shapes: B active rows, T tokens, F nodes written at once, P nodes written since the committed text,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor

from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.inference.drafters.base import Memory, Text, behind_texts
from medusa_heads.inference.drafters.model.text_on_device import DraftedTextOnDevice
from medusa_heads.inference.drafters.model.translated_row import TranslatedRow
from medusa_heads.inference.drafters.model.vocabulary import ForeignDraft
from medusa_heads.inference.engine.capability import capability
from medusa_heads.inference.engine.rows import Row
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.target.cache import RowCache
from medusa_heads.target.target import TargetModel


class DraftedText(Memory):
    """What the draft model has read of one batch of texts.

    Row b's committed tokens lie in slots [padding_b, length_b) of the draft's cache, as they do in
    the target's, or as many as they are in the draft model's own tokens. Nodes written since then
    lie behind the longest row, at the same slots for all. Raises UnsupportedArchitecture: the draft
    model reads single texts only, and this is a batch.

    Attributes:
        reads: nodes of a row in each forward since they were last caught up with; that one is 1.
        fed: tokens of a row in the last forward.
        caught_up: tokens of the target that the rows had when they were last caught up with, on
            average.
    """

    def __init__(self, draft: TargetModel, rows: Sequence[Row], padding: Sequence[int]) -> None:
        # Those that have begun together are read together; others join later, in `catch_up`.
        together = [row.prompt_length == rows[0].prompt_length for row in rows]
        rows, padding = list(compress(rows, together)), list(compress(padding, together))
        self._draft = draft
        self._vocabulary = draft.vocabulary if isinstance(draft, ForeignDraft) else None
        self._translated: list[TranslatedRow] = []
        self._padding = padding
        if self._vocabulary is not None:
            self._translated = [
                TranslatedRow(row, start, self._vocabulary)
                for row, start in zip(rows, padding, strict=True)
            ]
            longest = max(len(text.ids) for text in self._translated)
            for text in self._translated:
                text.padding = longest - len(text.ids)
            self._padding = [text.padding for text in self._translated]
        super().__init__(self._translated or rows)
        self.reads: list[int] = []
        self.fed, self.caught_up = 0, 0.0
        batched = len(self.rows) > 1 or any(self._padding)
        if batched and capability(draft) == "chain":
            raise UnsupportedArchitecture(
                f"the draft model ({draft.config.model_type}) goes by cache slots, which a batch "
                "does not keep in step",
                "decode one unpadded sequence at a time",
            )
        # All but the last token of the shortest row: its distribution is asked for.
        length = min(self.lengths) - 1
        self.lengths = [length] * len(self.rows)
        self._cache = draft.new_cache(len(self.rows), length)
        self._prefill(torch.cat([row.ids_1T()[:, :length] for row in self.rows]))
        self._tokens_BP: Tensor
        self._parents_BP: Tensor
        self._positions_BP: Tensor
        self._last_level: int
        self._sees_BPP: Tensor  # which of the written nodes each of them sees
        self._forget_nodes()

    def _prefill(self, ids_BT: Tensor) -> None:
        """One ordinary forward over the text, without logits."""
        ids_BT = self._known(ids_BT.to(self._draft.device))
        padding_B1 = torch.tensor(self._padding, device=ids_BT.device)[:, None]
        positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device) - padding_B1
        mask_BT = (positions_BT >= 0).long() if any(self._padding) else None
        self._draft.hidden(ids_BT, mask_BT, self._draft.within(positions_BT), cache=self._cache)

    @property
    def cache(self) -> RowCache:
        """The draft model's."""
        return self._cache

    def on_device(self, capacity: int) -> DraftedTextOnDevice:
        """The same of rows on the device, in texts of so many slots; empty."""
        return DraftedTextOnDevice(self._draft, self, capacity)

    def catch_up(self, state: DecodingState) -> Tensor:
        """Read what was committed since; logits [B, V] of every row's next token."""
        texts = self._translated
        # Up to where texts are what they were; what was written behind another end is of no use.
        ends = [min(text.read_on(), n) for text, n in zip(texts, self.lengths, strict=bool(texts))]
        ends = ends or self.lengths
        changed = [end < length for end, length in zip(ends, self.lengths, strict=True)]
        nodes = zip(self._tokens_BP.tolist(), self._parents_BP.tolist(), strict=True)
        # A row's last token is fed even where it was written: its logits are wanted.
        self._keep(
            [
                [] if other else _walk(tokens, parents, committed[:-1])
                for other, committed, (tokens, parents) in zip(
                    changed, self.committed(), nodes, strict=True
                )
            ]
        )
        each = zip(changed, ends, self.lengths, strict=True)
        self.lengths = [end if other else length for other, end, length in each]
        self.caught_up = fmean(row.length for row in state.rows)
        self._go_on_with(state)
        fed = self.committed()
        longest = max(len(ids) for ids in fed)
        # Shorter rows are filled up behind their end, where nothing of theirs looks.
        filled = [ids + [0] * (longest - len(ids)) for ids in fed]
        tokens_BF = torch.tensor(filled, device=self._draft.device)
        order_F = torch.arange(longest, device=tokens_BF.device)
        sees_BFF = (order_F <= order_F[:, None]).expand(len(fed), -1, -1)
        logits_BFV = self._read(tokens_BF, sees_BFF, order_F)
        self.reads = [1]
        self._keep([list(range(len(ids))) for ids in fed])
        last_B = torch.tensor([max(len(ids), 1) - 1 for ids in fed], device=tokens_BF.device)
        return self._of_target(logits_BFV[torch.arange(len(fed), device=tokens_BF.device), last_B])

    def _go_on_with(self, state: DecodingState) -> None:
        """Let go the rows that have left, and read the texts of those that have joined."""
        known = dict(
            zip([text.row for text in self._translated] or self.rows, self.rows, strict=True)
        )
        self._keep_rows([known[row] for row in state.rows if row in known])
        for row, padding in zip(state.rows, state.padding, strict=True):
            if row not in known:
                other = DraftedText(self._draft, [row], [padding])
                known[row] = other.rows[0]
                self._cache.join(other._cache, other.lengths)
                self.rows += other.rows
                self.lengths += other.lengths
                self._translated += other._translated
                self._padding += other._padding
                self._forget_nodes()
        self._keep_rows([known[row] for row in state.rows])  # in their order

    def _keep_rows(self, texts: Sequence[Text]) -> None:
        kept = self.follow(texts)
        if kept is not None:
            self._cache.select_batch(kept)
            self._cache.fit(self.most_slots)
            self._translated = [self._translated[i] for i in kept] if self._translated else []
            self._padding = [self._padding[i] for i in kept]
            self._forget_nodes()

    def write(self, tokens_BF: Tensor, above_BF: Tensor, level: int) -> Tensor:
        """Logits [B, F, V] of drafted tokens of the target, `level` tokens behind the committed
        text.

        `above_BF` says below which of the nodes written in the last call each of them hangs; the
        first call's all hang at the committed text.
        """
        tokens_BF, above_BF = tokens_BF.to(self._draft.device), above_BF.to(self._draft.device)
        if self._vocabulary is not None:
            tokens_BF = self._vocabulary.drafted(tokens_BF)
        batch, new = tokens_BF.shape
        self.reads.append(new)
        written = self._tokens_BP.shape[1]
        parents_BF = torch.full_like(above_BF, -1) if level == 1 else above_BF + self._last_level
        own_BFF = torch.eye(new, dtype=torch.bool, device=tokens_BF.device).expand(batch, -1, -1)
        index_BFP = parents_BF.clamp_min(0)[..., None].expand(-1, -1, written)
        sees_BFP = torch.cat([self._sees_BPP.gather(1, index_BFP), own_BFF], dim=2)
        depth_F = torch.full((new,), level - 1, device=tokens_BF.device)
        logits_BFV = self._read(tokens_BF, sees_BFP, depth_F)
        self._tokens_BP = torch.cat([self._tokens_BP, tokens_BF], dim=1)
        self._parents_BP = torch.cat([self._parents_BP, parents_BF], dim=1)
        self._sees_BPP = torch.cat([F.pad(self._sees_BPP, (0, new)), sees_BFP], dim=1)
        self._last_level = written
        return self._of_target(logits_BFV)

    def _of_target(self, logits: Tensor) -> Tensor:
        return logits if self._vocabulary is None else self._vocabulary.of_target(logits)

    def _read(self, tokens_BF: Tensor, sees_BFP: Tensor, depth_F: Tensor) -> Tensor:
        """Logits [B, F, V] of new nodes, appended to the cache behind the written ones."""
        self.fed, device = tokens_BF.shape[1], tokens_BF.device
        lengths_B1 = torch.tensor(self.lengths, device=device)[:, None]
        padding_B1 = torch.tensor(self._padding, device=device)[:, None]
        positions_BF = self._draft.within(lengths_B1 - padding_B1 + depth_F)
        written_BP = self._positions_BP[:, : sees_BFP.shape[2] - self.fed]
        mask = behind_texts(self.lengths, padding_B1, sees_BFP, positions_BF, written_BP)
        self._cache.set_length(mask.first_on_host)
        self._positions_BP = torch.cat([written_BP, positions_BF], dim=1)
        return self._draft.read(self._known(tokens_BF), self._cache, mask)

    def _keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Of the nodes behind the committed text, each row keeps these; all others are gone."""
        self.lengths = self._cache.keep_paths(paths, self.lengths)
        self._forget_nodes()

    def _forget_nodes(self) -> None:
        batch, device = len(self.rows), self._draft.device
        self._tokens_BP = torch.empty(batch, 0, dtype=torch.long, device=device)
        self._parents_BP = self._positions_BP = self._tokens_BP
        self._sees_BPP = torch.empty(batch, 0, 0, dtype=torch.bool, device=device)
        self._last_level = 0  # where the nodes of the last call of `write` begin

    def _known(self, tokens: Tensor) -> Tensor:
        """The target's vocabulary matrix may be padded to more rows than the draft's: no text holds
        such tokens, but if one did, any token would do to draft from."""
        return tokens.clamp_max(self._draft.get_input_embeddings().num_embeddings - 1)


def _walk(tokens: Sequence[int], parents: Sequence[int], text: Sequence[int]) -> list[int]:
    """The written nodes that spell the beginning of `text`."""
    path: list[int] = []
    for token in text:
        above = path[-1] if path else -1
        fitting = (
            node
            for node in range(above + 1, len(tokens))
            if parents[node] == above and tokens[node] == token
        )
        node = next(fitting, None)
        if node is None:
            break
        path.append(node)
    return path
