"""What decoding takes of memory at most, foretold from small texts.

What reading a prompt takes grows with its tokens, and with their square where scores or masks of
all pairs of them are held; what a step takes grows with its rows and, by far less, with the text.
Small texts are decoded and watched, and the curves are followed to large ones. What the cache takes
is known without that.

Shapes: B batch, T tokens; 3 moments, those of `Peaks`, and 5 parts of their curves.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import StoppingCriteria, StoppingCriteriaList

from medusa_heads.inference.bench.speedup import bytes_of, cache_bytes_per_token, heads_bytes
from medusa_heads.inference.models.medusa import MedusaModel
from medusa_heads.target.stacks import held_at_most

_NEW = 24  # tokens of a text that is watched, more than two steps commit
_LONG = 192  # of its prompt, where the target reads so many
_READ = "medusa-heads: the prompt has been read"


class Peaks(NamedTuple):
    """Bytes on the target's device at most, beyond what was held before the text began."""

    reading: float  # the prompt
    beginning: float  # the first step, in which the heads read the prompt
    stepping: float  # in all further ones


class _HasRead(StoppingCriteria):
    """Leaves a mark in the profile behind the prompt, and behind every step; ends nothing."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        with record_function(_READ):
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def watch(model: MedusaModel, rows: int, prompt: int, new: int = _NEW) -> Peaks:
    """Of so many rows with prompts of so many tokens and as many new ones as given, drawn, which
    takes more than greedy text does."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else each profile writes of itself
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(
        model.target.vocab_size, (rows, prompt), generator=generator, device="cpu"
    )
    ids_BT = ids_BT.to(model.target.device)
    gc.collect()  # what others left would be given back in the middle, and be counted
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        model.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            stopping_criteria=StoppingCriteriaList([_HasRead()]),
            do_sample=True,
            min_new_tokens=new,
            max_new_tokens=new,
        )
    held, peaks, moment = 0, [0, 0, 0], 0
    for _, size in sorted(_events(profiled, model.target.device.type), key=lambda event: event[0]):
        if size is None:
            moment = min(moment + 1, 2)
        held += size or 0
        peaks[moment] = max(peaks[moment], held)
    return Peaks(*peaks)


def _events(profiled: Any, device: str) -> Iterator[tuple[int, int | None]]:
    """Nanoseconds, and the bytes that were taken or, below 0, given back then; None of a mark."""
    nodes = list(profiled.profiler.kineto_results.experimental_event_tree())
    while nodes:
        node = nodes.pop()
        nodes += node.children
        if node.tag.name == "Allocation" and node.extra_fields.device.type == device:
            yield node.start_time_ns, node.extra_fields.alloc_size
        elif node.name == _READ:
            yield node.start_time_ns, None


class Memory:
    """What decoding with a model's tree, as it is now, takes of its device at most.

    Args:
        model: decodes six small texts now.

    Attributes:
        weights: bytes of the target and of its heads, as held while decoding.
    """

    def __init__(self, model: MedusaModel) -> None:
        self._per_token = cache_bytes_per_token(model.target)
        self._nodes = model.drafter.num_nodes
        target = model.target.model
        limit = model.target.max_positions
        room = _LONG + _NEW if limit is None else limit - self._nodes
        self._new = min(_NEW, max(1, room // 2))
        self._short = short = max(1, min(_LONG, room - self._new) // 3)
        watch(model, 1, short)  # what is made once and kept belongs to the weights
        self.weights = bytes_of((*target.parameters(), *target.buffers()))
        self.weights += model.target.packed_bytes + heads_bytes(model.drafting)
        few_3, more_3, many_3, two_3, two_many_3 = (
            self._working(model, rows, prompt)
            for rows in (1, 2)
            for prompt in (short, 2 * short, 3 * short)
            if (rows, prompt) != (2, 2 * short)
        )
        # Scores and masks of all pairs are held while a prompt is read.
        square_3 = ((many_3 - 2 * more_3 + few_3) / (2 * short**2)).clamp(min=0)
        square_3[1:] = 0
        alone_3, beside_3 = (many_3 - few_3) / (2 * short), (two_many_3 - two_3) / (4 * short)
        # Of the shortest text, of each further row; of each token further of one row, of a row
        # among others, whose drafts are made in other ways; and of pairs of these.
        line = short * square_3
        self._curves_53 = torch.stack(
            [few_3, two_3 - few_3, alone_3 - line, beside_3 - line, square_3]
        )

    def _working(self, model: MedusaModel, rows: int, prompt: int) -> Tensor:
        peaks_3 = torch.tensor(watch(model, rows, prompt, self._new), dtype=torch.float64)
        return peaks_3 - self.cache(rows, prompt, self._new)

    def cache(self, rows: int, prompt: int, new: int) -> int:
        """Bytes of keys and values of rows that may come to have so many tokens."""
        return held_at_most(prompt, prompt + new + self._nodes, rows * self._per_token)

    def peaks(self, rows: int, prompt: int, new: int) -> Peaks:
        """Foretells what `watch` would find."""
        # What grows with a text while it is written grows from where it was watched.
        further_3 = torch.tensor([prompt, prompt, prompt + new - self._new]) - self._short
        first_3, a_row_3, alone_3, beside_3, square_3 = self._curves_53
        # Below the shortest text rows beside others fall no faster than one alone.
        of_token_3 = torch.where((further_3 > 0) & (rows > 1), beside_3, alone_3)
        pairs_3 = further_3 * (further_3 - self._short)
        grown_3 = further_3 * of_token_3 + pairs_3 * square_3
        working_3 = first_3 + (rows - 1) * a_row_3 + rows * grown_3
        return Peaks(*(working_3 + self.cache(rows, prompt, new)).tolist())

    def describe(self, rows: int, prompt: int, new: int) -> dict[str, int]:
        """The same beside its parts, in bytes, weights among them."""
        cache, peaks = self.cache(rows, prompt, new), self.peaks(rows, prompt, new)
        working = round(max(peaks)) - cache
        return {
            "rows": rows,
            "weights": self.weights,
            "cache": cache,
            "working": working,
            "most": self.weights + cache + working,
        }
