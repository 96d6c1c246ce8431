"""Rounding is the same, whatever was written before and however long it took."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch

from medusa_heads import HeadsConfig, MedusaModel, new_heads
from medusa_heads.inference.models import assisted
from medusa_heads.inference.models.assisted import AssistedModel
from medusa_heads.inference.models.training_free import DRAFTERS, TrainingFreeModel
from medusa_heads.target.target import TargetModel
from tests.conftest import DEVICE, TinyLlama
from tests.pairs import with_slow

TREES = ("dynamic:6",)


def made(tiny_llama: TinyLlama, way: str) -> AssistedModel:
    model: Any = tiny_llama(num_layers=3, vocab_size=24).to(DEVICE, torch.bfloat16)
    if not way.startswith("heads:"):
        return TrainingFreeModel(model, way, deterministic=True)
    kind, tree = way.removeprefix("heads:").split("/")
    heads = new_heads(model, HeadsConfig(kind=kind, num_heads=3))  # type: ignore[arg-type]
    return MedusaModel(model, heads, tree=tree, deterministic=True)


ALIKE = ("recycling:7", "heads:hydra/auto", "heads:block/auto")
# What each of them drafts, others draft too.
SOURCES = ("suffix", "recycling", "early_exit", "lookahead")
MERGED = ("auto", "5+suffix", "suffix:4", "chain")


@pytest.mark.parametrize(
    "way",
    [
        # Two sources, and kinds of heads, draft as each of them does.
        *(
            pytest.param(way, marks=pytest.mark.slow if "+" in way or way in SOURCES else ())
            for way in DRAFTERS
        ),
        *with_slow((f"heads:medusa/{t}" for t in TREES), (f"heads:medusa/{t}" for t in MERGED)),
        *with_slow(["heads:eagle3/auto"], ALIKE),
    ],
)
def test_text_depends_on_nothing_else(
    tiny_llama: TinyLlama, cache: Any, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    drafted = made(tiny_llama, way)
    widths: list[int] = []
    verify = TargetModel.verify

    def watched(self: TargetModel, tree: Any, *args: Any) -> Any:
        widths.append(tree.num_nodes)
        return verify(self, tree, *args)

    monkeypatch.setattr(TargetModel, "verify", watched)
    ids_BT = torch.tensor([[5, 6, 7, 5, 6, 9, 5, 6]], device=DEVICE)

    def written(ids_BT: torch.Tensor = ids_BT, **options: Any) -> tuple[list[int], list[int]]:
        torch.manual_seed(3)
        widths.clear()
        text: Any = drafted.generate(ids_BT, max_new_tokens=14, **options)
        return text[0].tolist(), list(widths)

    for options in ({"do_sample": False}, {"do_sample": True, "temperature": 1.2, "top_k": 0}):
        first = written(**options)
        assert len(set(first[1])) == 1
        with monkeypatch.context() as perturbed:
            ticks = itertools.count()
            perturbed.setattr(time, "perf_counter", lambda: float(next(ticks) ** 1.5))  # noqa: B023
            written(ids_BT + 1, do_sample=not options["do_sample"])  # another request
            assert written(**options) == first


def test_without_it_drafters_are_kept(
    tiny_llama: TinyLlama, cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = tiny_llama(vocab_size=24).to(DEVICE)
    asked: list[Any] = []
    monkeypatch.setattr(
        assisted, "decode", lambda _target, drafter, *_, **__: asked.append(drafter)
    )
    for fresh in (False, True):
        drafted = TrainingFreeModel(model, "auto", deterministic=fresh)
        for _ in range(2):
            nothing: Any = None
            drafted.decode(model, torch.tensor([[5]]), nothing, nothing, model.generation_config)
        assert (asked[-1] is asked[-2]) != fresh
