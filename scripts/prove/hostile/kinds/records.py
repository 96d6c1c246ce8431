"""What stands beside weights: sidecars, statistics, provenance, reports, stories of runs."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from medusa_heads.checkpoint.stored_heads import WEIGHTS_FILE
from scripts.prove.hostile.attempt import Attempt
from scripts.prove.hostile.commands import read_by
from scripts.prove.hostile.damage import change_sidecar, change_sidecar_bytes, same_tensors
from scripts.prove.hostile.kinds.sidecars import CHANGES, NO_JSON, WRONG
from scripts.prove.hostile.values import deep, draw, many_digits, mutated, words
from scripts.prove.hostile.workshop import Place, Workshop

SIDECAR = "medusa_heads.json"
KINDS: list[dict[str, Any]] = [
    {"vocab_matrix": "shared"},
    {"vocab_matrix": "own", "draft_vocab_size": 20},
    {"kind": "hydra", "prefix_attention": True},
    {"kind": "block"},
]


class Records:
    """Read as heads are loaded, published and resumed."""

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
            from medusa_heads.inference.models.medusa import MedusaModel

            return MedusaModel.from_pretrained(folder, target=self._workshop.target, tree=8)

        return read_by(call, into)

    def _sound(self, rng: random.Random, place: Place) -> Attempt:
        folder = self._copy(rng, place)
        loaded: list[Any] = []
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
        folder = self._copy(rng, place)
        loaded: list[Any] = []
        intact = load_file(folder / WEIGHTS_FILE)
        rng.choice([change_sidecar, change_sidecar_bytes])(folder, rng)
        return Attempt(
            "sidecar: a change at random",
            "either",
            self._load(folder, loaded),
            right=lambda: same_tensors(loaded[0].heads.state_dict(), intact),
        )

    def _story(self, rng: random.Random, place: Place) -> Attempt:
        """`run.yaml` in a checkpoint that a run is to go on from."""
        from medusa_heads.training.runs.record import RUN_FILE, check_same_run, to_yaml

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
            "", "[]", "7", "{", "a: b: c", "\0", "\xff", deep(rng.randint(900, 20_000)),
            many_digits(rng),
            f"!!python/object/apply:os.mkdir [{marker}]", "a: !!bool maybe", "a: !!int ''",
            "a: !!float ''",
            "a: !!timestamp x", "a: 2001-99-99", "a: *b", "? [a, b]\n: 1", f"a: {many_digits(rng)}",
            to_yaml(record | {"heads": {"num_heads": 3}}),
            to_yaml(record | {"loss": rng.choice(WRONG[1:7])}),
            to_yaml(record | {"target_weights_sha256": rng.choice(["b", None, 5, []])}),
        ]  # fmt: skip
        path.write_bytes(rng.choice(texts).encode("latin-1"))
        return Attempt("story", "bad", run, (RUN_FILE, place.inputs.name))

    def _draft(self, rng: random.Random, place: Place) -> Attempt:
        """`draft_model.json` beside a draft model."""
        from medusa_heads.checkpoint.draft_checkpoint import DRAFT_FILE, read_draft_sidecar
        from medusa_heads.checkpoint.files import FORMAT_VERSION

        good: dict[str, Any] = {"format_version": FORMAT_VERSION, "target": {"name_or_path": "x"}}
        good |= {"measured": {}, "provenance": {"a": words(rng)}}
        path = place.inputs / DRAFT_FILE
        read: list[Any] = []
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
            version: Any = rng.choice([0, 2, "1", None, [], {}, 1.5, -1])
            path.write_text(json.dumps(good | {"format_version": version}))
        return Attempt("draft", "bad", run, (DRAFT_FILE,))

    def _published(self, rng: random.Random, place: Place) -> Attempt:
        """Reports beside heads that are to be pushed: refused, or a card is made."""
        from medusa_heads.hub.push import prepare_push

        folder = self._copy(rng, place, kind=0)
        made: list[Any] = []
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

        def right() -> bool:
            return "somebody else" not in str(made[0].files.get("README.md"))

        return Attempt(f"push: {name} at random", "either", run, right=right)


_REPORT = (
    "report_version", "target", "heads", "held_out", "tokens_per_step", "accuracy", "calibration",
    "static_trees", "dynamic_trees", "tree", "training", "settings", "machine", "created",
    "temperature", "seed",
)  # fmt: skip
