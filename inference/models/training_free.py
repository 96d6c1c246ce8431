"""A target that drafts for itself without any training."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medusa_heads.checkpoint.mtp_checkpoint import read_mtp_sidecar
from medusa_heads.contents import is_mtp
from medusa_heads.files import expanded
from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.adapt.measure import room, sizes_for, target_clock
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.blended import BlendedDrafter
from medusa_heads.inference.drafters.recycling import RecycledTrees, RecyclingSource
from medusa_heads.inference.lookup.corpus_files import Corpus, find_corpus
from medusa_heads.inference.models.assisted import AssistedModel, EngineOptions
from medusa_heads.inference.models.named_target import load_target
from medusa_heads.inference.plan.adaptive import (
    blended,
    continues_text,
    merged_trees,
    takes_whole_steps,
)
from medusa_heads.inference.plan.trees import SUFFIX_TOKENS
from medusa_heads.target.graphs.captured import as_it_is
from medusa_heads.target.graphs.compiled import CompiledTarget
from medusa_heads.target.target import TargetModel

if TYPE_CHECKING:  # heavy to import
    from transformers import PreTrainedModel
    from typing_extensions import Unpack

DRAFTERS = (
    "auto", "suffix", "recycling", "lookahead", "lookahead+suffix",
    "early_exit", "early_exit+suffix",
)  # fmt: skip
OWN_MODULES = ("mtp", "mtp+suffix")  # of targets whose checkpoints bring what drafts
# What drafts for targets that verify chains alone.
_CHAINS = ("auto", "suffix", "early_exit", "mtp")


class TrainingFreeModel(AssistedModel):
    """A target for which a drafter drafts that was never trained.

    Args:
        target: the causal LM. It is not changed.
        drafter: which one, as below. Each verifies at every step as many nodes as pay here.
        corpus: text to copy from: a file, a folder, a saved index, or lists of token ids.
        calibration: token ids [B, T] without padding, to try on which layers can be left out.
        deterministic: take the same steps every time, and carry nothing from text to text.
        trust_remote_code: let the tokenizer that reads the corpus run code of its own.
        modules: folder in which modules were trained for the target, which then draft in place of
            its own: of `"mtp"`.
        options: `acceptance`, `acceptance_settings`, `rng`, `compile`, `compile_backend`: see
            AssistedModel.

    `"suffix"` drafts what followed where the text last ended as it does now; `"recycling"` what the
    target took to follow each token when it last read it, `"recycling:15"` always 15 tokens of
    these; `"auto"` both in one tree, or the text's own continuation alone where the target verifies
    chains alone. `"lookahead"` drafts n-grams of its own parallel guesses at
    later tokens; `"early_exit"` the target itself without the layers that its drafts can best do
    without, `"early_exit:4"` with its first 4 layers alone; `"mtp"` the multi-token-prediction
    modules of the target's own checkpoint. Each of these may have `+suffix` behind it. `"suffix"`,
    `"auto"` and all `+suffix` use a corpus.
    By default the target writes the calibration; what is found is kept on disk.

    Attributes:
        modules: see above.
        skipped_layers: of early exit: the layers, counted from 0, that drafts do without.

    Raises:
        ValueError: an unknown drafter, one whose trees the target cannot verify, or modules or a
            corpus that cannot be read, or a corpus that it does not continue.
        UnsupportedArchitecture: the target cannot be decoded exactly with drafts, or its layers
            cannot be left out.
    """

    def __init__(
        self,
        target: TargetModel | PreTrainedModel,
        drafter: str = "auto",
        *,
        corpus: Corpus | None = None,
        calibration: Tensor | None = None,
        deterministic: bool = False,
        trust_remote_code: bool = False,
        modules: str | os.PathLike[str] | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        if drafter.startswith("early_exit") and options.get("compile") is None:
            options["compile"] = False  # which runs some layers of the target alone
            target = as_it_is(target) if isinstance(target, TargetModel) else target
        compiled = options.get("compile") or isinstance(target, CompiledTarget)
        check_drafter(drafter, corpus, calibration, compiled, modules)
        super().__init__(target, **options)
        self._set_deterministic(deterministic)
        name, _, suffix = drafter.partition("+")
        name, _, kept = name.partition(":")
        if self._chain_only and name not in _CHAINS:
            raise ValueError(
                f"the drafter {drafter!r} adds branches, and this target verifies chains alone: "
                f"use one of {', '.join(_CHAINS)}"
            )
        self.method, self.modules = drafter, modules
        self._suffix = bool(suffix)
        self.skipped_layers: tuple[int, ...] = ()
        self._agreement: dict[str, float] = {}
        if name == "early_exit":
            self._find_stack(int(kept) if kept else None)
        if name == "mtp":
            from medusa_heads.inference.drafters.mtp import MtpDrafts

            self._mtp_drafts = MtpDrafts(self.target, modules)
        # Only now: to index a corpus may take a while, and to try layers as well.
        self.corpus = find_corpus(corpus, self.target, trust_remote_code=trust_remote_code)
        if name == "early_exit" and not kept:
            self._find_layers(calibration)
        self.drafter = self._drafter_for(self.target)

    def _drafter_for(self, target: TargetModel) -> Drafter:
        blend = partial(blended, target, corpus=self.corpus, deterministic=self.deterministic)
        name, _, size = self.method.partition("+")[0].partition(":")
        if name == "recycling" and size:
            return RecycledTrees(target.readable, int(size))
        if name == "lookahead":
            return self._lookahead(target, blend)
        if name == "early_exit":
            return self._early_exit(blend)
        if name == "mtp":
            return self._mtp(blend)
        own = name == "suffix" or self._chain_only
        sources = [] if own else [RecyclingSource(target.readable)]
        asks_nobody = self.corpus is None and not self.deterministic
        if name != "recycling" and asks_nobody and takes_whole_steps(target, self._chain_only):
            nodes = min(SUFFIX_TOKENS, room(target) - 1) if own else None
            return merged_trees(target, sources, recycles=not own, nodes=nodes)
        return blend(sources, text=name != "recycling", chain_only=own)

    @classmethod
    def from_pretrained(
        cls, target: str | os.PathLike[str], drafter: str = "auto", **options: Any
    ) -> TrainingFreeModel:
        """Load a target by hub id or path, and let it draft for itself.

        Args:
            target: hub id or local folder of a causal LM; or a folder of modules that were trained
                for one, which then draft.
            drafter: see the class.
            options: of the class. The rest are for loading the target: `dtype`, `device`, ..

        Raises:
            ValueError: nothing loadable stands there, or see the class.
        """
        own = cls._own_options(options)
        named = is_mtp(expanded(target))
        if named:
            own["modules"] = target = expanded(target)
        # Before seconds of loading.
        parts = ("corpus", "calibration", "compile", "modules")
        check_drafter(drafter, *(own.get(name) for name in parts))
        if named:
            loaded = load_target(target, None, read=read_mtp_sidecar, **options)
        else:
            loaded = TargetModel.from_pretrained(str(target), **options)
        return cls(loaded, drafter, **own)

    def _lookahead(self, target: TargetModel, blend: Callable[..., BlendedDrafter]) -> Drafter:
        from medusa_heads.inference.drafters.extra import lookahead

        clock = Clock.flat() if self.deterministic else target_clock(target)
        pool = lookahead.NgramPool()
        drafts = blend([lookahead.NgramSource(pool)], text=self._suffix, clock=clock)
        # Compiled, the window stays: steps without one would be another graph.
        always = self.deterministic or target.one_shape
        return lookahead.LookaheadDrafter(drafts, pool, clock, always=always)

    def _find_stack(self, kept: int | None) -> None:
        from medusa_heads.inference.drafters.extra.early_exit import ExitClock
        from medusa_heads.inference.drafters.extra.layer_stack import LayerStack

        self._stack = LayerStack(self.target)
        layers = len(self._stack)
        if kept is not None:
            if kept >= layers:
                raise ValueError(
                    f"early_exit:N keeps at least 1 of the target's {layers} layers and "
                    f"leaves one out, got {self.method!r}"
                )
            self.skipped_layers = tuple(range(kept, layers))
        if self.deterministic:
            self._exit_clock = lambda: ExitClock(Clock.flat(), layers, 1.0 / layers)
        else:
            self._exit_clock = lambda: ExitClock.measured(self.target, self._stack)

    def _find_layers(self, calibration: Tensor | None) -> None:
        from medusa_heads.inference.drafters.extra.skip_search import best_skip_set

        vocab_size = self.target.vocab_size
        if calibration is not None:
            if not (
                isinstance(calibration, Tensor)
                and calibration.dtype in (torch.int32, torch.int64)
                and calibration.ndim == 2
                and calibration.numel()
                and 0 <= calibration.min() <= calibration.max() < vocab_size
            ):
                what = getattr(calibration, "dtype", type(calibration).__name__)
                raise ValueError(
                    f"calibration must be token ids [B, T] from 0 to {vocab_size - 1}, got {what} "
                    f"of shape {list(getattr(calibration, 'shape', []))}"
                )
            self.target.check_length(calibration.shape[1], "calibration", "give shorter text")
        self.skipped_layers, self._agreement["agreement"] = best_skip_set(
            self.target, self._stack, self._exit_clock(), max(sizes_for(self.target)), calibration
        )

    def _early_exit(self, blend: Callable[..., BlendedDrafter]) -> Drafter:
        from medusa_heads.inference.drafters.extra.early_exit import EarlyExitSource, ThinnedTarget

        clock, most = self._exit_clock(), max(sizes_for(self.target))
        thinned = ThinnedTarget(self.target, self._stack, self.skipped_layers)
        source = EarlyExitSource(thinned, clock, most, **self._agreement)
        return blend([source], text=self._suffix, clock=clock.steps, chain_only=self._chain_only)

    def _mtp(self, blend: Callable[..., BlendedDrafter]) -> Drafter:
        from medusa_heads.inference.drafters.mtp import mtp_source

        clock = Clock.flat() if self.deterministic else None
        source, clock = mtp_source(self._mtp_drafts, max(sizes_for(self.target)), clock)
        return blend([source], text=self._suffix, clock=clock, chain_only=self._chain_only)


def is_drafter(name: str) -> bool:
    """Whether that is the name of a drafter, which may hold a number."""
    plain = re.sub(r"^(early_exit):\d{1,9}|^(recycling):\d{1,9}$", r"\1\2", name)
    return plain in DRAFTERS + OWN_MODULES


def check_drafter(
    drafter: str,
    corpus: object = None,
    calibration: object = None,
    compiled: object = False,
    modules: object = None,
) -> None:
    """Refuse what no target could be drafted for with. Raises ValueError: an unknown drafter, a
    number it cannot have, or something beside it that it does not take."""
    if not is_drafter(drafter):
        sized = ("recycling:N", "early_exit:N", "early_exit:N+suffix")
        known = [*DRAFTERS, *sized, *OWN_MODULES]
        raise ValueError(f"drafter must be one of {', '.join(known)}, got {drafter!r}")
    if corpus is not None and not continues_text(drafter):
        raise ValueError(
            f"a corpus is continued by the drafters auto, suffix and all +suffix, not {drafter!r}: "
            "use one of them, or leave the corpus out"
        )
    name, _, size = drafter.partition("+")[0].partition(":")
    if size and name == "recycling":
        RecycledTrees(1, int(size))  # for what it refuses
    elif size and not int(size):
        raise ValueError(f"early_exit:N keeps at least 1 of the target's layers, got {drafter!r}")
    if modules is not None and name != "mtp":
        raise ValueError(
            f"modules that were trained draft as 'mtp' or 'mtp+suffix', not as {drafter!r}: name "
            "one of these, or give the target itself"
        )
    if calibration is not None and (size or name != "early_exit"):
        raise ValueError(f"calibration is of the drafter 'early_exit', {drafter!r} tries nothing")
    if compiled and name == "early_exit":
        raise ValueError("early_exit runs layers of an uncompiled target: leave compile out")
