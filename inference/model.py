"""A target with its heads attached."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_heads.adapter import ADAPTER_FOLDER, load_adapter
from medusa_heads.checkpoint import load_heads
from medusa_heads.compiled import CompiledTarget
from medusa_heads.heads import DraftHeads
from medusa_heads.inference.assisted import AssistedModel
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.by_rows import ByRowsDrafter, rounded_up
from medusa_heads.inference.tree_plan import TreeSpec, make_drafter
from medusa_heads.inference.tree_size import best_tree
from medusa_heads.statistics import HeadStatistics
from medusa_heads.stored_heads import read_sidecar
from medusa_heads.target import TargetModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNMEASURED_TREE = "chain"  # heads without statistics: nothing says where branches would pay


class MedusaModel(AssistedModel):
    """A target that drafts for itself.

    Args:
        target: the causal LM; it is not modified.
        heads: heads that fit it.
        statistics: measured ranks of the heads, from which the best tree of a size is built.
        tree: which tree to draft, in the words of tree_plan.py: `"auto"`, a number of nodes,
            `"dynamic:16"`, .., or the tree itself as a list of rank paths.
        acceptance: `"lossless"`, or a lossy rule: `"typical"`, `"threshold"`, `"log_ratio"`.
        acceptance_settings: of a lossy rule, such as `{"epsilon": 0.09, "delta": 0.3}`.
        compile: verify through torch.compile: one graph over a cache of fixed size, replayed as a
            CUDA graph on a GPU. The first text takes the seconds of compiling.
        compile_backend: of torch.compile.

    Raises:
        ValueError: heads or tree do not fit the target.
        UnsupportedArchitecture: the target cannot be decoded exactly with a tree.
    """

    def __init__(
        self,
        target: TargetModel | PreTrainedModel,
        heads: DraftHeads,
        *,
        statistics: HeadStatistics | None = None,
        tree: TreeSpec = "auto",
        acceptance: str = "lossless",
        acceptance_settings: Mapping[str, float] | None = None,
        compile: bool = False,
        compile_backend: str | Callable[..., Any] = "inductor",
    ) -> None:
        super().__init__(
            target,
            acceptance=acceptance,
            acceptance_settings=acceptance_settings,
            compile=compile,
            compile_backend=compile_backend,
        )
        heads.share(self.target)
        self.heads = heads.to(device=self.target.device, dtype=self.target.dtype).eval()
        self.statistics = statistics
        self.use_tree(tree)

    def use_tree(self, tree: TreeSpec) -> None:
        """Draft this tree from now on; `self.tree` says which it is, also where `auto` chose.

        What `auto` chose is for one row. A batch is measured when it first comes, and drafts with
        the tree that its number of rows decodes fastest with, whatever `self.tree` says.

        Raises:
            ValueError: an unknown form, or a tree that does not fit the heads.
        """
        measured = self.statistics is not None and not self._chain_only
        self._by_rows: dict[int, Drafter] = {}  # where batches choose for themselves
        self._chooses = tree == "auto" and measured
        if tree == "auto":
            tree = self._fastest(1) if measured else UNMEASURED_TREE
        self.tree = tree
        self.drafter = self._make_drafter(tree)

    def _drafter_for(self, batch_size: int) -> Drafter:
        if not self._chooses or batch_size == 1:
            return self.drafter
        rows = rounded_up(batch_size)
        # Rows of a compiled target stay to the end, and what has read the prompt must go on.
        if isinstance(self.target, CompiledTarget) or self.drafter.reads_prompt:
            return self._drafter_for_rows(rows)
        return ByRowsDrafter(self._drafter_for_rows, rows)

    def _drafter_for_rows(self, rows: int) -> Drafter:
        if rows not in self._by_rows:
            self._by_rows[rows] = self._make_drafter(self._fastest(rows))
        return self._by_rows[rows]

    def _fastest(self, rows: int) -> str:
        assert self.statistics is not None
        return best_tree(self.target, self.heads, self.statistics, batch_size=rows)

    def _make_drafter(self, tree: TreeSpec) -> Drafter:
        return make_drafter(
            tree,
            self.heads,
            self.statistics,
            chain_only=self._chain_only,
            with_log_probs=self.acceptance in ("threshold", "log_ratio"),
        )

    @classmethod
    def from_pretrained(
        cls,
        checkpoint: str | os.PathLike[str],
        *,
        target: str | TargetModel | PreTrainedModel | None = None,
        tree: TreeSpec = "auto",
        acceptance: str = "lossless",
        acceptance_settings: Mapping[str, float] | None = None,
        compile: bool = False,
        merge_adapter: bool = False,
        **target_kwargs: Any,
    ) -> MedusaModel:
        """Load a heads checkpoint and its target, and the adapter they were trained with if any.

        An adapter makes another model of the target: lossless then means the text of the target
        with its adapter. A target that is loaded here gets it; one in memory must carry it.

        Args:
            checkpoint: folder written by train-heads.
            target: a model in memory, or a hub id or path; by default the one the heads name.
            tree, acceptance, acceptance_settings, compile: see the class.
            merge_adapter: add the adapter to the target's matrices: faster, and in bf16 rounded.
            target_kwargs: passed on when the target is loaded, such as `dtype` or `device_map`.

        Raises:
            ValueError: checkpoint or target missing, damaged, or not belonging together.
        """
        if target is None:
            target = named_target(checkpoint)
        adapted = None
        if isinstance(target, str | os.PathLike):
            target = TargetModel.from_pretrained(str(target), **target_kwargs)
            if read_sidecar(checkpoint).get("adapter") is not None:
                adapted = load_adapter(target.model, Path(checkpoint) / ADAPTER_FOLDER)
        elif target_kwargs:
            raise ValueError(
                f"{sorted(target_kwargs)} apply to a target that is loaded here, but one in memory "
                "was given: leave them out"
            )
        view = target if isinstance(target, TargetModel) else TargetModel(target)
        loaded = load_heads(checkpoint, view)
        if merge_adapter:
            if adapted is None:
                raise ValueError(
                    "merge_adapter merges an adapter that is loaded here, and there is none: "
                    "leave it out"
                )
            adapted.merge_and_unload()
        return cls(
            view,
            loaded.heads,
            statistics=loaded.statistics,
            tree=tree,
            acceptance=acceptance,
            acceptance_settings=acceptance_settings,
            compile=compile,
        )


def named_target(checkpoint: str | os.PathLike[str]) -> str:
    """Hub id or path of the target that a checkpoint names.

    Raises:
        ValueError: not a checkpoint, or it names none.
    """
    name = (read_sidecar(checkpoint).get("target") or {}).get("name_or_path")
    if not name:
        raise ValueError(
            f"the checkpoint {str(checkpoint)!r} does not name its target: pass target="
        )
    # A relative path was relative to where training ran; try it from the checkpoint as well.
    beside = Path(checkpoint) / name
    return str(beside) if not Path(name).exists() and beside.exists() else name
