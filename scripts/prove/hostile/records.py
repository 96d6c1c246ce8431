"""What stands beside weights: sidecars, statistics, provenance, reports, stories of runs."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.prove.hostile.attempt import Attempt
from scripts.prove.hostile.commands import read_by
from scripts.prove.hostile.damage import change_sidecar, change_sidecar_bytes
from scripts.prove.hostile.values import deep, draw, many_digits, mutated, words
from scripts.prove.hostile.workshop import Place, Workshop

SIDECAR = "medusa_heads.json"
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
KINDS: list[dict[str, Any]] = [
    {"vocab_matrix": "shared"},
    {"vocab_matrix": "own", "draft_vocab_size": 20},
    {"kind": "hydra", "prefix_attention": True},
]
Change = Callable[[dict[str, Any], random.Random], object]


def _set(*path: str, value: Any = WRONG, but: tuple[Any, ...] = ()) -> Change:
    """Set what stands at a path to one of several values."""
    values = [each for each in value if not any(each is other for other in but)]

    def change(sidecar: dict[str, Any], rng: random.Random) -> None:
        inner = sidecar
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = rng.choice(values)

    return change


def _drop(*path: str) -> Change:
    def change(sidecar: dict[str, Any], rng: random.Random) -> None:
        inner = sidecar
        for name in path[:-1]:
            inner = inner[name]
        del inner[path[-1]]

    return change


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
    "raw_embeddings": _set("heads", "raw_embeddings", but=(True,)),
    "draft_vocab_size": _set("heads", "draft_vocab_size", value=[0, -1, 3, 10**8, "x", 2.5, [], True]),
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
    "heads of the statistics": _set("statistics", "num_heads", value=[1, 3, 0, -1, "2", 10**9, None, True]),
    "positions": _set("statistics", "positions", value=[0, -1, 1.5, "40", None, True, [], float("nan"), 1]),
    "top_k_hits": _set("statistics", "top_k_hits"),
    "a count of top_k_hits": _counts,
    "falling top_k_hits": _falling,
    "paths": _set("statistics", "paths", value=[None, 5, "x", {"a": 1}, [5], [[[0]]], True]),
    "a path": _path,
    "a path likelier than its parent": _path_count,
    "temperatures": _set("statistics", "temperatures", value=[None, 5, [1], [1, 1, 1], [0, 1], [1, -1],
        [1, float("nan")], [1, float("inf")], ["1", "1"], {}, [10**400, 1], [True, None]]),
    "dynamic_tokens_per_step": _dynamic,
}  # fmt: skip


class Records:
    """Read as heads are loaded, published and resumed."""

    name = "records"

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop

    def draw(self, rng: random.Random, place: Place) -> Attempt:
        """One folder."""
        make = draw(
            rng,
            [
                (10, self._sound), (40, self._sidecar), (10, self._bytes), (12, self._fuzzed),
                (10, self._story), (8, self._draft), (10, self._published),
            ],
        )  # fmt: skip
        return make(rng, place)

    def _copy(self, rng: random.Random, place: Place, *, kind: int | None = None) -> Path:
        folder = place.inputs / "heads"
        which = KINDS[rng.randrange(len(KINDS)) if kind is None else kind]
        shutil.copytree(self._workshop.heads(**which), folder)
        return folder

    def _load(self, folder: Path, into: list[Any]) -> Callable[[], int]:
        def call() -> Any:
            from medusa_heads.inference.model import MedusaModel

            return MedusaModel.from_pretrained(folder, target=self._workshop.target, tree=8)

        return read_by(call, into)

    def _sound(self, rng: random.Random, place: Place) -> Attempt:
        folder, loaded = self._copy(rng, place), []
        sidecar = json.loads((folder / SIDECAR).read_text())
        sidecar["provenance"] = {words(rng, 1, 1): rng.choice(WRONG), "a": {"b": [words(rng)]}}
        (folder / SIDECAR).write_text(json.dumps(sidecar, indent=rng.choice([None, 4])))
        heads = sidecar["heads"]
        run = self._load(folder, loaded)
        return Attempt("good", "good", run, right=lambda: loaded[0].heads.config.to_dict() == heads)

    def _sidecar(self, rng: random.Random, place: Place) -> Attempt:
        folder = self._copy(rng, place)
        label = rng.choice(sorted(CHANGES))
        sidecar = json.loads((folder / SIDECAR).read_text())
        before = json.dumps(sidecar)
        while json.dumps(sidecar) == before:
            CHANGES[label](sidecar, rng)
        (folder / SIDECAR).write_text(json.dumps(sidecar))
        return Attempt(f"sidecar: {label}", "bad", self._load(folder, []), ("heads", "statistics"))

    def _bytes(self, rng: random.Random, place: Place) -> Attempt:
        folder = self._copy(rng, place)
        texts = [*NO_JSON, deep(rng.randint(3000, 90_000)).encode(), many_digits(rng).encode()]
        texts += [b'{"format_version": %s}' % many_digits(rng).encode()]
        (folder / SIDECAR).write_bytes(rng.choice(texts))
        return Attempt("sidecar: no JSON object", "bad", self._load(folder, []), (SIDECAR,))

    def _fuzzed(self, rng: random.Random, place: Place) -> Attempt:
        """A change at random: refused, or the heads are what they were."""
        folder, loaded = self._copy(rng, place), []
        intact = _tensors(folder)
        rng.choice([change_sidecar, change_sidecar_bytes])(folder, rng)
        return Attempt(
            "sidecar: a change at random",
            "either",
            self._load(folder, loaded),
            right=lambda: _same(loaded[0].heads.state_dict(), intact),
        )

    def _story(self, rng: random.Random, place: Place) -> Attempt:
        """`run.yaml` in a checkpoint that a run is to go on from."""
        from medusa_heads.training.run_record import RUN_FILE, check_same_run, to_yaml

        record = {
            "heads": {"num_heads": 2},
            "loss": {"cross_entropy": 1.0},
            "target_weights_sha256": "a",
        }
        path = place.inputs / RUN_FILE
        run = read_by(lambda: check_same_run(place.inputs, record), [])
        if rng.random() < 0.1:
            path.write_text(to_yaml(record | {"seed": rng.randrange(99), "note": words(rng)}))
            return Attempt("good story", "good", run)
        marker = json.dumps(str(place.marker))
        texts = [
            "", "[]", "7", "{", "a: b: c", "\0", "\xff", deep(rng.randint(900, 20_000)), many_digits(rng),
            f"!!python/object/apply:os.mkdir [{marker}]", "a: !!bool maybe", "a: !!int ''", "a: !!float ''",
            "a: !!timestamp x", "a: 2001-99-99", "a: *b", "? [a, b]\n: 1", f"a: {many_digits(rng)}",
            to_yaml(record | {"heads": {"num_heads": 3}}), to_yaml(record | {"loss": rng.choice(WRONG[1:7])}),
            to_yaml(record | {"target_weights_sha256": rng.choice(["b", None, 5, []])}),
        ]  # fmt: skip
        path.write_bytes(rng.choice(texts).encode("latin-1"))
        return Attempt("story", "bad", run, (RUN_FILE, place.inputs.name))

    def _draft(self, rng: random.Random, place: Place) -> Attempt:
        """`draft_model.json` beside a draft model."""
        from medusa_heads.draft_checkpoint import DRAFT_FILE, FORMAT_VERSION, read_draft_sidecar

        good: dict[str, Any] = {"format_version": FORMAT_VERSION, "target": {"name_or_path": "x"}}
        good |= {"measured": {}, "provenance": {"a": words(rng)}}
        path, read = place.inputs / DRAFT_FILE, []
        run = read_by(lambda: read_draft_sidecar(place.inputs), read)
        if rng.random() < 0.15:
            path.write_text(json.dumps(good))
            return Attempt("good draft", "good", run, right=lambda: read[0] == good)
        case = rng.randrange(3)
        if case == 0:
            path.write_bytes(rng.choice([*NO_JSON, deep(9000).encode(), many_digits(rng).encode()]))
        elif case == 1:
            key = rng.choice(["target", "measured", "provenance"])
            path.write_text(json.dumps(good | {key: rng.choice([None, 5, "x", [], True])}))
        else:
            version = rng.choice([0, 2, "1", None, [], {}, 1.5, -1])
            path.write_text(json.dumps(good | {"format_version": version}))
        return Attempt("draft", "bad", run, (DRAFT_FILE,))

    def _published(self, rng: random.Random, place: Place) -> Attempt:
        """Reports beside heads that are to be pushed: refused, or a card is made."""
        from medusa_heads.hub.push import prepare_push

        folder, made = self._copy(rng, place, kind=0), []
        name = rng.choice(
            [
                "report.json",
                "benchmark.json",
                "config.json",
                "README.md",
                "report.md",
                "accuracy.png",
            ]
        )
        path = folder / name
        run = read_by(lambda: prepare_push(folder, "me/heads", base_model="me/target"), made)
        if name.endswith(".json") and rng.random() < 0.6:
            path.write_bytes(rng.choice([*NO_JSON, deep(9000).encode(), many_digits(rng).encode()]))
            return Attempt(f"push: {name} is no JSON", "bad", run, (name,))
        if rng.random() < 0.5:
            path.unlink(missing_ok=True)
            path.symlink_to(place.outside / "secret.txt")
            return Attempt(f"push: {name} is a link", "bad", run, (name,))
        content = {key: rng.choice(WRONG) for key in _REPORT if rng.random() < 0.7}
        path.write_bytes(mutated(json.dumps(content).encode(), rng))
        right = lambda: "somebody else" not in str(made[0].files.get("README.md"))
        return Attempt(f"push: {name} at random", "either", run, right=right)


_REPORT = (
    "report_version", "target", "heads", "held_out", "tokens_per_step", "accuracy", "calibration",
    "static_trees", "dynamic_trees", "tree", "training", "settings", "machine", "created",
    "temperature", "seed",
)  # fmt: skip


def _tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "medusa_lm_head.safetensors")


def _same(got: dict[str, Any], expected: dict[str, Any]) -> bool:
    import torch

    return got.keys() == expected.keys() and all(
        torch.equal(got[name], expected[name].to(got[name].dtype)) for name in got
    )
