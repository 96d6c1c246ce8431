"""The names of all that is compared in a benchmark, and what they stand for.

plain                       transformers' generate()
plain-compiled              the same with its static cache, through torch.compile
transformers-prompt-lookup  transformers' prompt lookup
transformers-assisted       transformers' assisted generation, with the (first) draft model
heads, heads:TREE           the checkpoint's heads; trees as in plan/trees.py
draft-model, draft-model:TREE   the draft models on this engine; trees as in plan/draft.py
and the names in models/training_free.py, of drafters that no training made
One of the last three kinds with +compile behind it: verified through torch.compile
heads or a drafter with +corpus behind it: continues the corpus that was given, too
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from medusa_heads.inference.bench.timed_run import Method
from medusa_heads.inference.lookup.corpus_index import CorpusIndex
from medusa_heads.inference.models.assisted import AssistedModel
from medusa_heads.inference.models.drafted import DraftedModel
from medusa_heads.inference.models.medusa import MedusaModel
from medusa_heads.inference.models.training_free import DRAFTERS, TrainingFreeModel
from medusa_heads.inference.plan.adaptive import continues_text
from medusa_heads.target.compiled import CompiledTarget
from medusa_heads.target.target import TargetModel

PLAIN = "plain"
COMPILED = "plain-compiled"
PLAIN_METHODS = (PLAIN, COMPILED)  # the faster of them is 1.0
PROMPT_LOOKUP = "transformers-prompt-lookup"
ASSISTED = "transformers-assisted"
HEADS = "heads"
DRAFT_MODEL = "draft-model"
COMPILE = "+compile"  # behind the name of a method of this engine
CORPUS = "+corpus"  # likewise, and before +compile
# The draft length that transformers' documentation uses for prompt lookup.
PROMPT_LOOKUP_TOKENS = 10


@dataclass(frozen=True)
class Models:
    """What methods are made of, in one dtype: the target, and what was given besides."""

    target: TargetModel
    medusa: MedusaModel | None = None
    drafts: tuple[TargetModel, ...] = ()
    corpus: CorpusIndex | None = None

    @cached_property
    def compiled(self) -> CompiledTarget:
        """The target for all methods that compile it: trees of one size share a graph."""
        return CompiledTarget(self.target.model)


def needs_heads(methods: Sequence[str]) -> bool:
    """Whether one of them decodes with trained heads."""
    return any(_kind(name) == HEADS for name in methods)


def check_methods(
    settings: Sequence[Sequence[str]], *, heads: bool, draft: bool, corpus: bool = False
) -> None:
    """Refuse names that stand for nothing, or for what was not given.

    Args:
        settings: the names in each.
        heads: whether a heads checkpoint was given.
        draft: whether a draft model was given; one of the methods must need it.
        corpus: whether a corpus was given; one of the methods must continue it.

    Raises:
        ValueError: such a name, one given twice, or a draft model or a corpus for none of them.
    """
    for methods in settings:
        _check_setting(methods, heads=heads, draft=draft, corpus=corpus)
    named = list(dict.fromkeys(name for methods in settings for name in methods))
    if draft and not any(_kind(name) in (DRAFT_MODEL, ASSISTED) for name in named):
        raise ValueError(
            f"a draft model is given, and none of the methods {', '.join(named)} drafts with it: "
            f"name {DRAFT_MODEL} or {ASSISTED}"
        )
    if corpus and not any(_drafter(name).endswith(CORPUS) for name in named):
        raise ValueError(
            f"a corpus is given, and none of the methods {', '.join(named)} continues it: name "
            "one NAME+corpus, such as auto+corpus"
        )


def _check_setting(methods: Sequence[str], *, heads: bool, draft: bool, corpus: bool) -> None:
    for place, name in enumerate(methods):
        _check_name(name)
        kind = _kind(name)
        if name in methods[:place]:
            raise ValueError(f"the method {name!r} is given twice: name it once")
        if kind == HEADS and not heads:
            raise ValueError(f"{name!r} needs a heads checkpoint, and the target has come alone")
        if kind in (DRAFT_MODEL, ASSISTED) and not draft:
            raise ValueError(f"{name!r} needs a draft model: give --draft_model")
        if _drafter(name).endswith(CORPUS) and not corpus:
            raise ValueError(f"{name!r} needs text to continue: give --corpus")


def _check_name(name: str) -> None:
    drafter = _drafter(name)
    plainly = drafter.removesuffix(CORPUS)
    kind, colon, tree = plainly.partition(":")
    ours = kind in (HEADS, DRAFT_MODEL) or _without_number(plainly) in DRAFTERS
    others = (*PLAIN_METHODS, PROMPT_LOOKUP, ASSISTED)
    if not (ours or plainly in others) or (kind in (HEADS, DRAFT_MODEL) and colon and not tree):
        raise ValueError(
            f"expected methods among {', '.join((*others, *DRAFTERS))}, {HEADS}:TREE and "
            f"{DRAFT_MODEL}:TREE, got {name!r}"
        )
    drafts = (tree or "auto") if kind == HEADS else plainly
    if plainly != drafter and (kind == DRAFT_MODEL or not continues_text(drafts)):
        raise ValueError(
            f"a corpus is continued by auto, suffix and all +suffix, of heads and of drafters, got "
            f"{name!r}: leave {CORPUS!r} out"
        )
    if drafter == name:
        return
    if plainly in others:
        instead = f"measure {COMPILED!r}" if plainly == PLAIN else f"leave {COMPILE!r} out"
        raise ValueError(f"only methods of this engine are compiled, got {name!r}: {instead}")
    if kind.startswith("early_exit"):
        raise ValueError(
            f"early_exit runs layers of an uncompiled target, got {name!r}: leave {COMPILE!r} out"
        )


def make_method(name: str, models: Models, *, most_tokens: int) -> Method:
    """What a name stands for.

    Args:
        name: one that check_methods let pass.
        models: loaded.
        most_tokens: in the longest text, prompt included; a static cache holds as many.

    Raises:
        ValueError: a tree that cannot be drafted, or that the target cannot verify.
    """
    generate: Any = models.target.model.generate
    if name == PLAIN:
        return Method(name, generate)
    if name == COMPILED:
        return _compiled(generate, most_tokens)
    if name == PROMPT_LOOKUP:
        looking = partial(generate, prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS)
        return Method(name, looking, one_row=True)
    if name == ASSISTED:
        assisted = partial(generate, assistant_model=models.drafts[0].model)
        return Method(name, assisted, one_row=True)
    return _of_engine(name, models)


def _of_engine(name: str, models: Models) -> Method:
    drafter = _drafter(name)
    target = models.target if drafter == name else models.compiled
    corpus = models.corpus if drafter.endswith(CORPUS) else None
    drafter = drafter.removesuffix(CORPUS)
    kind, _, tree = drafter.partition(":")
    model: AssistedModel
    if kind == HEADS:
        assert models.medusa is not None
        heads, statistics = models.medusa.heads, models.medusa.statistics
        model = MedusaModel(
            target, heads, statistics=statistics, tree=tree or "auto", corpus=corpus
        )
    elif kind == DRAFT_MODEL:
        model = DraftedModel(target, models.drafts, tree=tree or "auto")
    else:
        model = TrainingFreeModel(target, drafter, corpus=corpus)

    def nodes() -> int:
        return model.drafter.num_nodes - 1  # without the root

    compiled = target is not models.target
    return Method(name, model.generate, lambda: model.last_stats, nodes, compiled=compiled)


def _compiled(generate: Any, most_tokens: int) -> Method:
    from transformers import CompileConfig

    settings: Any = CompileConfig()
    settings._compile_all_devices = True  # by itself transformers compiles on GPUs alone
    compiled = partial(
        generate,
        cache_implementation="static",
        max_cache_len=most_tokens,  # one size for all prompts: another would be compiled anew
        compile_config=settings,
    )
    return Method(COMPILED, compiled, compiled=True)


def _kind(name: str) -> str:
    return _drafter(name).removesuffix(CORPUS).partition(":")[0]


def _drafter(name: str) -> str:
    return name.removesuffix(COMPILE)


def _without_number(name: str) -> str:
    """A drafter's name may hold the layers it runs: `early_exit:4+suffix`."""
    return re.sub(r":\d+", "", name)
