"""A target with a draft model attached, or with several of which the fastest drafts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from medusa_heads.checkpoint.draft_checkpoint import check_vocabulary, read_draft_sidecar
from medusa_heads.contents import is_draft
from medusa_heads.hub.names import split_revision
from medusa_heads.inference.adapt.measure import SIZES, room, target_clock
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.model.adaptive_tree import AdaptiveTree
from medusa_heads.inference.drafters.model.chosen_draft import ChosenDraftDrafter
from medusa_heads.inference.models.assisted import AssistedModel
from medusa_heads.inference.models.named_target import load_target, named_target
from medusa_heads.inference.plan.draft import DraftPlan, draft_plan
from medusa_heads.target.compiled import CompiledTarget
from medusa_heads.target.target import TargetModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT_DEPTH = 4  # tokens that a chain drafts where nothing else is said


class DraftedModel(AssistedModel):
    """A target for which a small model drafts.

    Args:
        target: the causal LM; it is not modified.
        draft: a causal LM with the target's token ids; put into evaluation mode. Of several, the
            one drafts that has made the most tokens a second here so far, by measured costs; each
            keeps a cache of its own.
        tree: `"chain"` or `"chain:6"`, the draft's likeliest tokens in a row; `"dynamic:12"`, the
            12 likeliest nodes of a tree; `"sampled:6"`, tokens drawn in a row where the target's
            are drawn; `"sampled:3x2x1"`, a tree with 3 drawn tokens behind the text, 2 behind each
            of them, 1 behind each of those; `"auto"`, a tree, drawn where the target's tokens
            are drawn, that grows as long as its next ones gain more than they cost here.
        depth: tokens that a chain without a number, or a tree, is deep.
        acceptance, acceptance_settings, compile, compile_backend: see AssistedModel.

    Raises:
        ValueError: another vocabulary, no draft model, or a tree that cannot be drafted.
        UnsupportedArchitecture: one of the models cannot be decoded exactly with drafts.
    """

    def __init__(
        self,
        target: TargetModel | PreTrainedModel,
        draft: TargetModel | PreTrainedModel | Sequence[TargetModel | PreTrainedModel],
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
        given = list(draft) if isinstance(draft, Sequence) else [draft]
        if not given:
            raise ValueError("expected at least one draft model, got none")
        self.drafts: list[TargetModel] = []
        for each in given:
            self.drafts.append(each if isinstance(each, TargetModel) else TargetModel(each))
            self.drafts[-1].model.eval()
            check_vocabulary(self.drafts[-1], self.target)
        self.use_tree(tree, depth)

    def use_tree(self, tree: str, depth: int = DEFAULT_DEPTH) -> None:
        """Draft this from now on; `self.tree` says what it is.

        Raises:
            ValueError: an unknown form, or more nodes than a draft model will offer.
        """
        plan = draft_plan(
            tree,
            depth,
            chain_only=self._chain_only,
            one_size=isinstance(self.target, CompiledTarget),
        )
        self.drafter, self.tree = self._drafting(plan), plan.tree

    @property
    def draft(self) -> TargetModel:
        """The draft model; of several, the first."""
        return self.drafts[0]

    @property
    def draft_steps(self) -> list[int]:
        """For how many steps each draft model has drafted so far, where that is chosen."""
        if isinstance(self.drafter, ChosenDraftDrafter):
            return list(self.drafter.steps)
        return [0] * len(self.drafts)

    def _drafting(self, plan: DraftPlan) -> Drafter:
        vocab_size = self.target.vocab_size
        if len(self.drafts) == 1 and not plan.adaptive:
            only = plan.drafter(self.draft, vocab_size)
            assert not isinstance(only, AdaptiveTree)
            return only
        clocks = [target_clock(draft) for draft in self.drafts]
        drafters = [
            (plan.drafter(draft, vocab_size, clock), clock)
            for draft, clock in zip(self.drafts, clocks, strict=True)
        ]
        most = min(max(SIZES), room(self.target) - 1) if plan.adaptive else 0
        return ChosenDraftDrafter(target_clock(self.target), drafters, most)

    @classmethod
    def from_pretrained(
        cls,
        draft: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        target: str | os.PathLike[str] | TargetModel | PreTrainedModel | None = None,
        tree: str = "auto",
        depth: int = DEFAULT_DEPTH,
        acceptance: str = "lossless",
        acceptance_settings: Mapping[str, float] | None = None,
        compile: bool = False,
        **target_kwargs: Any,
    ) -> DraftedModel:
        """Load a draft model, or several, and their target.

        Args:
            draft: a hub id (`user/name` or `user/name@revision`), or a folder such as train-draft
                writes; or a list of them.
            target: a model in memory, or a hub id or path; by default the one the draft names.
            tree, depth, acceptance, acceptance_settings, compile: see the class.
            target_kwargs: passed on when the target is loaded, such as `dtype` or `device`.

        Raises:
            ValueError: one of them is missing or damaged, they have different vocabularies, or no
                target is given and they name different ones.
        """
        folders = [draft] if isinstance(draft, str | os.PathLike) else list(draft)
        if not folders:
            raise ValueError("expected at least one draft model, got none")
        check_once(folders)
        if target is None:
            _check_one_target(folders)
        if target is None or isinstance(target, str | os.PathLike):
            view = load_target(folders[0], target, read=read_draft_sidecar, **target_kwargs)
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
            [_load(folder, view, trust_remote_code=trusted) for folder in folders],
            tree=tree,
            depth=depth,
            acceptance=acceptance,
            acceptance_settings=acceptance_settings,
            compile=compile,
        )


def check_once(names: Sequence[str | os.PathLike[str]]) -> None:
    """Raises ValueError where a draft model is named twice."""
    known: set[str] = set()
    for name in names:
        plain = os.path.normpath(name)
        if plain in known:
            raise ValueError(f"the draft model {os.fspath(name)!r} is given twice: name it once")
        known.add(plain)


def _load(name: str | os.PathLike[str], beside: TargetModel, **options: Any) -> TargetModel:
    """A draft model in the target's dtype, on its device."""
    folder, revision = split_revision(name)
    options |= {"dtype": beside.dtype, "device": beside.device, "revision": revision}
    return TargetModel.from_pretrained(folder, **options)


def _check_one_target(folders: Sequence[str | os.PathLike[str]]) -> None:
    """Draft models that were trained for different targets are not for one.

    Raises:
        ValueError: they name different ones.
    """
    first = named_target(folders[0], read_draft_sidecar)
    for folder in folders[1:]:
        if is_draft(folder) and named_target(folder, read_draft_sidecar) != first:
            raise ValueError(
                f"{str(folder)!r} drafts for another target than {str(folders[0])!r}: pass target="
            )
