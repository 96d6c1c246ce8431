"""Heads for those who do not want to choose. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from medusa_heads.settings import flag, one_of

Recipe = Literal["fast", "served", "balanced", "best"]

_FIVE = {"num_heads": 5, "loss": "cross_entropy=0.5,forward_kl=0.5"}
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "fast": {"kind": "medusa", "num_heads": 4},
    "served": {"kind": "block", "correction_rank": 128, "usual_features": True, **_FIVE},
    "balanced": {
        "kind": "medusa",
        "linear_shortcut": True,
        "correction_rank": 128,
        "induction": True,
        **_FIVE,
    },
    "best": {"kind": "hydra", "induction": True, **_FIVE},
}
"""Flags of `train-heads` that each stands for; docs/benchmarks/recipes.md has what they cost and
bring."""


@dataclass
class RecipeArguments:
    """Which of them. ValueError: a word that is none."""

    recipe: Recipe | None = flag(
        None,
        "A choice of heads: fast (small, what vLLM serves as Medusa), served (a block, what "
        "llama.cpp serves as DSpark, and vLLM reads, not run there), balanced (one pass, corrected "
        "by the token before), or best (sequential, the most tokens per step); both of these read "
        "what followed like places of the text. Any other flag beats what it stands for.",
    )

    def __post_init__(self) -> None:
        if self.recipe is not None:
            one_of(self, "recipe", get_args(Recipe))
