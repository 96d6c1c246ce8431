"""What a sidecar must not say."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import reduce
from operator import getitem
from typing import Any

from scripts.prove.hostile.values import words

WRONG: list[Any] = [None, True, -1, 2.5, "x", [], {}, float("nan"), 10**30, [None], "\N{SNOWMAN}"]
NO_JSON = (
    b"",
    b"[]",
    b"null",
    b"7",
    b'"x"',
    b"{",
    b"\xff\xfe{",
    b"\0" * 20,
    b'{"a": 1}}',
    b"{'a': 1}",
)
Change = Callable[[dict[str, Any], random.Random], object]


def _set(*path: str, value: Any = WRONG, but: tuple[Any, ...] = ()) -> Change:
    """Set what stands at a path to one of several values."""
    values = [each for each in value if not any(each is other for other in but)]

    def change(sidecar: dict[str, Any], rng: random.Random) -> None:
        _holder(sidecar, path)[path[-1]] = rng.choice(values)

    return change


def _drop(*path: str) -> Change:
    return lambda sidecar, rng: _holder(sidecar, path).pop(path[-1])


def _holder(sidecar: dict[str, Any], path: tuple[str, ...]) -> Any:
    """What holds the last name of a path."""
    return reduce(getitem, path[:-1], sidecar)


def _counts(sidecar: dict[str, Any], rng: random.Random) -> None:
    hits = sidecar["statistics"]["top_k_hits"]
    hits[rng.randrange(len(hits))][rng.randrange(16)] = rng.choice(
        [10**6, -1, 2.5, "3", None, True]
    )


def _falling(sidecar: dict[str, Any], rng: random.Random) -> None:
    hits = rng.choice(sidecar["statistics"]["top_k_hits"])
    hits[15] = hits[0] - 1


def _path_count(sidecar: dict[str, Any], rng: random.Random) -> None:
    paths = sidecar["statistics"]["paths"]
    longer = [place for place, (path, _) in enumerate(paths) if len(path) > 1]
    place = rng.choice(longer)
    parent = next(count for path, count in paths if path == paths[place][0][:-1])
    paths[place][1] = parent + rng.choice([1, 7, 10**9])


def _path(sidecar: dict[str, Any], rng: random.Random) -> None:
    paths = sidecar["statistics"]["paths"]
    wrong = [[9, 9, 9], [-1], ["0"], [0.5], [[0]], paths[0][0], [0, 0, 0, 0]]
    paths.append(rng.choice([[rng.choice(wrong), 1], [[0, 15], -1], [[0, 15]], 5, None, {"a": 1}]))


def _dynamic(sidecar: dict[str, Any], rng: random.Random) -> None:
    values = [float("nan"), float("inf"), -1.0, 0.0, "x", None, [1]]
    keys = ["x", "-1", "0", "1.5", ""]
    sidecar["statistics"]["dynamic_tokens_per_step"] = rng.choice(
        [{"16": rng.choice(values)}, {rng.choice(keys): 2.0}, 5, "x", [1], [[1]]]
    )


CHANGES: dict[str, Change] = {
    "format_version": _set("format_version", value=[0, 2, 99, "1", None, True, [], {}, 10**30, -1]),
    "no format_version": _drop("format_version"),
    "an unknown part": lambda sidecar, rng: sidecar.update({words(rng, 1, 2): rng.choice(WRONG)}),
    "heads": _set("heads"),
    "no heads": _drop("heads"),
    "kind": _set("heads", "kind"),
    "num_heads": _set("heads", "num_heads", value=[*WRONG, 0, 1, 3, 10**8]),
    "num_layers": _set("heads", "num_layers", value=[*WRONG, 0, 2, 10**8]),
    "vocab_matrix": _set("heads", "vocab_matrix"),
    "hidden_size": _set("heads", "hidden_size", value=[*WRONG, 0, 31, 33, 10**8]),
    "vocab_size": _set("heads", "vocab_size", value=[*WRONG, 0, 19, 10**8]),
    "prefix_attention": _set("heads", "prefix_attention", but=(True,)),
    "linear_shortcut": _set("heads", "linear_shortcut", but=(True,)),
    "raw_embeddings": _set("heads", "raw_embeddings", but=(True,)),
    "logit_scale": _set("heads", "logit_scale",
        value=[0, -1.0, "x", [], True, None, float("nan"), float("inf")]),
    "draft_vocab_size": _set("heads", "draft_vocab_size",
        value=[0, -1, 3, 10**8, "x", 2.5, [], True]),
    "correction_rank": _set("heads", "correction_rank",
        value=[0, -1, 3, 10**8, "x", 2.5, [], True]),
    "features": _set("heads", "features",
        value=[0, -1, 3, "x", 2.5, [], True, [-1], [0, 0], [True], ["0"], [0.5], [10**30], [[0]]]),
    "an unknown key": lambda sidecar, rng: sidecar["heads"].update({words(rng, 1, 2): 1}),
    "weights_sha256": _set("weights_sha256", value=[*WRONG, "0" * 64]),
    "no weights_sha256": _drop("weights_sha256"),
    "target": _set("target", but=({},)),
    "no target": _drop("target"),
    "no name of a target": _drop("target", "name_or_path"),
    "no lm_head_sha256": _drop("target", "lm_head_sha256"),
    "another lm_head": _set("target", "lm_head_sha256", value=["0" * 64, "", 5, [], True]),
    "another hidden_size": _set("target", "hidden_size", value=[64, -1, "32", 2.5, [], True]),
    "another model_type": _set("target", "model_type", value=["gpt2", "", 5, [], True]),
    "adapter": _set("adapter", value=[5, "x", [], True, {"sha256": "0"}, {"sha256": 5}]),
    "statistics": _set("statistics", value=[5, "x", [1], True, {"a": 1}, {"num_heads": 2}]),
    "provenance": _set("provenance", value=[5, "x", [], True, 2.5]),
    "heads of the statistics": _set("statistics", "num_heads",
        value=[1, 3, 0, -1, "2", 10**9, None, True]),
    "positions": _set("statistics", "positions",
        value=[0, -1, 1.5, "40", None, True, [], float("nan"), 1]),
    "top_k_hits": _set("statistics", "top_k_hits"),
    "a count of top_k_hits": _counts,
    "falling top_k_hits": _falling,
    "paths": _set("statistics", "paths", value=[None, 5, "x", {"a": 1}, [5], [[[0]]], True]),
    "a path": _path,
    "a path likelier than its parent": _path_count,
    "temperatures": _set("statistics", "temperatures",
        value=[None, 5, [1], [1, 1, 1], [0, 1], [1, -1],
        [1, float("nan")], [1, float("inf")], ["1", "1"], {}, [10**400, 1], [True, None]]),
    "dynamic_tokens_per_step": _dynamic,
}  # fmt: skip
