"""Text that the draft model writes itself: what it will really be asked to go on from.

Trained on the target's text alone, a draft model never sees the contexts that its own mistakes
lead to. In a share of the batches it therefore continues the corpus's prompts itself, and learns
what the target would have said there (on-policy distillation: Zhou et al. 2023, DistillSpec,
arXiv:2310.08461; Agarwal et al. 2023, GKD, arXiv:2306.13649).

Which batches, and every random number of the writing, follow from the seed and the step, so that a
resumed run goes on with the very same text. Shapes: B batch, T tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from medusa_heads.config import IGNORED
from medusa_heads.data.prompts import left_padded, pad_id, stop_ids, until_end
from medusa_heads.files import replace_file
from medusa_heads.target.target import TargetModel

Row = dict[str, list[int]]
# Of generate(), whatever the target's settings say, which are the draft model's as well: a tensor,
# and no drafts that are looked up, which transformers has for single texts alone.
_PLAIN: dict[str, Any] = {"return_dict_in_generate": False, "prompt_lookup_num_tokens": None}
_PROMPT_SHARE = 4  # of rows without a marked prompt, one part in so many is taken for one


@dataclass
class OwnText:
    """Batches written by the draft model, made anew every `refresh` steps."""

    draft: TargetModel  # that is being trained
    rows: Dataset  # whose prompts are continued, each to the length its row had
    _: KW_ONLY
    share: float  # of the batches, between 0 and 1
    refresh: int  # optimiser steps for which text is written at once
    batches_a_step: int  # gradient accumulation
    batch_size: int
    generation_batch_size: int = 64  # rows written at once
    temperature: float = 1.0
    seed: int = 0  # of this process
    _window: int = field(default=-1, init=False)
    _written: list[Row] = field(default_factory=list, init=False)

    def batch(self, step: int, number: int) -> list[Row] | None:
        """Rows for batch `number` of a step; None where the corpus has its turn."""
        if not self._has_turn(step, number):
            return None
        window = step // self.refresh
        turns = [
            (s, n)
            for s in range(window * self.refresh, (window + 1) * self.refresh)
            for n in range(self.batches_a_step)
            if self._has_turn(s, n)
        ]
        count = len(turns) * self.batch_size
        if window != self._window or count != len(self._written):  # as kept of other batches
            self._written = self._write(window, count)
            self._window = window
        first = turns.index((step, number)) * self.batch_size
        return self._written[first : first + self.batch_size]

    def save(self, path: Path) -> None:
        """Keep the text at hand, for a run that is resumed from here."""
        replace_file(path, json.dumps({"window": self._window, "rows": self._written}) + "\n")

    def load(self, path: Path) -> None:
        """Take up what `save` kept: nothing, where the run had fewer processes then, and nothing
        of use, where its steps had other batches."""
        if not path.is_file():
            return
        kept = json.loads(path.read_text(encoding="utf-8"))
        self._window, self._written = kept["window"], kept["rows"]

    def _has_turn(self, step: int, number: int) -> bool:
        return random.Random(f"{self.seed}/{step}/{number}").random() < self.share

    def _write(self, window: int, count: int) -> list[Row]:
        drawn = random.Random(f"{self.seed}/window {window}")
        chosen = [drawn.randrange(len(self.rows)) for _ in range(count)]
        texts = [_split(self.rows[index]) for index in chosen]
        written: list[Row] = []
        device = self.draft.device
        model: Any = self.draft.model
        training = model.training
        # Rotary positions that are computed go on beyond the context.
        turns = any(hasattr(module, "inv_freq") for module in model.modules())
        context = None if turns else self.draft.max_positions
        model.eval()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(drawn.randrange(1 << 62))
            for start in range(0, count, self.generation_batch_size):
                some = texts[start : start + self.generation_batch_size]
                for part in _fitting(some, context):
                    written += _continue(model, part, self.temperature)
        model.train(training)
        return written


def _split(row: Any) -> tuple[list[int], int]:
    """A row's prompt, and how many tokens follow it."""
    labels, ids = list(row["labels"]), list(row["input_ids"])
    prompt = next((t for t, label in enumerate(labels) if label != IGNORED), len(ids))
    prompt = min(prompt or len(ids) // _PROMPT_SHARE, len(ids) - 1) or 1
    return ids[:prompt], max(len(ids) - prompt, 1)


def _fitting(
    texts: Sequence[tuple[list[int], int]], context: int | None
) -> list[Sequence[tuple[list[int], int]]]:
    """The same in parts, in order, each of which can be continued at once: all are until the
    longest is done, also behind the longest prompt, and a table of positions has an end."""
    longest = max(len(prompt) for prompt, _ in texts) + max(length for _, length in texts)
    if context is None or longest <= context or len(texts) == 1:
        return [texts]
    half = len(texts) // 2
    return [*_fitting(texts[:half], context), *_fitting(texts[half:], context)]


@torch.no_grad()
def _continue(model: Any, texts: Sequence[tuple[list[int], int]], temperature: float) -> list[Row]:
    """Sampled continuations as rows of `input_ids` and `labels`, cut behind an end token."""
    ends, pad = stop_ids(model), pad_id(model)
    input_ids_BT, mask_BT = left_padded([prompt for prompt, _ in texts], pad, model.device)
    output_BT = model.generate(
        input_ids_BT,
        attention_mask=mask_BT,
        max_new_tokens=max(length for _, length in texts),
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        pad_token_id=pad,
        use_cache=True,
        **_PLAIN,
    )
    rows = []
    for (prompt, length), tokens in zip(
        texts, output_BT[:, input_ids_BT.shape[1] :].tolist(), strict=True
    ):
        text = until_end(tokens[:length], ends)
        rows.append({"input_ids": prompt + text, "labels": [IGNORED] * len(prompt) + text})
    return rows
