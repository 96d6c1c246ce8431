"""One architecture, checked: what it is trusted with, and whether it then decodes token-exactly.

A tiny fp32 model with wide random weights decodes greedily with the true continuation planted on
random branches of a bushy tree, and must equal `generate()`. As a control the same decoding is run
where it must go wrong (a tree with a plain causal mask; a chain whose nodes do not see each other;
a recurrent state that is not put back; index keys of refused drafts that are not dropped).
An architecture whose control goes unnoticed, or whose text repeats itself, is tried again with
other weights, then with repeated pairs of tokens forbidden, and is otherwise not called exact.

Shapes: B batch, T tokens, N tree nodes, V vocabulary.
"""

from __future__ import annotations

import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.inference.engine.capability import Capability, capability
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.inference.engine.stats import GenerationStats
from medusa_heads.target.cache import IndexedRowLayer, RowCache, RowLayer
from medusa_heads.target.recurrent import CompressedRowLayer, RecurrentCache, StateLayer
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.tree import TokenTree
from scripts.prove.differences import after_first_difference, margins_of
from scripts.prove.tiny_models import BITSANDBYTES_4BIT, BITSANDBYTES_8BIT, Build, Widths, builder
from tests.inference.planted import BUSHY, PlainCausalDrafter, PlantedDrafter, decoding

PROMPT = 21
CHAIN = [(0,), (0, 0), (0, 0, 0)]
FEWEST_DISTINCT = 24  # tokens in every sequence; a quarter of its length if that is less
VARIED: dict[str, Any] = {"no_repeat_ngram_size": 2}
ATTEMPTS: tuple[tuple[Widths, dict[str, Any]], ...] = (
    ((0.15, 0.15), {}),
    ((1.0, 0.3), {}),
    ((0.6, 0.6), {}),
    ((1.0, 0.3), VARIED),
    ((0.15, 0.15), VARIED),
    ((0.02, 0.05), VARIED),
    ((1.0, 0.08), VARIED),
)
# Kernels that round to half precision whatever the dtype. Two logits this close, in standard
# deviations, are a tie to them.
ROUNDS_TO_HALF = (BITSANDBYTES_4BIT, BITSANDBYTES_8BIT)
HALF_TIE = 0.05
ROUNDED = "none in double precision"


class BlindDrafter(PlantedDrafter):
    """Negative control of a chain: every node sees the text and itself, but no other node."""

    def propose(self, state: DecodingState) -> TokenTree:
        tree = super().propose(state)
        alone_NN = torch.eye(tree.num_nodes, dtype=torch.bool, device=tree.tokens_BN.device)
        return replace(tree, ancestors_BNN=alone_NN.expand_as(tree.ancestors_BNN))


@dataclass(frozen=True)
class Result:
    """One row of the table.

    Attributes:
        kind: the model type, or a name for a variant of one.
        verdict: "exact tree", "exact chain", "exact recurrent", "half precision", "refused",
            "not buildable", "unproven" or "MISMATCH".
        tokens: generated and compared; those of the control are not counted.
        mismatches: tokens from the first difference of a sequence on.
        note: why, or how it was checked.
        keeps: what its cache holds of a text.
        seconds: of a CPU, that the check took.
    """

    kind: str
    verdict: str
    tokens: int = 0
    mismatches: int = 0
    note: str = ""
    keeps: str = ""
    seconds: float = 0.0


def check(kind: str, new_tokens: int) -> Result:
    """Build, gate and decode one model type or variant."""
    started = time.process_time()
    unproven: list[Result] = []
    build = builder(kind)
    for widths, options in ATTEMPTS:
        options = options | {"max_new_tokens": new_tokens}
        result = _attempt(kind, build, widths, options)
        if result.verdict == "MISMATCH":
            # With some weights, rounding alone moves logits by thousandths of their deviation.
            precise = _attempt(kind, lambda given: build(given).double(), widths, options)
            if precise.tokens and not precise.mismatches:
                result = replace(result, verdict="unproven", note=f"{result.note}; {ROUNDED}")
        if result.verdict != "unproven":
            break
        unproven.append(result)
    else:
        result = unproven.pop(0)
    rounded = [f"; with other weights {r.note}" for r in unproven if r.note.endswith(ROUNDED)]
    result = replace(result, note="".join([result.note, *rounded[:1]]))
    return replace(result, seconds=time.process_time() - started)


def _attempt(kind: str, build: Build, widths: Widths, options: dict[str, Any]) -> Result:
    try:
        target = TargetModel(build(widths))
    except Exception as error:
        return Result(kind, "not buildable", note=one_line(error))
    target.freeze()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trusted = capability(target)
    except UnsupportedArchitecture as error:
        return Result(kind, "refused", note=error.reason)
    notes = [str(w.message).split(": ", 1)[1] for w in caught if "a chain of" in str(w.message)]
    if "no_repeat_ngram_size" in options:
        notes.append("no_repeat_ngram_size=2")
    result = _decode_and_compare(kind, target, trusted, options, notes)
    return replace(result, keeps=_kept(target.new_cache()))


def _kept(cache: RowCache) -> str:
    """What its layers hold."""
    kinds = {
        "rows": RowLayer,
        "index": IndexedRowLayer,
        "compressed": CompressedRowLayer,
        "state": StateLayer,
    }
    held = [
        name
        for name, kind in kinds.items()
        if any(isinstance(layer, kind) for layer in cache.layers)
    ]
    return ", ".join(held)


def _decode_and_compare(
    kind: str, target: TargetModel, trusted: Capability, options: dict[str, Any], notes: list[str]
) -> Result:
    tree = trusted == "tree"
    tokens = mismatches = 0
    accepted: list[float] = []
    distinct: list[int] = []
    margins: list[float] = []
    noticed = True
    for seed, batch in enumerate((1, 8) if tree else (1, 1)):
        inputs = _prompts(batch, target.vocab_size, seed)
        expected_BT = _generate(target, inputs, options)
        reference = _new(expected_BT)
        drafter = PlantedDrafter(reference, target.vocab_size, BUSHY if tree else CHAIN)
        got_BT, stats = _decode(target, drafter, inputs, options)
        if batch > 1 and not torch.equal(got_BT, expected_BT):
            alone_BT = _rows_alone(target, inputs, options)
            if torch.equal(got_BT, alone_BT):
                expected_BT = alone_BT
                notes.append(
                    "generate() itself is wrong on padded rows: compared with it row by row"
                )
        tokens += expected_BT[:, PROMPT:].numel()
        mismatches += after_first_difference(got_BT, expected_BT, PROMPT)
        margins += margins_of(target, inputs, got_BT, expected_BT)
        accepted.append(stats.tokens_per_step)
        distinct += [len(set(row)) for row in reference]
        if batch == 1:
            control: type[PlantedDrafter] = PlainCausalDrafter if tree else BlindDrafter
            faults: list[AbstractContextManager[Any]] = [nullcontext()]
            if trusted == "recurrent":
                control = PlantedDrafter
                faults = [patch.object(RecurrentCache, "put_back", lambda cache: None)]
            if target.new_cache().keeps_index:
                faults.append(patch.object(IndexedRowLayer, "set_length", RowLayer.set_length))
            for fault in faults:
                wrong = control(reference, target.vocab_size, drafter.shape.choices)
                with fault:
                    noticed &= _goes_wrong(target, wrong, inputs, options, expected_BT)
                control = PlantedDrafter
    notes.append(
        f"{sum(accepted) / len(accepted):.2f} tokens/step, {min(distinct)} distinct at least"
    )
    if mismatches:
        notes.append(
            f"{mismatches} tokens from the first difference of a sequence on, where the two best "
            f"logits are up to {max(margins):.1g} standard deviations apart"
        )
        tied = kind in ROUNDS_TO_HALF and max(margins) < HALF_TIE
        verdict = "half precision" if tied else "MISMATCH"
    elif not noticed:
        verdict = "unproven"
        notes.append("its control goes unnoticed")
    elif min(distinct) < min(FEWEST_DISTINCT, options["max_new_tokens"] // 4):
        verdict = "unproven"
        notes.append("the text repeats itself")
    else:
        verdict = "half precision" if kind in ROUNDS_TO_HALF else f"exact {trusted}"
    return Result(kind, verdict, tokens, mismatches, "; ".join(notes))


def _prompts(batch: int, vocab_size: int, seed: int) -> dict[str, Tensor]:
    """Random prompts, the second and later rows padded on the left."""
    random = torch.Generator().manual_seed(1 + seed)
    ids_BT = torch.randint(1, vocab_size, (batch, PROMPT), generator=random)
    mask_BT = torch.ones_like(ids_BT)
    for row in range(batch):
        mask_BT[row, : (row * 5) % PROMPT] = 0
    return {"input_ids": ids_BT * mask_BT, "attention_mask": mask_BT}


def _generate(target: TargetModel, inputs: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    model: Any = target.model
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    sequences_BT: Tensor = model.generate(**inputs, do_sample=False, **options)
    return sequences_BT


def _rows_alone(target: TargetModel, inputs: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    """What generate() makes of each row without its padding, padded again."""
    rows = []
    for ids_T, mask_T in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        padding_T, text_T = ids_T[mask_T == 0], ids_T[mask_T == 1]
        row = {"input_ids": text_T[None], "attention_mask": torch.ones_like(text_T)[None]}
        rows.append(torch.cat([padding_T, _generate(target, row, options)[0]]))
    return torch.stack(rows)


def _decode(
    target: TargetModel,
    drafter: PlantedDrafter,
    inputs: dict[str, Tensor],
    options: dict[str, Any],
) -> tuple[Tensor, GenerationStats]:
    stats = GenerationStats()
    custom = decoding(target, drafter, stats=stats)
    return _generate(target, inputs, options | {"custom_generate": custom}), stats


def _goes_wrong(
    target: TargetModel,
    drafter: PlantedDrafter,
    inputs: dict[str, Tensor],
    options: dict[str, Any],
    expected_BT: Tensor,
) -> bool:
    try:
        got_BT, _ = _decode(target, drafter, inputs, options)
    except (RuntimeError, ValueError, IndexError):
        return True  # an error is noticed, too
    return not torch.equal(got_BT, expected_BT)


def _new(sequences_BT: Tensor) -> list[list[int]]:
    return sequences_BT[:, PROMPT:].tolist()


def one_line(error: Exception) -> str:
    """The error's type and the beginning of its message."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:160]}"
