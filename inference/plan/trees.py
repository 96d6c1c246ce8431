"""Which tree to draft: the user's words for it, made into a drafter.

16, static:16   the best static tree of 16 drafted nodes, from the heads' measured ranks
dynamic:16      16 drafted nodes, shaped anew at every step
none            no drafts: plain decoding, one token a step
chain, chain:3  each head's best token, in a row
cartesian:3,2,1 every combination of 3, 2 and 1 candidates of the first heads
FILE.json       a list of rank paths, as FasterDecoding's medusa_choices
suffix:10       no heads: up to 10 tokens that followed where the text last ended as it does now
auto, 16+suffix heads and text together, see adaptive.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from medusa_heads.files import parse_json, replace_file
from medusa_heads.heads import DraftHeads
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.blended import text_drafter
from medusa_heads.inference.drafters.head_trees import (
    DynamicDrafter,
    MedusaDrafter,
    SequentialDrafter,
)
from medusa_heads.inference.lookup.corpus_index import CorpusIndex
from medusa_heads.trees.statistics import HeadStatistics
from medusa_heads.trees.tree import TreeShape, cartesian_choices

SUFFIX_TOKENS = 10  # as many as transformers' prompt lookup drafts
Choices = Sequence[Sequence[int]]
TreeSpec = int | str | Choices


def make_drafter(
    tree: TreeSpec,
    heads: DraftHeads,
    statistics: HeadStatistics | None,
    *,
    chain_only: bool = False,
    with_log_probs: bool = False,
    corpus: CorpusIndex | None = None,
) -> Drafter:
    """The drafter that `tree` asks for, in the words at the head of this file or as a list of
    paths; every form but those of adaptive.py. Of a target that verifies chains alone it is a
    tree's best chain. Raises ValueError: an unknown form, or a tree that does not fit the heads.

    Args:
        with_log_probs: the acceptance rule compares with draft probabilities.
        corpus: continued by `suffix` where it promises more than the text itself; None for none.
    """
    temperatures = statistics.temperatures if statistics else None
    words = str(tree) if isinstance(tree, int | str) else ""
    # A path may hold a colon too.
    kind, _, argument = (words, "", "") if words.endswith(".json") else words.partition(":")
    if kind == "dynamic" and not chain_only:
        return DynamicDrafter(heads, _count(tree, argument), temperatures=temperatures)
    if kind == "suffix":
        return text_drafter(_count(tree, argument) if argument else SUFFIX_TOKENS, corpus)
    shape = TreeShape.from_choices(_choices(tree, kind, argument, heads, statistics))
    static = SequentialDrafter if heads.sequential else MedusaDrafter
    return static(
        heads,
        shape.chain() if chain_only else shape,
        temperatures=temperatures,
        with_log_probs=with_log_probs,
    )


def read_choices(path: str | os.PathLike[str]) -> list[list[int]]:
    """Rank paths from a JSON file: a list of lists, FasterDecoding's medusa_choices. Raises
    ValueError: not such a file."""
    try:
        content = parse_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"expected a JSON list of rank paths at {str(path)!r}: {error}") from error
    if not isinstance(content, list) or not all(
        isinstance(choice, list) and all(type(rank) is int for rank in choice) for choice in content
    ):
        raise ValueError(f"{path} must hold a list of lists of ranks, such as [[0], [0, 1]]")
    return content


def write_choices(path: str | os.PathLike[str], choices: Choices) -> None:
    """Write rank paths as FasterDecoding reads them; beside the place first, then renamed."""
    replace_file(path, json.dumps([list(choice) for choice in choices]) + "\n")


def _choices(
    tree: TreeSpec, kind: str, argument: str, heads: DraftHeads, statistics: HeadStatistics | None
) -> Choices:
    if not isinstance(tree, int | str):
        return tree
    depth = heads.config.num_heads
    if kind.isdecimal() or kind in ("static", "dynamic"):
        nodes = _count(tree, kind if kind.isdecimal() else argument)
        if statistics is not None:
            return statistics.choices(nodes)
        # Unmeasured heads: their best guesses in a row, then the first head's next best ones.
        chain = cartesian_choices([1] * depth)[:nodes]
        return chain + [(rank,) for rank in range(1, nodes - len(chain) + 1)]
    if kind == "none":
        return []
    if kind == "chain":
        return cartesian_choices([1] * (_count(tree, argument) if argument else depth))
    if kind == "cartesian":
        return cartesian_choices([_count(tree, part) for part in argument.split(",")])
    if kind.endswith(".json"):
        return read_choices(str(tree))
    raise ValueError(
        "tree must be auto, none, a number of nodes, static:N, dynamic:N, chain, cartesian:A,B,.., "
        f"a FILE.json, one of them +suffix, or suffix, got {tree!r}"
    )


def _count(tree: TreeSpec, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"a tree has at least 1 drafted node or candidate, got {tree!r}")
    return int(text)
