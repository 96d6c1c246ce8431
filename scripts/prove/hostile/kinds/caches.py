"""Measurements of this machine, as others left them in its cache."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from medusa_heads.machine import measurements, products
from scripts.prove.hostile.attempt import Attempt
from scripts.prove.hostile.commands import read_by
from scripts.prove.hostile.kinds.sidecars import NO_JSON
from scripts.prove.hostile.values import HUGE, deep, draw, many_digits, mutated
from scripts.prove.hostile.workshop import Place, Workshop

NO_SECONDS: list[Any] = [
    0, -1, -0.5, float("nan"), float("inf"), -HUGE, HUGE, None, "", "fast", "0.5", [], [1], {},
    True,
]  # fmt: skip
# Another process that writes the same file again and again, never whole at once.
WRITER = """
import sys
path, data = sys.argv[1], open(sys.argv[1], "rb").read()
while True:
    for cut in (0, 1, len(data) // 2, len(data)):
        with open(path, "wb") as file:
            file.write(data[:cut])
            file.flush()
            file.write(data[cut:cut + 7])
"""


class Caches:
    """Read as a device, a dtype, a tree's size and a draft model's length are chosen."""

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
        self._kept = workshop.root / "own" / "measured"
        self._asks: dict[str, Callable[[], Any]] = {
            "products": self._products,
            "clock": self._clock,
            "steps": self._steps,
        }
        with _cache(self._kept):
            for ask in self._asks.values():
                ask()

    def _products(self) -> dict[str, float]:
        import torch

        from medusa_heads.machine.choice import speeds
        from medusa_heads.machine.products import Shape

        shape = Shape(hidden=32, intermediate=64, vocab=64, layers=1)
        found = speeds("tree", device="cpu", stored=torch.bfloat16, shape=shape)
        return {f"{dtype} {threads}": speed for (dtype, threads), speed in found.items()}

    def _clock(self) -> dict[str, float]:
        from medusa_heads.inference.adapt.measure import target_clock

        clock = target_clock(self._workshop.target)
        return {str(size): clock.step(size) for size in (*clock.sizes, 5, 500)}

    def _steps(self) -> dict[str, float]:
        from medusa_heads.inference.adapt.measure import step_seconds
        from medusa_heads.inference.adapt.step_bench import RandomChain

        chains = {str(size): RandomChain(size, 4096) for size in (1, 3)}
        found, _ = step_seconds(self._workshop.target, chains, {"chain": 1}, 16, 1)
        steps = {name: each.step for name, each in found.items()}
        return steps | {f"drafting {name}": each.drafting for name, each in found.items()}

    def draw(self, rng: random.Random, place: Place) -> Attempt:
        """One cache."""
        kind = draw(rng, [(90, "products"), (5, "clock"), (5, "steps")])
        shutil.copytree(self._kept / kind, place.out / kind)
        (file,) = (place.out / kind).iterdir()
        content, ask = json.loads(file.read_text()), self._asks[kind]
        found: list[Any] = []

        def call() -> Any:
            with _cache(place.out):
                return ask()

        run = read_by(call, found)
        case = draw(rng, [(10, "good"), (65, "values"), (12, "file"), (10, "bytes"), (3, "writer")])
        if case == "good":
            before = file.read_bytes()
            return Attempt(f"good {kind}", "good", run, right=lambda: file.read_bytes() == before)
        if case == "writer":
            return Attempt(
                f"{kind}: another writer",
                "mend",
                self._beside(file, run),
                right=lambda: _sane(found[0]),
            )
        if case == "bytes":
            file.write_bytes(mutated(file.read_bytes(), rng))
            return Attempt(f"{kind}: bytes", "either", run, right=lambda: _sane(found[0]))
        label = _break_file(file, rng) if case == "file" else _break_values(content, kind, rng)
        if case == "values":
            file.write_text(json.dumps(content))
        broken = file.read_bytes() if file.is_file() else b""

        def right() -> bool:
            anew = not file.is_file() or file.read_bytes() != broken
            return _sane(found[0]) and anew

        return Attempt(f"{kind}: {label}", "mend", run, right=right)

    def _beside(self, file: Path, run: Callable[[], int]) -> Callable[[], int]:
        def both() -> int:
            with subprocess.Popen([sys.executable, "-S", "-c", WRITER, str(file)]) as writer:
                try:
                    return run()
                finally:
                    writer.kill()

        return both


def _break_file(file: Path, rng: random.Random) -> str:
    label = rng.choice(
        [
            "no JSON",
            "nested",
            "a long number",
            "a folder",
            "a link",
            "a FIFO",
            "nothing",
            "no folder",
        ]
    )
    if label in ("no JSON", "nested", "a long number", "nothing"):
        texts = {
            "nested": deep(9000).encode(),
            "a long number": many_digits(rng).encode(),
            "nothing": b"",
        }
        file.write_bytes(texts.get(label) or rng.choice(NO_JSON))
        return label
    file.unlink()
    if label == "a folder":
        file.mkdir()
    elif label == "a link":
        file.symlink_to(file.parent / "none")
    elif label == "a FIFO":
        os.mkfifo(file)
    else:
        file.parent.rmdir()
        file.parent.write_text("no folder")
    return label


def _break_values(content: dict[str, Any], kind: str, rng: random.Random) -> str:
    """Change what was measured into what nobody can have measured."""
    case = rng.randrange(10)
    if case == 0:
        content["of"] = rng.choice([None, 5, {}, [], content["of"] | {"version": 99}])
        return "of another"
    if case == 1:
        content["values"] = rng.choice([None, 5, [], "x", {}, {"a": 1}, True])
        return "no values"
    values = content["values"]
    inner = values if kind == "steps" else values["seconds" if kind == "products" else "step"]
    name = rng.choice(sorted(inner))
    if case == 2:
        del inner[name]
        if kind == "clock":  # fewer sizes are a clock as well
            inner.clear()
        return "seconds missing"
    if case == 3 and kind == "clock":
        inner[rng.choice(["x", "-1", "0", "1.5", "", "9" * 5000])] = 0.01
        return "a size that is none"
    if kind == "steps":
        wrong = rng.choice(NO_SECONDS)
        inner[name] = rng.choice(
            [[wrong, 0.001], wrong, [], [0.01], [0.01, 0.001, 1], [0.01, -1], [0.01, float("nan")]]
        )
        return "seconds of a step"
    inner[name] = rng.choice(NO_SECONDS)
    return "seconds that are none"


def _sane(found: dict[str, float]) -> bool:
    return bool(found) and all(
        isinstance(each, float) and 0 <= each < math.inf and (each > 0 or "drafting" in name)
        for name, each in found.items()
    )


@contextmanager
def _cache(folder: Path) -> Iterator[None]:
    # What is measured beside other programs would not be kept.
    alone = patch.object(measurements, "_waited", lambda: 0.0)
    alike = patch.object(products, "_spread", lambda _: 0.0)
    with patch.dict(os.environ, MEDUSA_HEADS_CACHE=str(folder)), alone, alike:
        yield
