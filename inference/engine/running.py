"""Rows that join and leave while others are decoded.

A row that joins reads its prompt alone; then its part of the cache is laid behind those of the
others, and all are verified in one forward, however long each of them is. Rows that are drawn alike
are decoded together: greedy ones, and those with the same logits processors. Each kind is a batch
of its own, and the batches take steps in turn.

Shapes: T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from medusa_heads.cache_names import take_cache
from medusa_heads.errors import forget_frames
from medusa_heads.inference.acceptance.base import look_at_one_row, settings_of
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.engine.beginning import Beginning
from medusa_heads.inference.engine.capability import capability, why_alone
from medusa_heads.inference.engine.decoding import take_step
from medusa_heads.inference.engine.given.kept_texts import KeptTexts
from medusa_heads.inference.engine.given.media import is_said, names_of_media
from medusa_heads.inference.engine.probe import text_logits
from medusa_heads.inference.engine.rows import Row
from medusa_heads.inference.engine.stats import GenerationStats
from medusa_heads.target.cache import RowCache
from medusa_heads.target.graphs.compiled import CompiledTarget
from medusa_heads.target.target import TargetModel


class RunningBatch:
    """At most so many rows, each with the text of `generate()`: greedy, and of a seed, that of the
    row alone. Raises ValueError: the target is compiled, for batches of one shape.

    Args:
        target, drafter, acceptance, acceptance_settings: see `Beginning`.
        max_rows: that are decoded at a time.
        lock: held while the target runs.
        kept_bytes: what keys and values of texts that have ended may take, which are kept for
            prompts that begin alike. Whoever changes the target's weights, or its adapter, makes a
            new batch.

    Attributes:
        max_rows: as given, or 1 where rows of this target cannot be decoded together.
        alone: why they cannot, else None.
        stats: of all rows so far.
        kept: texts that have ended.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        max_rows: int,
        *,
        acceptance: str = "lossless",
        acceptance_settings: Mapping[str, float] | None = None,
        lock: Any = None,
        kept_bytes: int = 0,
    ) -> None:
        if isinstance(target, CompiledTarget):
            raise ValueError(
                "rows join and leave a running batch, and the target is compiled for batches of "
                "one shape: leave compile out"
            )
        self._target, self._drafter = target, drafter
        self._options: dict[str, Any] = {
            "acceptance": acceptance,
            "acceptance_settings": acceptance_settings,
        }
        self._lock = lock or nullcontext()
        self._batches: dict[Hashable, _Batch] = {}
        self._failed: dict[Row, Exception] = {}  # since the last step
        self.stats = GenerationStats()
        self.alone = why_alone(target)
        self.max_rows = 1 if self.alone else max_rows
        cache = target.new_cache(1, 1)  # of one slot, to see what it takes
        with self._lock:
            target.hidden(torch.zeros(1, 1, dtype=torch.long, device=target.device), cache=cache)
        self._slot_bytes = cache.held_bytes
        self.kept = KeptTexts(target, self._slot_bytes, kept_bytes)

    @property
    def rows(self) -> list[Row]:
        """Those being decoded."""
        return [row for batch in self._batches.values() for row in batch.state.rows]

    @property
    def tokens(self) -> int:
        """Committed so far, of all rows."""
        return self.stats.tokens

    def row_bytes(self, tokens: int) -> int:
        """What keys and values of a row alone take at most: of so many tokens, prompt and text."""
        return (tokens + self._spare()) * self._slot_bytes

    def cache_bytes(self, tokens: int = 0) -> int:
        """What those of all rows take at most, until they have ended; also with one more row of so
        many tokens."""
        slots = [slots for batch in self._batches.values() for slots in batch.slots.values()]
        if tokens:
            slots.append(tokens + self._spare())
        return len(slots) * max(slots, default=0) * self._slot_bytes

    @property
    def held_bytes(self) -> int:
        """What keys and values take now."""
        return sum(batch.state.cache.held_bytes for batch in self._batches.values())

    def _spare(self) -> int:
        """Slots that a row needs besides those of its text."""
        nodes = self._drafter.num_nodes
        if capability(self._target) != "recurrent":
            return nodes
        return 2 * nodes + self._drafter.most_again(self.max_rows)

    @torch.no_grad()
    def logits(self, ids_1T: Tensor) -> Tensor:
        """The target's logits behind each token of a text [T, V], by a forward of its own."""
        with self._lock:
            return text_logits(self._target, ids_1T)[0]

    def add(
        self,
        input_ids_1T: Tensor,
        streamer: Any = None,
        *,
        seed: int | None = None,
        watch: Callable[[Tensor, int], None] | None = None,
        **options: Any,
    ) -> Row:
        """Read a prompt, and let it join; it may have ended with its first token. Raises
        ValueError: an option that cannot be honoured, by name.

        Args:
            input_ids_1T: the prompt, without padding.
            streamer: receives every token, and `end_step` after those of each step.
            seed: of the noise that decides what is drawn, as `torch.manual_seed(seed)` would fix it
                in `generate()`.
            watch: see Row.
            options: those of `generate()`.
        """
        assert len(self.rows) < self.max_rows
        if take_cache(options) is not None:
            raise ValueError("a row that joins shares its cache with others: pass none")
        model: Any = self._target.model
        # What is read beside an image is not said by tokens alone.
        media = any(is_said(options.get(name)) for name in names_of_media(model))
        ids, spare = input_ids_1T[0].tolist(), self._spare()
        begun = None if media else self.kept.begin(ids, len(ids) + spare)
        # Its own: other threads of the process may draw numbers meanwhile.
        random = None if seed is None else torch.Generator().manual_seed(seed)
        join = partial(self._join, begun=begun, keeps=not media, watch=watch)
        with self._lock:
            row: Row = model.generate(
                input_ids_1T,
                attention_mask=torch.ones_like(input_ids_1T),
                custom_generate=partial(join, streamer=streamer, random=random),
                **options,
            )
        return row

    @torch.no_grad()
    def _join(
        self,
        model: Any,
        input_ids: Tensor,
        *,
        logits_processor: LogitsProcessorList,
        synced_gpus: bool = False,
        begun: RowCache | None,
        keeps: bool,
        watch: Callable[[Tensor, int], None] | None,
        **prepared: Any,
    ) -> Row:
        if len(input_ids) > 1:
            raise ValueError(
                "a row that joins is one text: leave num_beams and num_return_sequences out"
            )
        if begun is not None:  # in place of the empty one that generate() has made
            take_cache(prepared)
            prepared[self._target.cache_argument] = begun
        together = look_at_one_row(logits_processor)
        beginning = Beginning(
            self._target,
            self._drafter,
            input_ids,
            logits_processor=logits_processor,
            among=self.max_rows if together else 1,
            **prepared,
            **self._options,
        )
        state = beginning.state
        (row,) = state.rows
        row.begun = 0 if begun is None else begun.get_seq_length()
        row.leaves, row.watch = self.kept.keep if keeps else None, watch
        with self._target.capture_hidden() as last_hidden:
            beginning.read_prompts(last_hidden, self.stats)
        if row.done:
            return row
        row.survived = (Exception,)
        key: Hashable = row
        if together:
            key = state.drawing, *map(settings_of, logits_processor)
        batch = self._batches.setdefault(key, _Batch(beginning))
        with self._unbroken(key):
            if batch.state is not state:
                batch.state.join(state)
            batch.slots[row] = beginning.slots
            batch.fit()
        return row

    def step(self) -> dict[Row, Exception]:
        """One step of each row; returns those that cannot go on, and why, without a traceback. They
        have left: a row alone whose streamer or stopping criterion raises, else all rows of a kind.
        Where what is raised is no `Exception`, such as a KeyboardInterrupt, these have left too,
        and it is raised here."""
        for key, batch in list(self._batches.items()):
            # A model's own code may raise anything, and other batches go on.
            with suppress(Exception), self._unbroken(key):
                moved = hasattr(self._target.model, "_hf_hook")
                with (
                    self._lock,
                    torch.no_grad() if moved else torch.inference_mode(),
                    self._target.capture_hidden() as last_hidden,
                ):
                    rule, state = batch.beginning.rule, batch.state
                    if state.is_read_again:
                        batch.beginning.read_again(last_hidden, self.stats)
                    else:
                        take_step(self._target, self._drafter, rule, state, last_hidden, self.stats)
                self._tidy(key)
        failed, self._failed = self._failed, {}
        for fault in failed.values():
            forget_frames(fault)  # a row keeps it, and they keep the row, and its batch's cache
        return failed

    def leave(self, row: Row) -> None:
        """The row is decoded no further, and what is kept of it is given back."""
        row.done = True
        for key, batch in list(self._batches.items()):
            if row in batch.state.rows:
                with self._unbroken(key):
                    with self._lock, torch.no_grad():
                        batch.state.let_go()
                    self._tidy(key)

    @contextmanager
    def _unbroken(self, key: Hashable) -> Iterator[None]:
        """Rows of the batch end with what breaks the block off, which may have changed a part of
        what is kept of them."""
        rows = list(self._batches[key].slots)  # not one that is about to join
        try:
            yield
        except BaseException as fault:
            self._batches.pop(key, None)
            for row in rows:
                row.leaves = None  # whoever keeps the row keeps no texts
                if not row.done:
                    row.fail(fault)
            raise
        finally:
            for row in rows:
                if isinstance(row.fault, Exception):
                    self._failed[row] = row.fault

    def _tidy(self, key: Hashable) -> None:
        batch = self._batches[key]
        if not batch.state.rows:
            self._drafter.rest(batch.state)  # and keeps no row of it
            del self._batches[key]
        elif len(batch.state.rows) < len(batch.slots):
            batch.fit()


class _Batch:
    """Rows that are drawn alike.

    Attributes:
        beginning: of the first of them.
        slots: of each row, that its text may come to need.
    """

    def __init__(self, beginning: Beginning) -> None:
        self.beginning, self.state = beginning, beginning.state
        self.slots: dict[Row, int] = {}

    def fit(self) -> None:
        """The cache is as long as these rows may need."""
        self.slots = {row: self.slots[row] for row in self.state.rows}
        self.state.cache.fit(max(self.slots.values()))
