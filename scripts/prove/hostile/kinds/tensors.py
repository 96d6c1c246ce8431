"""Tensor files: safetensors, pickles, and pickles that say they are safetensors."""

from __future__ import annotations

import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from medusa_heads.checkpoint.stored_heads import WEIGHTS_FILE
from scripts.prove.hostile.attempt import Attempt
from scripts.prove.hostile.commands import read_by
from scripts.prove.hostile.damage import (
    change_tensor,
    flip_bit,
    flip_bit_unnoticed,
    same_tensors,
    truncate,
    vouch,
)
from scripts.prove.hostile.kinds.tensor_files import Touch, broken_header, no_safetensors
from scripts.prove.hostile.values import draw, mutated, words
from scripts.prove.hostile.workshop import Place, Workshop
from tests.interop import layers, layouts


class Tensors:
    """Heads of this project, loaded; heads of other projects, converted."""

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
        own = workshop.root / "own"
        self._foreign = {
            "safetensors": layouts.fasterdecoding_v2(own / "v2", layouts.native_tensors(2)),
            "pickle": layouts.fasterdecoding_pt(own / "pt", layouts.native_tensors(2)),
            "hydra": layouts.hydra(own / "hydra", layouts.hydra_tensors(2, 1, grounded=True)),
            **{
                name: layers.written(own / name, tensors, said)
                for name, (tensors, said) in layers.PUBLISHED.items()
            },
        }

    def draw(self, rng: random.Random, place: Place) -> Attempt:
        """One file of tensors."""
        make = draw(
            rng,
            [
                (10, self._sound), (25, self._header), (20, self._damaged), (10, self._other),
                (20, self._pickled), (15, self._mutated), (20, self._layers),
            ],
        )  # fmt: skip
        return make(rng, place)

    def _heads(self, rng: random.Random, place: Place) -> Path:
        folder = place.inputs / "heads"
        kind: dict[str, Any] = rng.choice(
            [
                {},
                {"kind": "hydra", "prefix_attention": True},
                {"kind": "block"},
                {"kind": "eagle3", "features": (0,)},
                {"correction_rank": 4, "features": (0,)},
            ]
        )
        shutil.copytree(self._workshop.heads(**kind), folder)
        return folder

    def _load(self, folder: Path, into: list[Any]) -> Callable[[], int]:
        from medusa_heads.checkpoint.checkpoint import load_heads

        return read_by(lambda: load_heads(folder, self._workshop.target), into)

    def _sound(self, rng: random.Random, place: Place) -> Attempt:
        read: list[Any] = []
        if rng.random() < 0.5:
            folder = self._heads(rng, place)
            generator = torch.Generator().manual_seed(rng.randrange(2**31))
            tensors = {
                name: torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
                if tensor.is_floating_point()
                else tensor
                for name, tensor in load_file(folder / WEIGHTS_FILE).items()
            }
            save_file(tensors, folder / WEIGHTS_FILE)
            vouch(folder)
            expected = _file(folder / WEIGHTS_FILE)
            run = self._load(folder, read)
            return Attempt(
                "good",
                "good",
                run,
                right=lambda: same_tensors(read[0].heads.state_dict(), expected),
            )
        layout = rng.choice(sorted(self._foreign))
        run = self._convert(self._foreign[layout], place, read)
        return Attempt(f"good {layout}", "good", run, right=lambda: _is_whole(read[0]))

    def _header(self, rng: random.Random, place: Place) -> Attempt:
        folder = self._heads(rng, place)
        path = folder / WEIGHTS_FILE
        label, data = broken_header(path, rng)
        path.write_bytes(data)
        vouch(folder)  # whoever means harm writes the checksum, too
        return Attempt(label, "bad", self._load(folder, []), (WEIGHTS_FILE,))

    def _damaged(self, rng: random.Random, place: Place) -> Attempt:
        folder = self._heads(rng, place)
        damage = rng.choice([flip_bit, truncate, change_tensor, flip_bit_unnoticed])
        damage(folder, rng)
        expected = _file(folder / WEIGHTS_FILE)
        read: list[Any] = []
        sure = damage in (flip_bit, truncate)
        return Attempt(
            damage.__name__,
            "bad" if sure else "either",
            self._load(folder, read),
            ("heads",),
            right=lambda: same_tensors(read[0].heads.state_dict(), expected),
        )

    def _other(self, rng: random.Random, place: Place) -> Attempt:
        folder = self._heads(rng, place)
        label = no_safetensors(folder / WEIGHTS_FILE, rng, place.marker)
        if (folder / WEIGHTS_FILE).is_file():
            vouch(folder)
        return Attempt(label, "bad", self._load(folder, []), (WEIGHTS_FILE,))

    def _convert(self, source: Path, place: Place, into: list[Any]) -> Callable[[], int]:
        from medusa_heads.interop.convert import convert_heads

        return read_by(lambda: convert_heads(source, place.out), into)

    def _source(self, layout: str, place: Place) -> tuple[Path, Path]:
        source = place.inputs / "source"
        shutil.copytree(self._foreign[layout], source)
        return source, next(
            path for path in source.iterdir() if path.suffix in (".pt", ".safetensors")
        )

    def _pickled(self, rng: random.Random, place: Place) -> Attempt:
        """A torch file with something else in it."""
        source, path = self._source(rng.choice(["pickle", "hydra"]), place)
        good: dict[str, Any] = torch.load(path, weights_only=True)
        name = rng.choice(sorted(good))
        tensor: Tensor = good[name]
        wrong: list[tuple[str, Any]] = [
            ("code", good | {name: Touch(place.marker)}),
            ("code alone", Touch(place.marker)),
            ("a list", [tensor]),
            ("a tensor alone", tensor),
            ("nested", {"state": good}),
            ("a number", good | {name: 5}),
            ("a name that is none", {5: tensor}),
            ("nothing", {}),
            (
                "a view beyond its storage",
                good | {name: torch.zeros(1).expand(10**6, tensor.shape[-1])},
            ),
            ("sparse", good | {name: torch.zeros(4, 4).to_sparse()}),
            ("NaN", good | {name: torch.full_like(tensor, float("nan"))}),
            (
                "another dtype",
                good | {name: tensor.to(rng.choice([torch.int8, torch.float64, torch.bool]))},
            ),
            ("another shape", good | {name: tensor.unsqueeze(0)}),
            ("a tensor too many", good | {f"{words(rng, 1, 1)}.weight": tensor}),
            ("a tensor too few", {each: value for each, value in good.items() if each != name}),
        ]
        label, content = rng.choice(wrong)
        torch.save(content, path)
        if rng.random() < 0.3 and "code" in label:
            path.write_bytes(pickle.dumps(content))
        if rng.random() < 0.2:
            label, path = f"{label} in a .bin", path.rename(path.with_name("pytorch_model.bin"))
        return Attempt(
            f"torch: {label}", "bad", self._convert(source, place, []), ("source", name, "head")
        )

    def _layers(self, rng: random.Random, place: Place) -> Attempt:
        """A foreign decoder layer, one tensor of which is another or gone, or whose configuration
        is another's."""
        name, other = rng.sample(sorted(layers.PUBLISHED), 2)
        good, said = layers.PUBLISHED[name]
        tensors = dict(good)
        wrong = rng.choice(sorted(set(tensors) - {"t2d"}))
        tensor = tensors.pop(wrong)
        match rng.randrange(7):
            case 0:
                label = "a tensor too few"
            case 1:
                label, tensors[wrong] = "half a tensor", tensor[: len(tensor) // 2].clone()
            case 2:
                label, tensors[wrong] = "a scalar", tensor.flatten()[0].clone()
            case 3:
                dtype = rng.choice([torch.int8, torch.float64, torch.bool])
                label, tensors[wrong] = "another dtype", tensor.to(dtype)
            case 4:
                label, tensors = "two layers", layers.PUBLISHED["eagle3"][0] | layers.block()
            case 5:
                label, tensors, said = "another's config", dict(good), layers.PUBLISHED[other][1]
            case 6:
                key = rng.choice(["target_hidden_size", "hidden_act"])
                inner = dict(said.get("transformer_layer_config", said)) | {key: rng.randint(3, 40)}
                whole = said | {"transformer_layer_config": inner}
                label, tensors, said = f"another {key}", dict(good), whole
        source = layers.written(place.inputs / "source", tensors, said)
        run = self._convert(source, place, [])
        return Attempt(f"{name}: {label}", "bad", run, ("source", wrong))

    def _mutated(self, rng: random.Random, place: Place) -> Attempt:
        """Bytes of a foreign file changed: refused, or what is written is whole."""
        source, path = self._source(rng.choice(sorted(self._foreign)), place)
        head = path.read_bytes()
        cut = rng.choice([600, len(head)])
        path.write_bytes(mutated(head[:cut], rng) + head[cut:])
        read: list[Any] = []
        run = self._convert(source, place, read)
        return Attempt("bytes", "either", run, right=lambda: _is_whole(read[0]))


def _file(path: Path) -> dict[str, Tensor] | None:
    """What a reader that does not look at what heads are makes of the file."""
    try:
        return load_file(path)
    except Exception:
        return None


def _is_whole(converted: Any) -> bool:
    from medusa_heads.checkpoint.stored_heads import read_stored

    stored = read_stored(converted.folder)
    return all(bool(tensor.isfinite().all()) for tensor in stored.tensors.values())
