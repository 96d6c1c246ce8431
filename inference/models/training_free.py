"""A target that drafts for itself without any training."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.adapt.measure import target_clock
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.blended import BlendedDrafter
from medusa_heads.inference.drafters.growing import Source
from medusa_heads.inference.drafters.recycling import RecyclingSource
from medusa_heads.inference.lookup.corpus_files import Corpus, find_corpus
from medusa_heads.inference.models.assisted import AssistedModel
from medusa_heads.inference.plan.adaptive import (
    automatic,
    continues_text,
    sizes_for,
    unvarying,
)
from medusa_heads.target.compiled import CompiledTarget
from medusa_heads.target.target import TargetModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from medusa_heads.inference.drafters.extra.early_exit import ExitClock

DRAFTERS = (
    "auto",
    "suffix",
    "recycling",
    "lookahead",
    "lookahead+suffix",
    "early_exit",
    "early_exit+suffix",
)


class TrainingFreeModel(AssistedModel):
    """A target for which a drafter drafts that was never trained.

    Args:
        target: the causal LM; it is not modified.
        drafter: `"suffix"`, what followed where the text last ended as it does now; `"recycling"`,
            what the target took to follow each token when it last read it; `"auto"`, both in one
            tree; `"lookahead"`, n-grams of its own parallel guesses at later tokens, and
            `"lookahead+suffix"`; `"early_exit"`, the target itself without the layers that its
            drafts can best do without, `"early_exit:4"`, with its first 4 layers alone, and either
            of them `+suffix`. Each verifies at every step as many nodes as pay on this machine.
        corpus: text that the target may write parts of, continued wherever the target's own text
            ends as it did somewhere there: a file or folder, a saved index, or token ids, one
            sequence a document; for `"suffix"`, `"auto"` and all `+suffix`.
        calibration: token ids [B, T] of text without padding, on which `"early_exit"` tries which
            layers to leave out; by default the target writes some. What is found is kept on disk.
        acceptance, acceptance_settings, compile, compile_backend: see AssistedModel.
        deterministic: see MedusaModel.
        trust_remote_code: whether the tokenizer that reads a corpus may run code of its own.

    Attributes:
        skipped_layers: of early exit: the layers, counted from 0, that drafts do without.

    Raises:
        ValueError: an unknown drafter, one whose trees the target cannot verify, or a corpus that
            it does not continue, or that cannot be read.
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
        acceptance: str = "lossless",
        acceptance_settings: Mapping[str, float] | None = None,
        compile: bool = False,
        compile_backend: str | Callable[..., Any] = "inductor",
        deterministic: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        _check_drafter(drafter, corpus, calibration, compile)
        super().__init__(
            target,
            acceptance=acceptance,
            acceptance_settings=acceptance_settings,
            compile=compile,
            compile_backend=compile_backend,
        )
        name, _, suffix = drafter.partition("+")
        name, _, kept = name.partition(":")
        if self._chain_only and (name not in ("suffix", "early_exit") or suffix):
            raise ValueError(
                f"the drafter {drafter!r} adds branches, and this target verifies chains alone: "
                "use 'suffix' or 'early_exit'"
            )
        self.method = drafter
        self._name, self._suffix = name, bool(suffix)
        self.skipped_layers: tuple[int, ...] = ()
        if name == "early_exit":
            _check_uncompiled(isinstance(self.target, CompiledTarget))
            from medusa_heads.inference.drafters.extra.layer_stack import LayerStack

            self._stack = LayerStack(self.target)
            if kept:
                self.skipped_layers = self._behind(int(kept))
        # Only now: to index a corpus may take a while, and to try layers as well.
        self.corpus = find_corpus(corpus, self.target, trust_remote_code=trust_remote_code)
        self.deterministic = deterministic
        self._agreement: dict[str, float] = {}
        if name == "early_exit" and not kept:
            self._find_layers(calibration)
        if deterministic:
            self._fresh = self._make
        self.drafter = self._make()

    @classmethod
    def from_pretrained(
        cls, target: str | os.PathLike[str], drafter: str = "auto", **kwargs: Any
    ) -> TrainingFreeModel:
        """Load a target by hub id or path, and let it draft for itself.

        Args:
            target: hub id or local folder of a causal LM.
            drafter: see the class.
            kwargs: of the class, or passed on when the target is loaded.

        Raises:
            ValueError: nothing loadable stands there, or see the class.
        """
        names = (
            *("corpus", "calibration", "acceptance", "acceptance_settings"),
            *("compile", "compile_backend", "deterministic"),
        )
        own = {name: kwargs.pop(name) for name in names if name in kwargs}
        # Before seconds of loading.
        _check_drafter(drafter, *(own.get(name) for name in ("corpus", "calibration", "compile")))
        view = TargetModel.from_pretrained(str(target), **kwargs)
        own["trust_remote_code"] = bool(kwargs.get("trust_remote_code"))
        return cls(view, drafter, **own)

    def _behind(self, kept: int) -> tuple[int, ...]:
        """All layers but the first ones."""
        if not 0 < kept < len(self._stack):
            raise ValueError(
                f"early_exit:N keeps at least 1 of the target's {len(self._stack)} layers and "
                f"leaves one out, got {self.method!r}"
            )
        return tuple(range(kept, len(self._stack)))

    def _make(self) -> Drafter:
        if self._name == "early_exit":
            return self._early_exit()
        if self._name == "lookahead":
            return self._lookahead()
        if self._name == "suffix":
            return self._blended([], text=True, chain_only=True)
        recycling = RecyclingSource(self.target.vocab_size)
        return self._blended([recycling], text=self._name == "auto")

    def _blended(
        self, sources: Sequence[Source], *, text: bool, clock: Clock | None = None, **kind: bool
    ) -> BlendedDrafter:
        if self.deterministic:
            return unvarying(None, self.target, sources, text=text, corpus=self.corpus, **kind)
        return automatic(self.target, sources, text=text, corpus=self.corpus, clock=clock, **kind)

    def _find_layers(self, calibration: Tensor | None) -> None:
        from medusa_heads.inference.drafters.extra.skip_search import best_skip_set

        self.skipped_layers, self._agreement["agreement"] = best_skip_set(
            self.target, self._stack, self._exit_clock(), max(sizes_for(self.target)), calibration
        )

    def _exit_clock(self) -> ExitClock:
        from medusa_heads.inference.drafters.extra.early_exit import ExitClock

        if self.deterministic:
            return ExitClock(Clock.flat(), len(self._stack), 1.0 / len(self._stack))
        return ExitClock.measured(self.target, self._stack)

    def _early_exit(self) -> Drafter:
        from medusa_heads.inference.drafters.extra.early_exit import EarlyExitSource, ThinnedTarget

        clock, most = self._exit_clock(), max(sizes_for(self.target))
        thinned = ThinnedTarget(self.target, self._stack, self.skipped_layers)
        source = EarlyExitSource(thinned, clock, most, **self._agreement)
        return self._blended(
            [source], text=self._suffix, clock=clock.steps, chain_only=self._chain_only
        )

    def _lookahead(self) -> Drafter:
        from medusa_heads.inference.drafters.extra import lookahead

        clock = Clock.flat() if self.deterministic else target_clock(self.target)
        pool = lookahead.new_pool()
        drafts = self._blended([lookahead.NgramSource(pool)], text=self._suffix, clock=clock)
        # Compiled, the window stays: steps without one would be another graph.
        always = self.deterministic or isinstance(self.target, CompiledTarget)
        return lookahead.LookaheadDrafter(drafts, pool, clock, always=always)


def _check_drafter(drafter: str, corpus: object, calibration: object, compiled: object) -> None:
    if re.sub(r"^early_exit:\d+", "early_exit", drafter) not in DRAFTERS:
        known = [*DRAFTERS, "early_exit:N", "early_exit:N+suffix"]
        raise ValueError(f"drafter must be one of {', '.join(known)}, got {drafter!r}")
    if corpus is not None and not continues_text(drafter):
        raise ValueError(
            f"a corpus is continued by the drafters auto, suffix and all +suffix, not {drafter!r}: "
            "use one of them, or leave the corpus out"
        )
    name = drafter.partition("+")[0]
    if calibration is not None and name != "early_exit":
        raise ValueError(f"calibration is of the drafter 'early_exit', {drafter!r} tries nothing")
    _check_uncompiled(bool(compiled) and name.startswith("early_exit"))


def _check_uncompiled(compiled: bool) -> None:
    if compiled:
        raise ValueError("early_exit runs layers of an uncompiled target: leave compile out")
