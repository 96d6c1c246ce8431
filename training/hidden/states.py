"""Where the hidden states of a batch come from: the target itself, or a cache of what it computed.

Shapes: B batch, T tokens, D hidden, M rows that are not in the cache, P kept positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from torch.utils.data import get_worker_info
from transformers import TrainerCallback

from medusa_heads.target.target import TargetModel
from medusa_heads.training.data.prepare import collate
from medusa_heads.training.hidden.cache_index import CacheError
from medusa_heads.training.hidden.cached_rows import KeptPositions, collate_named, names_of
from medusa_heads.training.hidden.store import HiddenCache, all_finite


class HiddenStates:
    """The target, run on every batch.

    Args:
        target: the frozen model.
    """

    def __init__(self, target: TargetModel) -> None:
        self.target = target

    @property
    def collate(self) -> Any:
        """What makes batches of rows."""
        return collate

    @property
    def callbacks(self) -> list[TrainerCallback]:
        """For the Trainer."""
        return []

    def of(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """hidden_BTD of a batch that `collate` made, on the target's device."""
        return self.target.hidden(
            inputs["input_ids"], inputs.get("attention_mask"), inputs.get("position_ids")
        )

    def flush(self) -> None:
        """Write down what is only in memory."""


class CachedHiddenStates(HiddenStates):
    """Rows that a cache holds are read from it; the target runs on the others, and they are kept.

    At positions that are not kept (see `KeptPositions`) hidden states read back are 0. Those of a
    row are the ones of the batch it was first in: in bf16 other batches round differently.

    Args:
        target: the frozen model.
        caches: of the datasets that batches come from.
        kept: positions that the caches hold.
    """

    def __init__(
        self, target: TargetModel, caches: Sequence[HiddenCache], kept: KeptPositions
    ) -> None:
        super().__init__(target)
        self.caches = caches
        self.read_only = all(cache.read_only for cache in caches)
        self.kept = kept
        if not self.read_only:
            self._share_rows()

    @property
    def collate(self) -> Any:
        return CacheCollator(self.caches, self.kept)

    @property
    def callbacks(self) -> list[TrainerCallback]:
        return [] if self.read_only else [CacheKeeper(self)]

    def of(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """hidden_BTD, likewise.

        Raises:
            CacheError: a row must be read, and cannot be.
            ValueError: what the target computed is not finite.
        """
        device = self.target.device
        if "hidden" in inputs:
            return inputs["hidden"].to(device)
        kept_BT = inputs["kept"]
        names = list(names_of(inputs["row_names"]))
        hidden_BTD, missing = read_batch(self.caches, names, kept_BT.cpu())
        if not missing:
            return hidden_BTD.to(device)
        if self.read_only:
            raise CacheError(
                f"the hidden-state cache in {self.caches[0].folder.parent} lacks a row of the "
                "text: fill it with hidden_cache auto"
            )
        rows_M = torch.tensor(missing, device=device)
        absent = [names[b] for b in missing]
        if len(missing) == int(kept_BT.any(dim=1).sum()):
            # A batch of which nothing is known is computed as it would be without a cache.
            computed_BTD = super().of(inputs)
            self._keep(absent, computed_BTD[rows_M], kept_BT[rows_M])
            return computed_BTD
        computed_MTD = super().of({name: value[rows_M] for name, value in inputs.items()})
        self._keep(absent, computed_MTD, kept_BT[rows_M])
        hidden_BTD = hidden_BTD.to(device)
        hidden_BTD[rows_M] = computed_MTD
        return hidden_BTD

    def _share_rows(self) -> None:
        """Give each cache the rows that only another holds, as where a run was killed between."""
        for cache in self.caches:
            for name in cache.missing():
                found = next((other.read(name) for other in self.caches if name in other), None)
                if found is not None:
                    cache.add(name, found)

    def _keep(self, names: Sequence[str], hidden_MTD: Tensor, kept_MT: Tensor) -> None:
        kept = hidden_MTD[kept_MT].cpu()
        refuse_not_finite(kept)
        counts = kept_MT.sum(dim=1).tolist()
        for name, hidden_PD in zip(names, kept.split(counts), strict=True):
            for cache in self.caches:
                if name in cache.plan.counts and name not in cache:
                    cache.add(name, hidden_PD)

    def flush(self) -> None:
        for cache in self.caches:
            cache.flush()

    def share(self) -> None:
        """Let all processes see what each has written; called by all of them together."""
        self.flush()
        if PartialState().num_processes > 1:
            PartialState().wait_for_everyone()
            for cache in self.caches:
                cache.refresh()


class CacheCollator:
    """Makes batches; in a worker of a data loader also reads their hidden states, ahead of use.

    Args:
        caches: as far as they were filled when the worker began.
        kept: positions that they hold.
    """

    def __init__(self, caches: Sequence[HiddenCache], kept: KeptPositions) -> None:
        self.caches = caches
        self.kept = kept

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        batch = collate_named(rows, self.kept)
        # Without workers there is nothing to overlap with, and batches that wait for their turn
        # in a large optimiser step had better be small.
        if get_worker_info() is not None:
            names = list(names_of(batch["row_names"]))
            try:
                hidden_BTD, missing = read_batch(self.caches, names, batch["kept"])
            except CacheError:
                return batch  # the main process meets it too, and says it in one sentence
            if not missing:
                batch["hidden"] = hidden_BTD
        return batch


def refuse_not_finite(hidden: Tensor) -> None:
    """Raises ValueError where hidden states of a target hold NaN or an infinity."""
    if not all_finite(hidden):
        raise ValueError(
            f"the target's hidden states are not finite in {hidden.dtype}: load it in another "
            "dtype, bfloat16 or float32"
        )


class CacheKeeper(TrainerCallback):
    """Writes the cache where the Trainer pauses, after each pass."""

    def __init__(self, states: CachedHiddenStates) -> None:
        self.states = states

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.states.share()

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self.states.share()

    def on_predict(self, *_: Any, **__: Any) -> None:
        self.states.share()


def read_batch(
    caches: Sequence[HiddenCache], names: Sequence[str], kept_BT: Tensor
) -> tuple[Tensor, list[int]]:
    """hidden_BTD on the CPU, 0 where nothing is known, and the rows b that no cache holds.

    Raises:
        CacheError: a file cannot be used, and may not be rewritten.
    """
    width, dtype = caches[0].key.hidden_size, caches[0].dtype
    hidden_BTD = torch.zeros(*kept_BT.shape, width, dtype=dtype)
    missing = []
    for b, name in enumerate(names):
        kept_P = kept_BT[b].nonzero().squeeze(1)
        count = len(kept_P)
        if not count:
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
