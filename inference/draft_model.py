"""A target with a draft model attached."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from medusa_heads.compiled import CompiledTarget
from medusa_heads.draft_checkpoint import check_vocabulary, read_draft_sidecar
from medusa_heads.inference.assisted import AssistedModel
from medusa_heads.inference.draft_costs import draft_costs
from medusa_heads.inference.drafters.adaptive_chain import AdaptiveChainDrafter
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.by_rows import rounded_up
from medusa_heads.inference.drafters.draft_model import DraftModelDrafter
from medusa_heads.inference.drafters.sampled_tree import SampledTreeDrafter
from medusa_heads.inference.named_target import load_target
from medusa_heads.target import TargetModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT_DEPTH = 4  # tokens that a chain drafts where nothing else is said
_NODES_A_PATH = 6  # of a tree, for each path that is read at a time


class DraftedModel(AssistedModel):
    """A target for which a small model drafts.

    Args:
        target: the causal LM; it is not modified.
        draft: a causal LM with the target's token ids; put into evaluation mode.
        tree: `"chain"` or `"chain:6"`, the draft's likeliest tokens in a row; `"dynamic:12"`, the
            12 likeliest nodes of a tree; `"sampled:6"`, tokens drawn in a row where the target's
            are drawn; `"sampled:3x2x1"`, a tree with 3 drawn tokens behind the text, 2 behind each
            of them, 1 behind each of those; `"auto"`, a row of tokens, drawn where the target's
            are drawn, that ends where the next one would cost more than it gains here.
        depth: tokens that a chain without a number, or a tree, is deep.
        acceptance, acceptance_settings, compile, compile_backend: see AssistedModel.

    Raises:
        ValueError: another vocabulary, or a tree that cannot be drafted.
        UnsupportedArchitecture: one of the models cannot be decoded exactly with drafts.
    """

    def __init__(
        self,
        target: TargetModel | PreTrainedModel,
        draft: TargetModel | PreTrainedModel,
        *,
        tree: str = "auto",
        depth: int = DEFAULT_DEPTH,
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
        self.draft = draft if isinstance(draft, TargetModel) else TargetModel(draft)
        self.draft.model.eval()
        check_vocabulary(self.draft, self.target)
        self.use_tree(tree, depth)

    def use_tree(self, tree: str, depth: int = DEFAULT_DEPTH) -> None:
        """Draft this from now on; `self.tree` says what it is.

        Raises:
            ValueError: an unknown form, or more nodes than the draft model will offer.
        """
        self._adaptive: dict[int, AdaptiveChainDrafter] = {}
        kind, _, number = tree.partition(":")
        if tree == "auto" and not isinstance(self.target, CompiledTarget):
            self.drafter, self.tree = self._adaptive_for(1), tree
            return
        if tree == "auto":
            kind = "chain"  # one graph, whatever the draft's length: a fixed one
        numbers = number.split("x") if kind == "sampled" else [number]
        if number and not all(each.isdigit() and int(each) for each in numbers):
            raise ValueError(f"a draft has at least 1 token, got {tree!r}")
        if kind == "sampled" and number:
            levels = [int(each) for each in numbers]
            if len(levels) == 1:
                levels = [1] * levels[0]
            elif self._chain_only:
                levels = [1] * len(levels)
            self.drafter = SampledTreeDrafter(self.draft, self.target.vocab_size, levels)
            chain = max(levels) == 1
            self.tree = f"sampled:{len(levels)}" if chain else tree
            return
        if kind == "chain" or (kind == "dynamic" and number and self._chain_only):
            shape = {"depth": int(number) if kind == "chain" and number else depth}
        elif kind == "dynamic" and number:
            nodes = int(number)
            width = max(2, -(-nodes // _NODES_A_PATH))
            shape = {"depth": depth, "width": width, "num_drafted": nodes}
        else:
            raise ValueError(
                "a draft model's tree must be auto, chain, chain:N, dynamic:N, sampled:N or "
                f"sampled:AxBx.., got {tree!r}"
            )
        self.drafter = DraftModelDrafter(self.draft, self.target.vocab_size, **shape)
        self.tree = f"chain:{shape['depth']}" if "width" not in shape else tree

    def _drafter_for(self, batch_size: int) -> Drafter:
        if self.tree != "auto" or batch_size == 1:
            return self.drafter
        return self._adaptive_for(batch_size)

    def _adaptive_for(self, batch_size: int) -> AdaptiveChainDrafter:
        rows = rounded_up(batch_size)
        if rows not in self._adaptive:
            costs = draft_costs(self.target, self.draft, rows)
            vocab_size = self.target.vocab_size
            self._adaptive[rows] = AdaptiveChainDrafter(self.draft, vocab_size, costs)
        return self._adaptive[rows]

    @classmethod
    def from_pretrained(
        cls,
        draft: str | os.PathLike[str],
        *,
        target: str | os.PathLike[str] | TargetModel | PreTrainedModel | None = None,
        tree: str = "auto",
        depth: int = DEFAULT_DEPTH,
        acceptance: str = "lossless",
        acceptance_settings: Mapping[str, float] | None = None,
        compile: bool = False,
        **target_kwargs: Any,
    ) -> DraftedModel:
        """Load a draft model and its target.

        Args:
            draft: a hub id, or a folder such as train-draft writes.
            target: a model in memory, or a hub id or path; by default the one the draft names.
            tree, depth, acceptance, acceptance_settings, compile: see the class.
            target_kwargs: passed on when the target is loaded, such as `dtype` or `device`.

        Raises:
            ValueError: one of them is missing or damaged, or they have different vocabularies.
        """
        if target is None or isinstance(target, str | os.PathLike):
            view = load_target(draft, target, read=read_draft_sidecar, **target_kwargs)
        elif target_kwargs:
            raise ValueError(
                f"{sorted(target_kwargs)} apply to a target that is loaded here, but one in memory "
                "was given: leave them out"
            )
        else:
            view = target if isinstance(target, TargetModel) else TargetModel(target)
        trusted = bool(target_kwargs.get("trust_remote_code"))
        return cls(
            view,
            TargetModel.from_pretrained(
                str(draft), dtype=view.dtype, device=view.device, trust_remote_code=trusted
            ),
            tree=tree,
            depth=depth,
            acceptance=acceptance,
            acceptance_settings=acceptance_settings,
            compile=compile,
        )
