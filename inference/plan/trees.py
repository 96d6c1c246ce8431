"""Which tree to draft: the user's words for it, made into a drafter.

16, static:16   the best static tree of 16 drafted nodes, from the heads' measured ranks
dynamic:16      16 drafted nodes, shaped anew at every step
none            no drafts: plain decoding, one token a step
chain, chain:3  each head's best token, in a row
cartesian:3,2,1 every combination of 3, 2 and 1 candidates of the first heads
FILE.json       a list of rank paths, as FasterDecoding's medusa_choices
suffix:10       no heads: up to 10 tokens that followed where the text last ended as it does now
auto, 16+suffix heads and text together, and `fastest`: see adaptive.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from medusa_heads.files import expanded, parse_json, replace_file
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
from medusa_heads.trees.tree import TreeShape, cartesian_choices, check_size

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
    kind, numbers = parse_tree(tree)
    if kind == "dynamic" and not chain_only:
        return DynamicDrafter(heads, *numbers, temperatures=temperatures)
    if kind == "suffix":
        return text_drafter((numbers or [SUFFIX_TOKENS])[0], corpus)
    if kind == "paths":
        shape = read_shape(tree)
    else:
        shape = TreeShape.from_choices(_choices(kind, numbers, heads.config.num_heads, statistics))
    static = SequentialDrafter if heads.sequential else MedusaDrafter
    return static(
        heads,
        shape.chain() if chain_only else shape,
        temperatures=temperatures,
        with_log_probs=with_log_probs,
    )


def parse_tree(tree: TreeSpec) -> tuple[str, list[int]]:
    """The kind of a tree, and the numbers in its words; of a list of paths and of a file of them
    it is "paths", without numbers. Raises ValueError: an unknown form, or numbers it cannot have.
    """
    words = str(tree)
    if not isinstance(tree, int | str) or words.endswith(".json"):  # a path may hold a colon too
        return "paths", []
    kind, colon, told = ("static:" * words.isdecimal() + words).partition(":")
    if kind in ("static", "dynamic", "cartesian") or (colon and kind in ("chain", "suffix")):
        numbers = told.split(",") if kind == "cartesian" else [told]
        if not all(number.isdecimal() and int(number) for number in numbers):
            raise ValueError(f"a tree has at least 1 drafted node or candidate, got {tree!r}")
        check_size(map(int, numbers), tree)
        return kind, [int(number) for number in numbers]
    if words not in ("none", "chain", "suffix"):
        raise ValueError(
            "tree must be auto, fastest, none, a number of nodes, static:N, dynamic:N, chain, "
            f"cartesian:A,B,.., a FILE.json, one of them +suffix, or suffix, got {tree!r}"
        )
    return kind, []


def read_shape(tree: TreeSpec) -> TreeShape:
    """A list of paths, or a file of them. Raises ValueError: these make no tree."""
    assert not isinstance(tree, int)
    return TreeShape.from_choices(read_choices(tree) if isinstance(tree, str) else tree)


def read_choices(path: str | os.PathLike[str]) -> list[list[int]]:
    """Rank paths from a JSON file: a list of lists, FasterDecoding's medusa_choices. Raises
    ValueError: not such a file."""
    try:
        content = parse_json(expanded(path).read_text(encoding="utf-8"))
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
    kind: str, numbers: Sequence[int], depth: int, statistics: HeadStatistics | None
) -> Choices:
    if kind in ("static", "dynamic"):
        (nodes,) = numbers
        if statistics is not None:
            return statistics.choices(nodes)
        # Unmeasured heads: their best guesses in a row, then the first head's next best ones.
        chain = cartesian_choices([1] * depth)[:nodes]
        return chain + [(rank,) for rank in range(1, nodes - len(chain) + 1)]
    if kind == "none":
        return []
    return cartesian_choices(numbers if kind == "cartesian" else [1] * (numbers or [depth])[0])
