"""A target with a draft model attached, or with several of which the fastest drafts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from medusa_heads.checkpoint.draft_checkpoint import load_draft, read_draft_sidecar
from medusa_heads.contents import is_draft
from medusa_heads.hub.names import split_revision
from medusa_heads.inference.adapt.measure import room, target_clock
from medusa_heads.inference.adapt.step_bench import SIZES
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.extra.chosen_draft import ChosenDraftDrafter
from medusa_heads.inference.drafters.model.draft_model import DraftModelDrafter
from medusa_heads.inference.drafters.model.vocabulary import ForeignDraft, fitted
from medusa_heads.inference.models.assisted import AssistedModel, EngineOptions
from medusa_heads.inference.models.named_target import load_target, named_target
from medusa_heads.inference.plan.draft import draft_plan
from medusa_heads.target.graphs.captured import as_it_is
from medusa_heads.target.target import TargetModel

if TYPE_CHECKING:  # heavy to import
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from typing_extensions import Unpack

DEFAULT_DEPTH = 4  # tokens that a chain drafts where nothing else is said
Names = Sequence[str | os.PathLike[str]]
Tokenizer: TypeAlias = "PreTrainedTokenizerBase"


class DraftedModel(AssistedModel):
    """A target for which a small model drafts.

    Args:
        target: the causal LM. It is not changed.
        draft: a causal LM, or several; the fastest of them drafts. One with another vocabulary
            drafts the tokens that both have.
        tree: `"auto"`, `"chain"`, `"chain:6"`, `"dynamic:12"`, `"sampled:6"` or `"sampled:3x2x1"`.
        depth: tokens that a chain without a number, or a tree, is deep.
        draft_tokenizer: of the draft model, or of each; by default it is looked for where that came
            from, as is the target's.
        target_tokenizer: of the target.
        options: `acceptance`, `acceptance_settings`, `rng`, `compile`, `compile_backend`: see
            AssistedModel.

    With `rng="transformers"` drafts of `"auto"` and `"sampled"` trees are drawn themselves: a text
    has the target's law, and is not that of `generate()` with the same seed.

    `plan/draft.py` says what the words for trees mean. Draft models are put into evaluation mode;
    each keeps a cache of its own.

    Raises:
        ValueError: another vocabulary without tokenizers, or with hardly a token of the target's;
            no draft model; or a tree that cannot be drafted.
        UnsupportedArchitecture: one of the models cannot be decoded exactly with drafts.
    """

    def __init__(
        self,
        target: TargetModel | PreTrainedModel,
        draft: TargetModel | PreTrainedModel | Sequence[TargetModel | PreTrainedModel],
        *,
        tree: str = "auto",
        depth: int = DEFAULT_DEPTH,
        draft_tokenizer: Tokenizer | Sequence[Tokenizer | None] | None = None,
        target_tokenizer: Tokenizer | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        _check_compile(options.get("compile"))
        super().__init__(target, **options)
        given = list(draft) if isinstance(draft, Sequence) else [draft]
        if not given:
            raise ValueError("expected at least one draft model, got none")
        several = isinstance(draft_tokenizer, list | tuple)
        own: Any = draft_tokenizer if several else [draft_tokenizer] * len(given)
        if len(own) != len(given):
            raise ValueError(
                f"expected a draft_tokenizer for each of {len(given)} draft models, got {len(own)}"
            )
        self.drafts: list[TargetModel] = []
        for each, tokenizer in zip(given, own, strict=True):
            each = as_it_is(each) if isinstance(each, TargetModel) else TargetModel(each)
            each.model.eval()
            self.drafts.append(fitted(each, self.target, tokenizer, target_tokenizer))
        self.use_tree(tree, depth)

    def use_tree(self, tree: str, depth: int = DEFAULT_DEPTH) -> None:
        """Draft this from now on; `self.tree` says what it is.

        Raises:
            ValueError: an unknown form, or more nodes than a draft model will offer.
        """
        compiled = self.target.one_shape
        self._plan = draft_plan(tree, depth, chain_only=self._chain_only, one_size=compiled)
        self.drafter, self.tree = self._drafter_for(self.target), self._plan.tree

    def _drafter_for(self, target: TargetModel) -> Drafter:
        plan, vocab_size = self._plan, target.vocab_size
        if len(self.drafts) == 1 and not plan.adaptive:
            drafter = DraftModelDrafter(self.draft, vocab_size, **plan.options)
            if self.draft.device != target.device or hasattr(self.draft.model, "hf_device_map"):
                drafter.levels = None  # a graph is of one device
            return drafter
        clocks = [target_clock(draft) for draft in self.drafts]
        drafters = [
            (plan.drafter(draft, vocab_size, clock), clock)
            for draft, clock in zip(self.drafts, clocks, strict=True)
        ]
        most = min(max(SIZES), room(target) - 1) if plan.adaptive else 0
        return ChosenDraftDrafter(target_clock(target), drafters, most)

    @property
    def draft(self) -> TargetModel:
        """The draft model; of several, the first."""
        return self.drafts[0]

    @property
    def shared_vocabulary(self) -> list[float]:
        """The share of the target's tokens that each draft model has, and so can draft."""
        return [
            each.vocabulary.share if isinstance(each, ForeignDraft) else 1.0 for each in self.drafts
        ]

    @property
    def draft_steps(self) -> list[int]:
        """For how many steps each draft model has drafted so far, where that is chosen."""
        if isinstance(self.drafter, ChosenDraftDrafter):
            return list(self.drafter.steps)
        return [0] * len(self.drafts)

    @classmethod
    def from_pretrained(
        cls,
        draft: str | os.PathLike[str] | Names,
        *,
        target: str | os.PathLike[str] | TargetModel | PreTrainedModel | None = None,
        **options: Any,
    ) -> DraftedModel:
        """Load a draft model, or several, and their target.

        Args:
            draft: a hub id (`user/name` or `user/name@revision`), or a folder such as train-draft
                writes; or a list of them.
            target: a model in memory, or a hub id or path. By default the draft model names it.
            options: of the class, such as `tree`. The rest are for loading the target: `dtype`,
                `device`, ..

        Raises:
            ValueError: one of them is missing or damaged, has another vocabulary and no tokenizer,
                or no target is given and they name different ones.
        """
        folders = [draft] if isinstance(draft, str | os.PathLike) else list(draft)
        if not folders:
            raise ValueError("expected at least one draft model, got none")
        check_once(folders)
        if target is None:
            _check_one_target(folders)
        own = cls._own_options(options)
        words, depth = own.get("tree", "auto"), own.get("depth", DEFAULT_DEPTH)
        draft_plan(words, depth, chain_only=False, one_size=False)  # before seconds of loading
        _check_compile(own.get("compile"))
        view = load_target(folders[0], target, read=read_draft_sidecar, **options)
        trusted = bool(options.get("trust_remote_code"))
        drafts = load_drafts(folders, view, trust_remote_code=trusted)
        return cls(view, drafts, **own)


def _check_compile(compile: object) -> None:
    """Raises ValueError where it would be exchanged in the middle of a text."""
    if compile == "auto":
        raise ValueError(
            "a draft model drafts otherwise for a compiled target: say compile=True or leave it out"
        )


def load_drafts(
    names: Names, target: TargetModel, *, trust_remote_code: bool = False
) -> list[TargetModel]:
    """Draft models by hub id (perhaps with a revision) or folder, in the target's dtype, on its
    device. Raises ValueError: nothing loadable."""
    options: Any = {"trust_remote_code": trust_remote_code}
    found = map(split_revision, names)
    return [load_draft(name, target, revision=revision, **options) for name, revision in found]


def check_once(names: Names) -> None:
    """Raises ValueError where a draft model is named twice."""
    known: set[str] = set()
    for name in names:
        plain = os.path.normpath(name)
        if plain in known:
            raise ValueError(f"the draft model {os.fspath(name)!r} is given twice: name it once")
        known.add(plain)


def _check_one_target(folders: Names) -> None:
    """Raises ValueError where draft models were trained for different targets."""
    first = named_target(folders[0], read_draft_sidecar)
    for folder in folders[1:]:
        if is_draft(folder) and named_target(folder, read_draft_sidecar) != first:
            raise ValueError(
                f"{str(folder)!r} drafts for another target than {str(folders[0])!r}: pass target="
            )
