"""The ways to decode a text with drafts, on every target: who drafts, and how much.

Where rows must advance in step, or where drafts by themselves are hardly ever right (heads that
were never trained), the true continuation is planted on a branch of every tree.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa_heads import DraftedModel, MedusaModel, TrainingFreeModel
from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.engine.noise import Rng
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.inference.engine.stats import GenerationStats
from medusa_heads.inference.models.assisted import AssistedModel
from medusa_heads.target.graphs.scripted import ScriptedTarget
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.tree import TokenTree
from scripts.prove.architecture_check import CHAIN
from scripts.prove.lossless.targets import ASSETS, ProofTarget
from scripts.prove.lossless.texts import Reference
from tests.inference.planted import BUSHY, PlantedDrafter, Planting, decoding
from tests.inference.rereading import random_heads

# Long paths, with false drafts beside them.
DEEP = [(0,) * depth for depth in range(1, 9)] + [(0,) * depth + (1,) for depth in range(8)]
RNG: Rng = "transformers"  # whose text is to come out
DRAFT_NOISE = 0.02  # of a draft model's weights: often the target's token, not always


@dataclass(frozen=True)
class Way:
    """Who drafts.

    Attributes:
        family: what it is counted with.
        name: in the record.
        decode: makes the sequences [B, T] of a text.
        planted: knows the true continuation, so that it can keep rows in step.
        slow: not for texts whose rows draw for themselves, which are slow as well.
        draws_drafts: draws its drafts where tokens are drawn: the text then follows the same law,
            and is another one.
        alone: decodes one row.
    """

    family: str
    name: str
    decode: Callable[[Reference], tuple[Tensor, GenerationStats]]
    planted: bool = False
    slow: bool = False
    draws_drafts: bool = False
    alone: bool = False

    def suits(self, made: Reference) -> bool:
        """Whether the text must come out token for token."""
        if self.alone and made.text.batch > 1:
            return False
        if made.text.in_step and made.text.batch > 1:
            return self.planted
        if made.text.own_draws:
            return not self.slow
        return not (self.draws_drafts and made.text.sampled)


class Noticed(Exception):
    """A text has gone another way than the reference."""


class Watched(Drafter):
    """A planted drafter that stops a text once it differs: from there on nothing can be planted.

    Raises:
        Noticed: it differs.
    """

    def __init__(self, planting: Planting) -> None:
        self._planting = planting
        self.num_nodes = planting.num_nodes

    def propose(self, state: DecodingState) -> TokenTree:
        """See Drafter."""
        for row in state.rows:
            if row.tokens != self._planting.references[row.index][: len(row.tokens)]:
                raise Noticed
        return self._planting.propose(state)


def planted(
    target: ProofTarget,
    model: MedusaModel | None = None,
    family: str = "random trees",
    name: str = "bushy, planted",
    *,
    choices: Sequence[Sequence[int]] = BUSHY,
    share: float = 0.75,
    watched: bool = False,
    scripted: ScriptedTarget | None = None,
) -> Way:
    """The truth planted in trees of random tokens, or in a model's own; watched, a text that
    differs is not decoded to its end; scripted, by this view of the target."""
    if not target.tree:
        choices = CHAIN

    def decoded(made: Reference) -> tuple[Tensor, GenerationStats]:
        known: dict[str, Any] = {"in_step": made.text.in_step, "seed": made.text.seed}
        known["share"] = share
        planting: Planting
        if model is None:
            planting = PlantedDrafter(made.rows, target.vocab_size, choices, **known)
        else:
            planting = Planting(model.drafter, made.rows, target.vocab_size, **known)
        asked: Drafter = planting
        if watched:
            asked = Watched(planting)
        stats = GenerationStats()

        # Heads may read layers of the target, which their model's view of it hands on.
        view = scripted or (target.view if model is None else model.target)
        custom = decoding(view, asked, rng=RNG, stats=stats)
        return made.text.generate(target.model, custom_generate=custom), stats

    return Way(family, name, decoded, planted=True, alone=scripted is not None)


def assisted(model: AssistedModel, family: str, name: str, **kind: bool) -> Way:
    """What a user gets, through transformers' own door."""

    def decoded(made: Reference) -> tuple[Tensor, GenerationStats]:
        sequences_BT = made.text.generate(model.target.model, custom_generate=model.decode)
        return sequences_BT, model.last_stats

    return Way(family, name, decoded, **kind)


FEW = 20  # tokens that heads can draft
HEADS_FAMILY = "random heads"
HEADS: dict[str, dict[str, Any]] = {
    "medusa": {},
    "medusa, 2 layers, prefix": {
        "num_layers": 2,
        "prefix_attention": True,
        "linear_shortcut": True,
    },
    "medusa, own matrix, few tokens": {"vocab_matrix": "own", "draft_vocab_size": FEW},
    "hydra": {"kind": "hydra"},
    "hydra, 2 layers, few tokens": {"kind": "hydra", "num_layers": 2, "draft_vocab_size": FEW},
    "hydra, prefix": {"kind": "hydra", "prefix_attention": True},
    "hydra, induction": {"kind": "hydra", "induction": True},
    "medusa, corrected, induction": {"correction_rank": 8, "induction": True},
    "medusa, corrected": {"correction_rank": 8},
    "hydra, prefix, features": {"kind": "hydra", "prefix_attention": True, "features": [0]},
    "eagle3": {"kind": "eagle3"},
    "eagle3, features": {"kind": "eagle3", "features": [0]},
    "block, corrected": {"kind": "block", "correction_rank": 8},
    "block, 2 layers, few tokens": {"kind": "block", "num_layers": 2, "draft_vocab_size": FEW},
}
TREES = ("static:12", "dynamic:12", "cartesian:3,2,1", "chain")
BLENDS = ("auto, deterministic", "12+suffix", "dynamic:8+suffix", "suffix")
UNTRAINED = (
    "suffix", "recycling", "recycling:15", "auto", "lookahead", "lookahead+suffix",
    "early_exit:2", "early_exit:2+suffix",
)  # fmt: skip
TRAINED_TREES = (
    "auto", "16", "dynamic:16", "cartesian:3,2,1", "chain",
    "16+suffix", "dynamic:16+suffix", "suffix", "none",
)  # fmt: skip
DRAFT_TREES = ("chain:4", "dynamic:8")


def every_way(target: ProofTarget, turn: int) -> Iterator[Way]:
    """Of a random target: the truth planted in four kinds of trees, and by turns one of the
    drafters as they are."""
    yield planted(target)
    if target.tree:
        yield planted(target, name="deep, planted", choices=DEEP, share=0.9)
        yield planted(target, name="drawn shape, planted", choices=drawn_shape(turn), share=0.9)
    if target.scripted is not None:
        yield planted(target, name="scripts, planted", scripted=target.scripted)
    for step in (0, 3):  # other heads, and another tree
        kind = list(HEADS)[(turn + step) % len(HEADS)]
        heads = _heads(target, HEADS[kind])
        tree = TREES[(turn // len(HEADS) + turn + step) % len(TREES)] if target.tree else "chain"
        model = MedusaModel(target.view, heads, tree=tree)
        yield planted(target, model, HEADS_FAMILY, f"{kind}, {tree}, planted")
    if turn % 2 and target.tree:
        words = BLENDS[turn // 2 % len(BLENDS)]
        tree, _, fixed = words.partition(", ")
        model = MedusaModel(target.view, heads, tree=tree, deterministic=bool(fixed), rng=RNG)
        yield assisted(model, HEADS_FAMILY, f"{kind}, {words}", slow=True)
    elif turn % 4 or target.recurrent:  # whose noisy copy cannot draft
        yield untrained(target, turn // 4)
    else:
        tree = DRAFT_TREES[turn // 4 % 2] if target.tree else "chain:4"
        drafted = DraftedModel(target.view, noisy(target), tree=tree, rng=RNG)
        yield assisted(drafted, "draft model", tree, slow=True)


def _heads(target: ProofTarget, kind: dict[str, Any]) -> Any:
    """Random heads; without features where nobody can tell the target's layers."""
    heads = random_heads(target.view, **kind)
    try:
        target.view.with_features(heads.config.features)
    except UnsupportedArchitecture:
        return random_heads(target.view, **kind | {"features": None})
    return heads


def untrained(target: ProofTarget, turn: int) -> Way:
    """One of the drafters that need no training; another where the target's layers cannot be left
    out."""
    names = UNTRAINED if target.tree else ("suffix", "early_exit:2")
    name = names[turn % len(names)]
    try:
        model = TrainingFreeModel(target.view, name, deterministic=True, rng=RNG)
    except UnsupportedArchitecture:
        name = "suffix"
        model = TrainingFreeModel(target.view, name, deterministic=True, rng=RNG)
    return assisted(model, "no training", name, slow=True)


def demo_ways(target: ProofTarget) -> Iterator[Way]:
    """Of the demo's target: its trained heads in every form, and all other drafters."""
    yield planted(target)
    yield planted(target, name="scripts, planted", scripted=target.scripted)
    yield planted(target, name="deep, planted", choices=DEEP, share=0.9)
    heads = ASSETS / "demo-heads"
    for tree in TRAINED_TREES:
        model = MedusaModel.from_pretrained(heads, target=target.view, tree=tree, rng=RNG)
        yield assisted(model, "trained heads", tree, slow=tree != "auto")
        if tree in ("16", "dynamic:16"):
            yield planted(target, model, "trained heads", f"{tree}, planted")
    model = MedusaModel.from_pretrained(heads, target=target.view, deterministic=True, rng=RNG)
    yield assisted(model, "trained heads", "auto, deterministic", slow=True)
    for name in UNTRAINED:
        free = TrainingFreeModel(target.view, name, rng=RNG)
        yield assisted(free, "no training", name, slow=True)
    draft = noisy(target)
    for tree in (*DRAFT_TREES, "auto", "sampled:3x2x1"):
        drawn = tree in ("auto", "sampled:3x2x1")
        drafted = DraftedModel(target.view, draft, tree=tree, rng=RNG)
        yield assisted(drafted, "draft model", tree, slow=not drawn, draws_drafts=drawn)


def drawn_shape(seed: int, nodes: int = 20) -> list[tuple[int, ...]]:
    """Choices of a tree of random shape, whose nodes hang on one of the four before them."""
    random = torch.Generator().manual_seed(seed)
    paths: list[tuple[int, ...]] = [()]
    children: Counter[tuple[int, ...]] = Counter()
    while len(paths) <= nodes:
        parent = paths[-1 - int(torch.randint(min(4, len(paths)), (), generator=random))]
        paths.append((*parent, children[parent]))
        children[parent] += 1
    return paths[1:]


@torch.no_grad()
def noisy(target: ProofTarget) -> TargetModel:
    """A draft model: the target, its weights a little off."""
    model: Any = copy.deepcopy(target.model)
    random = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim >= 2 and parameter.is_floating_point():
            noise = torch.randn(parameter.shape, generator=random) * parameter.std() * DRAFT_NOISE
            parameter.add_(noise)
    return TargetModel(model)
