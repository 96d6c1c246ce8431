"""Where the hidden states of a batch come from: the target itself, or a cache of what it computed.

Shapes: B batch, T tokens, D hidden, M rows that are not in the cache, P kept positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from torch.utils.data import get_worker_info
from transformers import TrainerCallback

from medusa_heads.target.target import TargetModel
from medusa_heads.training.data.pack import hidden_of
from medusa_heads.training.data.prepare import collate
from medusa_heads.training.hidden.cached_rows import collate_named
from medusa_heads.training.hidden.sharding import any_process, is_sharded
from medusa_heads.training.hidden.store import CacheError, HiddenCache, all_finite

Batch = dict[str, Any]


class HiddenStates:
    """Those of a frozen target, run on every batch that `collate` made; callbacks are for the
    Trainer."""

    collate: Callable[[Sequence[Mapping[str, Any]]], Batch] = staticmethod(collate)
    callbacks: Sequence[TrainerCallback] = ()

    def __init__(self, target: TargetModel) -> None:
        self.target = target

    def of(self, inputs: Mapping[str, Any]) -> Tensor:
        """hidden_BTD of a batch that `collate` made, on the target's device."""
        return hidden_of(self.target, inputs)

    def flush(self) -> None:
        """Write down what is only in memory."""


class CachedHiddenStates(HiddenStates, TrainerCallback):
    """Rows that a cache holds are read from it; the target runs on the others, and they are kept.
    As a callback it writes the caches where the Trainer pauses, after each pass.

    At positions that are not kept (see `KeptPositions`) hidden states read back are 0. Those of a
    row are the ones of the batch it was first in: in bf16 other batches round differently.
    """

    def __init__(self, target: TargetModel, caches: Sequence[HiddenCache]) -> None:
        super().__init__(target)
        self.caches = caches
        self.read_only = all(cache.read_only for cache in caches)
        self.collate = partial(_collate_read, caches)
        if self.read_only:
            return
        self.callbacks = [self]
        # Rows that only another cache holds, as where a run was killed between.
        for cache in caches:
            for name in cache.missing():
                found = next((other.read(name) for other in caches if name in other), None)
                if found is not None:
                    cache.add(name, found)

    def of(self, inputs: Mapping[str, Any]) -> Tensor:
        """hidden_BTD, likewise; raises CacheError where a row must be read and cannot be."""
        device = self.target.device
        if "hidden" in inputs:
            self._run_with_others(False)
            return inputs["hidden"].to(device)
        names, kept_BT = inputs["row_names"], inputs["kept"]
        hidden_BTD, missing = read_batch(self.caches, names, kept_BT.cpu())
        if missing and self.read_only:
            raise CacheError(
                f"the hidden-state cache in {self.caches[0].folder.parent} lacks a row of the "
                "text: fill it with hidden_cache auto"
            )
        hidden_BTD = hidden_BTD.to(device)
        self._run_with_others(bool(missing))
        if not missing:
            return hidden_BTD
        rows_M = torch.tensor(missing, device=device)
        if len(missing) == int(kept_BT.any(dim=1).sum()):
            # A batch of which nothing is known is computed as it would be without a cache.
            hidden_BTD = super().of(inputs)
        else:
            tensors = {name: value for name, value in inputs.items() if name != "row_names"}
            hidden_BTD[rows_M] = super().of({k: value[rows_M] for k, value in tensors.items()})
        kept_MT = kept_BT[rows_M]
        kept = hidden_BTD[rows_M][kept_MT].cpu()
        refuse_not_finite(kept)
        parts = kept.split(kept_MT.sum(dim=1).tolist())
        for b, hidden_PD in zip(missing, parts, strict=True):
            for cache in self.caches:
                if names[b] in cache.plan.counts and names[b] not in cache:
                    cache.add(names[b], hidden_PD)
        return hidden_BTD

    def _run_with_others(self, needed: bool) -> None:
        """Where processes share the target, one that needs no row runs it for those that do."""
        if self.read_only or not is_sharded(self.target):
            return
        device = self.target.device
        if any_process(needed, device) and not needed:
            self.target.hidden(torch.zeros(1, 1, dtype=torch.long, device=device))

    def flush(self) -> None:
        for cache in self.caches:
            cache.flush()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Let all processes see what each has written; called by all of them together."""
        self.flush()
        if PartialState().num_processes > 1:
            PartialState().wait_for_everyone()
            for cache in self.caches:
                cache.refresh()

    on_evaluate = on_predict = on_epoch_end


def _collate_read(caches: Sequence[HiddenCache], rows: Sequence[Mapping[str, Any]]) -> Batch:
    """A batch, in a worker of a data loader with its hidden states, read ahead of use from the
    caches as far as they were filled when the worker began."""
    batch = collate_named(rows, caches[0].key.positions)
    # Without workers there is nothing to overlap with, and batches that wait for their turn in a
    # large optimiser step had better be small.
    if get_worker_info() is not None:
        try:
            hidden_BTD, missing = read_batch(caches, batch["row_names"], batch["kept"])
        except CacheError:
            return batch  # the main process meets it too, and says it in one sentence
        if not missing:
            batch["hidden"] = hidden_BTD
    return batch


def read_batch(
    caches: Sequence[HiddenCache], names: Sequence[str], kept_BT: Tensor
) -> tuple[Tensor, list[int]]:
    """hidden_BTD on the CPU, 0 where nothing is known, and the rows b that no cache holds."""
    shape = *kept_BT.shape, caches[0].key.hidden_size
    hidden_BTD = torch.zeros(shape, dtype=caches[0].dtype)
    missing = []
    for b, name in enumerate(names):
        kept_P = kept_BT[b].nonzero().squeeze(1)
        if not (count := len(kept_P)):
            continue
        found = (cache.read(name) for cache in caches if name in cache)
        hidden_PD = next((hidden for hidden in found if hidden is not None), None)
        if hidden_PD is None:
            missing.append(b)
            continue
        assert len(hidden_PD) == count, "the name of a row says which positions are kept"
        first, last = int(kept_P[0]), int(kept_P[-1])
        if last - first + 1 == count:  # in one piece, as most are: a plain copy
            hidden_BTD[b, first : last + 1] = hidden_PD
        else:
            hidden_BTD[b, kept_P] = hidden_PD
    return hidden_BTD, missing


def refuse_not_finite(hidden: Tensor) -> None:
    """Raises ValueError where hidden states of a target hold NaN or an infinity."""
    if not all_finite(hidden):
        raise ValueError(
            f"the target's hidden states are not finite in {hidden.dtype}: load it in another "
            "dtype, bfloat16 or float32"
        )
