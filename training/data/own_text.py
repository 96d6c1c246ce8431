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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from medusa_heads.config import IGNORED
from medusa_heads.files import replace_file
from medusa_heads.target.prompts import left_padded, pad_id, stop_ids

if TYPE_CHECKING:
    from datasets import Dataset

    from medusa_heads.target.target import TargetModel

_PROMPT_SHARE = 4  # of rows without a marked prompt, one part in so many is taken for one


class OwnText:
    """Batches written by the draft model, made anew every `refresh` steps.

    Args:
        draft: the model that is being trained.
        rows: the training set, whose prompts are continued, each to the length its row had.
        share: of the batches, between 0 and 1.
        refresh: optimiser steps for which text is written at once.
        batches_a_step: gradient accumulation.
        batch_size: rows of a batch.
        generation_batch_size: rows written at once.
        temperature: of the writing.
        seed: of this process.
    """

    def __init__(
        self,
        draft: TargetModel,
        rows: Dataset,
        *,
        share: float,
        refresh: int,
        batches_a_step: int,
        batch_size: int,
        generation_batch_size: int = 64,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> None:
        self._draft, self._corpus = draft, rows
        self._share, self._refresh = share, refresh
        self._batches_a_step, self._batch_size = batches_a_step, batch_size
        self._generation_batch_size, self._temperature = generation_batch_size, temperature
        self._seed = seed
        self._window = -1
        self._rows: list[dict[str, list[int]]] = []

    def batch(self, step: int, number: int) -> list[dict[str, list[int]]] | None:
        """Rows for batch `number` of a step; None where the corpus has its turn."""
        if not self._has_turn(step, number):
            return None
        window = step // self._refresh
        turns = [
            (s, n)
            for s in range(window * self._refresh, (window + 1) * self._refresh)
            for n in range(self._batches_a_step)
            if self._has_turn(s, n)
        ]
        if window != self._window:
            self._rows = self._write(window, len(turns) * self._batch_size)
            self._window = window
        first = turns.index((step, number)) * self._batch_size
        return self._rows[first : first + self._batch_size]

    def save(self, path: Path) -> None:
        """Keep the text at hand, for a run that is resumed from here."""
        replace_file(path, json.dumps({"window": self._window, "rows": self._rows}) + "\n")

    def load(self, path: Path) -> None:
        """Take up what `save` kept."""
        kept = json.loads(path.read_text(encoding="utf-8"))
        self._window, self._rows = kept["window"], kept["rows"]

    def _has_turn(self, step: int, number: int) -> bool:
        return random.Random(f"{self._seed}/{step}/{number}").random() < self._share

    def _write(self, window: int, count: int) -> list[dict[str, list[int]]]:
        drawn = random.Random(f"{self._seed}/window {window}")
        chosen = [drawn.randrange(len(self._corpus)) for _ in range(count)]
        texts = [_split(self._corpus[index]) for index in chosen]
        written: list[dict[str, list[int]]] = []
        device = self._draft.device
        model: Any = self._draft.model
        training = model.training
        model.eval()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(drawn.randrange(1 << 62))
            for start in range(0, count, self._generation_batch_size):
                part = texts[start : start + self._generation_batch_size]
                written += _continue(model, part, self._temperature)
        model.train(training)
        return written


def _split(row: Any) -> tuple[list[int], int]:
    """A row's prompt, and how many tokens follow it."""
    labels, ids = list(row["labels"]), list(row["input_ids"])
    prompt = next((t for t, label in enumerate(labels) if label != IGNORED), len(ids))
    prompt = min(prompt or len(ids) // _PROMPT_SHARE, len(ids) - 1) or 1
    return ids[:prompt], max(len(ids) - prompt, 1)


@torch.no_grad()
def _continue(
    model: Any, texts: Sequence[tuple[list[int], int]], temperature: float
) -> list[dict[str, list[int]]]:
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
    )
    rows = []
    for (prompt, length), tokens in zip(
        texts, output_BT[:, input_ids_BT.shape[1] :].tolist(), strict=True
    ):
        stop = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
        text = tokens[: min(stop, length)]
        rows.append({"input_ids": prompt + text, "labels": [IGNORED] * len(prompt) + text})
    return rows
