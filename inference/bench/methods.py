"""The names of all that is compared in a benchmark, and what they stand for.

plain                       transformers' generate()
plain-compiled              the same with its static cache, through torch.compile
transformers-prompt-lookup  transformers' prompt lookup
transformers-assisted       transformers' assisted generation, with the (first) draft model
heads, heads:TREE           the checkpoint's heads; trees as in plan/trees.py
draft-model, draft-model:TREE   the draft models on this engine; trees as in plan/draft.py
and the names in models/training_free.py, of drafters that no training made
One of the last three kinds with +compile behind it: verified through torch.compile
with +steps instead: whole steps go through it, drafting too, wherever they can
with +kernels instead: on a GPU, recorded with small operations compiled into fewer kernels
with +stream, before that: tokens are drawn by transformers' own random stream
heads or a drafter with +corpus, before both: continues the corpus that was given, too
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from medusa_heads.checkpoint.draft_checkpoint import check_vocabulary
from medusa_heads.inference.bench.timed_run import Method
from medusa_heads.inference.engine.noise import Rng
from medusa_heads.inference.lookup.corpus_index import CorpusIndex
from medusa_heads.inference.models.assisted import AssistedModel
from medusa_heads.inference.models.compiling import compiled_target, usual_target
from medusa_heads.inference.models.drafted import DEFAULT_DEPTH, DraftedModel
from medusa_heads.inference.models.medusa import MedusaModel
from medusa_heads.inference.models.training_free import (
    DRAFTERS,
    OWN_MODULES,
    TrainingFreeModel,
    check_drafter,
    is_drafter,
)
from medusa_heads.inference.plan.adaptive import check_tree, continues_text
from medusa_heads.inference.plan.draft import draft_plan
from medusa_heads.target.graphs.compiled import CompiledTarget
from medusa_heads.target.target import TargetModel

PLAIN = "plain"
COMPILED = "plain-compiled"
PLAIN_METHODS = (PLAIN, COMPILED)  # the faster of them is 1.0
PROMPT_LOOKUP = "transformers-prompt-lookup"
ASSISTED = "transformers-assisted"
HEADS = "heads"
DRAFT_MODEL = "draft-model"
# Behind the name of a method of this engine, in this order.
CORPUS, STREAM = "+corpus", "+stream"
COMPILE, STEPS, KERNELS = "+compile", "+steps", "+kernels"
# The draft length that transformers' documentation uses for prompt lookup.
PROMPT_LOOKUP_TOKENS = 10


@dataclass(frozen=True)
class Models:
    """What methods are made of, in one dtype: the target, and what was given besides."""

    target: TargetModel
    medusa: MedusaModel | None = None
    drafts: tuple[TargetModel, ...] = ()
    corpus: CorpusIndex | None = None

    _runs: dict[str, TargetModel] = field(default_factory=dict, init=False)

    def run_as(self, compiled: str) -> TargetModel:
        """The target for all methods with this end, which share what is compiled or recorded of it:
        trees of one size are a graph."""
        if compiled not in self._runs:
            self._runs[compiled] = _RUNS[compiled](self.target)
        return self._runs[compiled]


# How a target is run by the end of a method's name; where it says nothing, as it is, or recorded.
_RUNS: dict[str, Callable[[TargetModel], TargetModel]] = {
    "": usual_target,
    COMPILE: lambda target: CompiledTarget(target.model),
    STEPS: lambda target: CompiledTarget(target.model, whole_steps=True),
    KERNELS: lambda target: compiled_target(target, "kernels", "inductor"),
}


class _Parts(NamedTuple):
    """A name taken apart: `heads:8+corpus+compile` is of the kind `heads`, with the tree `8`."""

    drafts: str  # without what stands behind it, such as `heads:8`
    kind: str
    tree: str
    corpus: bool
    rng: Rng
    compiled: str  # COMPILE, STEPS, KERNELS, or nothing

    @property
    def needs(self) -> list[str]:
        """What must be given besides the target: heads, a draft model, a corpus."""
        drafted = self.kind in (DRAFT_MODEL, ASSISTED)
        needed = {"heads": self.kind == HEADS, "draft": drafted, "corpus": self.corpus}
        return [name for name, is_needed in needed.items() if is_needed]


def _parts(name: str) -> _Parts:
    compiled = next((end for end in (COMPILE, STEPS, KERNELS) if name.endswith(end)), "")
    drawn = name.removesuffix(compiled)
    drafter = drawn.removesuffix(STREAM)
    drafts = drafter.removesuffix(CORPUS)
    kind, _, tree = drafts.partition(":")
    rng: Rng = "keyed" if drafter == drawn else "transformers"
    return _Parts(drafts, kind, tree, drafts != drafter, rng, compiled)


def needs_heads(methods: Sequence[str]) -> bool:
    return any("heads" in _parts(name).needs for name in methods)


_MISSING = {
    "heads": "a heads checkpoint, and the target has come alone",
    "draft": "a draft model: give --draft_model",
    "corpus": "text to continue: give --corpus",
}
_UNUSED = {
    "draft": "a draft model is given, and none of the methods {} drafts with it: name "
    f"{DRAFT_MODEL} or {ASSISTED}",
    "corpus": "a corpus is given, and none of the methods {} continues it: name one NAME+corpus, "
    "such as auto+corpus",
}


def check_methods(
    settings: Sequence[Sequence[str]], *, heads: bool, draft: bool, corpus: bool = False
) -> None:
    """Refuse names of any setting that stand for nothing, or for what was not given. Raises
    ValueError: such a name, one given twice, or a draft model or a corpus for none of them."""
    given = {"heads": heads, "draft": draft, "corpus": corpus}
    needs: dict[str, list[str]] = {}
    for methods in settings:
        for place, name in enumerate(methods):
            needs[name] = _checked(name).needs
            if name in methods[:place]:
                raise ValueError(f"the method {name!r} is given twice: name it once")
            if missing := [need for need in needs[name] if not given[need]]:
                raise ValueError(f"{name!r} needs {_MISSING[missing[0]]}")
    for what, message in _UNUSED.items():
        if given[what] and not any(what in of_one for of_one in needs.values()):
            raise ValueError(message.format(", ".join(needs)))


def _checked(name: str) -> _Parts:
    parts = _parts(name)
    treed = parts.kind in _TREED
    known = treed or is_drafter(parts.drafts) or parts.drafts in _PLAINLY
    if not known or (treed and parts.drafts == f"{parts.kind}:"):
        raise ValueError(
            f"expected methods among {', '.join((*_PLAINLY, *DRAFTERS, *OWN_MODULES))}, "
            f"{HEADS}:TREE and {DRAFT_MODEL}:TREE, got {name!r}"
        )
    if parts.kind == HEADS:
        check_tree(parts.tree or "auto")
    elif parts.kind == DRAFT_MODEL:
        draft_plan(parts.tree or "auto", DEFAULT_DEPTH, chain_only=False, one_size=False)
    elif parts.drafts not in _PLAINLY:
        check_drafter(parts.drafts)
    continued = (parts.tree or "auto") if parts.kind == HEADS else parts.drafts
    if parts.corpus and (parts.kind == DRAFT_MODEL or not continues_text(continued)):
        raise ValueError(
            f"a corpus is continued by auto, suffix and all +suffix, of heads and of drafters, got "
            f"{name!r}: leave {CORPUS!r} out"
        )
    if parts.compiled and parts.drafts in _PLAINLY:
        instead = (
            f"measure {COMPILED!r}" if parts.drafts == PLAIN else f"leave {parts.compiled!r} out"
        )
        raise ValueError(f"only methods of this engine are compiled, got {name!r}: {instead}")
    if parts.rng == "transformers" and parts.drafts in _PLAINLY:
        raise ValueError(
            f"only methods of this engine draw in another way, got {name!r}: leave {STREAM!r} out"
        )
    if parts.compiled and parts.kind.startswith("early_exit"):
        raise ValueError(
            f"early_exit runs layers of an uncompiled target, got {name!r}: leave "
            f"{parts.compiled!r} out"
        )
    return parts


def make_method(name: str, models: Models, *, most_tokens: int) -> Method:
    """What a name that check_methods let pass stands for. `most_tokens` are in the longest text,
    prompt included: a static cache holds as many. Raises ValueError: a tree that cannot be drafted,
    or that the target cannot verify."""
    if name in _PLAINLY:
        plain: Any = models.target.model.generate
        generate = partial(plain, **_PLAINLY[name](models, most_tokens))
        return Method(name, generate, one_row=name not in PLAIN_METHODS, compiled=name == COMPILED)
    parts = _parts(name)
    exits = parts.kind.startswith("early_exit")
    target = models.target if exits else models.run_as(parts.compiled)
    corpus = models.corpus if parts.corpus else None
    model: AssistedModel
    if parts.kind in _TREED:
        tree = parts.tree or "auto"
        model = _TREED[parts.kind](models, target, tree, corpus, parts.rng)
    else:
        model = TrainingFreeModel(target, parts.drafts, corpus=corpus, rng=parts.rng)
    return Method(
        name,
        model.generate,
        lambda: model.last_stats,
        lambda: model.drafter.num_nodes - 1,  # without the root
        compiled=isinstance(target, CompiledTarget),
    )


def _static_cache(_: Models, most_tokens: int) -> dict[str, Any]:
    from transformers import CompileConfig

    settings: Any = CompileConfig()
    settings._compile_all_devices = True  # by itself transformers compiles on GPUs alone
    return {
        "cache_implementation": "static",
        "max_cache_len": most_tokens,  # one size for all prompts: another would be compiled anew
        "compile_config": settings,
    }


def _assisted(models: Models, _: int) -> dict[str, Any]:
    check_vocabulary(models.drafts[0], models.target)
    return {"assistant_model": models.drafts[0].model}


# What transformers' generate() is told for each of its methods.
_PLAINLY: dict[str, Callable[[Models, int], dict[str, Any]]] = {
    PLAIN: lambda *_: {},
    COMPILED: _static_cache,
    PROMPT_LOOKUP: lambda *_: {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS},
    ASSISTED: _assisted,
}
# What decodes with trees of the kinds of this engine; every other name is TrainingFreeModel's.
_TREED: dict[str, Callable[..., AssistedModel]] = {
    HEADS: lambda models, target, tree, corpus, rng: MedusaModel(
        target,
        models.medusa.heads,
        statistics=models.medusa.statistics,
        tree=tree,
        corpus=corpus,
        rng=rng,
    ),
    DRAFT_MODEL: lambda models, target, tree, _, rng: DraftedModel(
        target, models.drafts, tree=tree, rng=rng
    ),
}
