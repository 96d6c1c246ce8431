"""Steps on the device, uncompiled: planted drafts for them, and the texts that they write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from medusa_heads import HeadsConfig, MedusaModel, new_heads
from medusa_heads.config import RankPath
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.engine import reading
from medusa_heads.inference.engine.device_state import DeviceState
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.inference.models.assisted import AssistedModel
from medusa_heads.trees.tree import Ranked, TokenTree, TreeShape
from tests.conftest import DEVICE
from tests.inference.planted import BUSHY
from tests.inference.reference import reference

NEW = 18
HERE = torch.device(DEVICE).type
# Whether the figures of steps are read a step late; another step has then begun before it is known
# that all rows have ended.
LATE = HERE in reading._READ_LATE
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 30, "top_p": 0.95}


class PlantedOnDevice(Drafter):
    """Trees with the true continuation on one path, as deep as place and row say: the `truth` of
    0, 1, .. levels in turn. All that branches off is false, and what is behind it true.
    """

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        truth: Sequence[int],
        choices: Sequence[RankPath] = BUSHY,
    ) -> None:
        self.shape = TreeShape.from_choices(choices)
        self.num_nodes, self.levels = self.shape.num_nodes, self.shape.max_depth
        self.texts_BT = torch.tensor(texts, device=DEVICE)
        self.truth = torch.tensor(truth, device=DEVICE)
        self.depth_N = torch.tensor(self.shape.depth, device=DEVICE)
        path = max(choices, key=len)
        on_path = [choice == path[: len(choice)] for choice in self.shape.choices]
        self.on_path_N = torch.tensor([True, *on_path], device=DEVICE)

    def propose(self, state: DecodingState) -> TokenTree:
        if isinstance(state, DeviceState):
            written_B1 = state.written_B[:, None]
        else:
            written_B1 = torch.tensor([[len(row.tokens)] for row in state.rows], device=DEVICE)
        place_BN = (written_B1 + self.depth_N - 1).clamp(0, self.texts_BT.shape[1] - 1)
        true_BN = self.texts_BT.gather(1, place_BN)
        row_B1 = torch.arange(len(written_B1), device=DEVICE)[:, None]
        goal_B1 = self.truth[(written_B1 + row_B1) % len(self.truth)]
        false_BN = (self.depth_N <= goal_B1) & ~self.on_path_N | (self.depth_N == goal_B1 + 1)
        tokens_BN = (true_BN + false_BN) % 199
        tokens_BN = tokens_BN.where(self.depth_N > 0, state.roots_B[:, None])
        # The true path is said to be the likeliest.
        order_N = (100 * ~self.on_path_N + self.depth_N).argsort(stable=True)
        ranks_BN = order_N.argsort().expand_as(tokens_BN)
        return replace(self.shape.tree(tokens_BN), ranked=Ranked(-0.2 * ranks_BN, ranks_BN))


def with_heads(model: Any, backend: Any = "eager", **config: Any) -> MedusaModel:
    heads = new_heads(model, HeadsConfig(num_heads=3, **config))
    return MedusaModel(model, heads, tree="7", compile="steps", compile_backend=backend)


def text(medusa: AssistedModel, inputs: Any, seed: int = 3, **options: Any) -> Tensor:
    """All of it, from steps on the device that are not compiled."""
    torch.manual_seed(seed)
    options = {"do_sample": False, "max_new_tokens": NEW, **options}
    with medusa.target.uncompiled():  # type: ignore[attr-defined]
        made = medusa.generate(**inputs, **options)
    assert isinstance(made, Tensor)
    return made


def drawn_planted(medusa: MedusaModel, inputs: Any, truth: Sequence[int], seed: int = 3) -> Tensor:
    """The text that steps which ask the host draw; it is planted, as `planted` does greedy text."""
    asking = MedusaModel(medusa.target.model, medusa.heads, tree="none")
    torch.manual_seed(seed)
    made: Any = asking.generate(**inputs, max_new_tokens=NEW + 9, **SAMPLING)
    length = inputs["input_ids"].shape[1]
    medusa.drafter = PlantedOnDevice(made[:, length:].tolist(), truth)
    return made[:, : length + NEW]


def planted(model: Any, inputs: Any, truth: Sequence[int]) -> PlantedOnDevice:
    length = inputs["input_ids"].shape[1]
    options = {"do_sample": False, "max_new_tokens": NEW + 9, **inputs}
    return PlantedOnDevice(reference(model, **options)[:, length:].tolist(), truth)


class Placed(TorchDispatchMode):
    """Finds what is written to one place twice, and differs: which of both stays there, nobody can
    tell of a GPU, and a step that is taken again may leave the other."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.twice = 0, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, given = func.overloadpacket, args
        if kind is torch.ops.aten.scatter_:
            into, dim, index, source = given[:4]
            other = torch.scatter(into, dim, index.flip(dim), source.flip(dim))
            self._compare(func, torch.scatter(into, dim, index, source), other)
        elif kind is torch.ops.aten.index_put_:
            into, places, source = given[:3]
            places = [place for place in places if place is not None]
            joint = torch.broadcast_tensors(*places)
            flat = torch.stack([each.flatten() for each in joint], dim=1)
            if source.ndim and source.shape[: joint[0].ndim] == joint[0].shape:
                rows = source.flatten(0, joint[0].ndim - 1)
                _, group = flat.unique(dim=0, return_inverse=True)
                last = torch.zeros(int(group.max()) + 1, dtype=torch.long)
                last[group] = torch.arange(len(group))
                self._compare(func, rows[last[group]], rows)
        return func(*args, **(kwargs or {}))

    def _compare(self, func: Any, one: Tensor, other: Tensor) -> None:
        self.count += 1
        if not torch.equal(one.nan_to_num(), other.nan_to_num()):
            self.twice.append(str(func))
