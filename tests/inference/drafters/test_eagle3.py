"""Eagle3 heads draft what they learnt: with the text's keys and values kept from step to step, and
drafts in trees, they say what they say of whole texts."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from medusa_heads import MedusaModel, TargetModel
from medusa_heads.decoder_shape import DecoderShape
from medusa_heads.heads import Eagle3Heads
from medusa_heads.heads.eagle3 import Branches
from medusa_heads.inference.drafters.head_trees import DynamicDrafter, SequentialDrafter
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.trees.tree import TokenTree, TreeShape, cartesian_choices
from tests.conftest import DEVICE, TinyLlama
from tests.inference.planted import BUSHY, PlantedDrafter
from tests.inference.rereading import random_heads, run

SHAPE = TreeShape.from_choices([*cartesian_choices([3, 2, 2]), (3,), (4,), (4, 5)])


class ComparingDrafter(PlantedDrafter):
    """Compares at every step the chances of a tree's nodes with what the heads say of the text that
    each path makes; what is verified are planted drafts."""

    def __init__(self, drafter: Any, heads: Eagle3Heads, target: TargetModel, *args: Any) -> None:
        super().__init__(*args)
        self.reads_prompt = True
        self.own, self.heads, self.target = drafter, heads, target
        self.differed: list[float] = []

    def propose(self, state: DecodingState) -> TokenTree:
        tree = self.own.propose(state)
        for b, row in enumerate(state.rows):
            ids_1T = row.ids_1T()[:, state.padding[b] :]
            hidden_1TD = F.pad(self.target.hidden(ids_1T[:, :-1]), (0, 0, 0, 1))
            self.differed.append(self.compare(tree, b, ids_1T, hidden_1TD))
        return super().propose(state)

    def compare(self, tree: TokenTree, b: int, ids_1T: Tensor, hidden_1TD: Tensor) -> float:
        """The largest difference of a row's log-probabilities."""
        assert tree.log_probs_BN is not None
        tokens, parents = tree.tokens_BN[b].tolist(), tree.parents_BN[b].tolist()
        paths: dict[int, list[int]] = {0: []}
        worst = 0.0
        for node in range(1, len(tokens)):
            path = [*paths[parents[node]], tokens[node]]
            paths[node] = path
            drafted = torch.tensor([path], device=ids_1T.device)
            whole_1T = torch.cat([ids_1T, drafted], dim=1)
            encoded = self.heads.encode(F.pad(hidden_1TD, (0, 0, 0, len(path))), whole_1T)
            features_KD = self.heads.features(encoded[0, ids_1T.shape[1] - 2])
            log_probs_V = self.heads.project(0, features_KD)[len(path) - 1].log_softmax(-1)
            place = int(self.heads.draft_ids(tree.tokens_BN[b, node]))
            got = float(tree.log_probs_BN[b, node])
            worst = max(worst, abs(got - float(log_probs_V[place])))
        return worst


def compared(
    tiny_llama: TinyLlama,
    tree: str,
    chunk: int | None = None,
    *,
    forgets: bool = False,
    **config: Any,
) -> list[float]:
    """Differences, row by row and step by step, of a padded batch whose rows leave at different
    steps; the drafter `forgets` that its steps go on from behind the norm."""
    torch.manual_seed(0)
    model = tiny_llama().to(DEVICE)
    heads = random_heads(model, kind="eagle3", draft_vocab_size=50, **config)
    assert isinstance(heads, Eagle3Heads)
    target = TargetModel(model).with_features(heads.config.features)
    generator = torch.Generator().manual_seed(5)
    ids_BT = torch.randint(199, (3, 9), generator=generator).to(DEVICE)
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[1, :4] = 0
    options: dict[str, Any] = {"attention_mask": mask_BT, "max_new_tokens": 16, "do_sample": False}
    references = model.generate(ids_BT, **options, pad_token_id=0)[:, 9:].tolist()
    options |= {"eos_token_id": references[2][11], "pad_token_id": 0}
    expected_BT = model.generate(ids_BT, **options)
    asked = deepcopy(heads)
    asked.share(target)
    asked.decoder._norm_output &= not forgets
    own: Any = SequentialDrafter(asked, SHAPE, with_log_probs=True)
    if tree == "dynamic":
        own = DynamicDrafter(asked, 12)
    drafter = ComparingDrafter(own, heads, target, references, 199, BUSHY, 0.5)
    if chunk:
        options["prefill_chunk_size"] = chunk
    with torch.no_grad():
        got_BT = model.generate(ids_BT, **options, custom_generate=partial(run, target, drafter))
    assert torch.equal(got_BT, expected_BT)
    return drafter.differed


@pytest.mark.parametrize(
    ("tree", "chunk"),
    [("dynamic", None), *(pytest.param("static", n, marks=pytest.mark.slow) for n in (None, 4))],
)
def test_drafts_are_what_was_learnt(tiny_llama: TinyLlama, tree: str, chunk: int | None) -> None:
    differed = compared(tiny_llama, tree, chunk)
    assert len(differed) > 6 and max(differed) < 1e-5


def test_drafts_from_features_are_what_was_learnt(tiny_llama: TinyLlama) -> None:
    assert max(compared(tiny_llama, "static", features=[0, 1])) < 1e-5


NORMED: dict[str, Any] = {"decoder": replace(DecoderShape.of_width(64), norm_output=True)}


@pytest.mark.parametrize(
    ("tree", "features"),
    [("static", [0, 1]), pytest.param("dynamic", None, marks=pytest.mark.slow)],
)
def test_drafts_from_behind_the_norm_are_what_was_learnt(
    tiny_llama: TinyLlama, tree: str, features: Any
) -> None:
    assert max(compared(tiny_llama, tree, features=features, **NORMED)) < 1e-5


def test_drafts_from_before_the_norm_are_noticed(tiny_llama: TinyLlama) -> None:
    """A negative control."""
    assert max(compared(tiny_llama, "static", forgets=True, **NORMED)) > 1e-2


@pytest.mark.slow
def test_steps_on_the_device_draft_the_same_from_behind_the_norm(tiny_llama: TinyLlama) -> None:
    """As steps that ask the host: of a few tokens many drafts are right. Heads that forget the norm
    draft otherwise."""
    model = tiny_llama(vocab_size=12).to(DEVICE)
    model.generation_config.pad_token_id = 0
    heads: Any = random_heads(model, kind="eagle3", **NORMED)
    heads.decoder.norm.weight.data[::2] *= -1.0  # which turns what is fed back
    inputs: Any = {"input_ids": torch.arange(10, device=DEVICE)[None]}
    options: Any = {"do_sample": False, "max_new_tokens": 60}
    expected, accepted = model.generate(**inputs, **options), []
    compiled: Any
    for compiled, heads.decoder._norm_output in ((False, True), ("steps", True), ("steps", False)):
        medusa: Any = MedusaModel(
            model, heads, tree="dynamic:6", compile=compiled, compile_backend="eager"
        )
        with medusa.target.uncompiled() if compiled else nullcontext():
            assert torch.equal(medusa.generate(**inputs, **options), expected)
        assert ("step" in medusa.last_stats.seconds) == bool(compiled)
        accepted.append(medusa.last_stats.accepted)
    assert accepted[0] == accepted[1] != accepted[2]
    assert max(accepted[0]) > 0


def test_siblings_that_see_each_other_are_noticed(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A negative control."""
    monkeypatch.setattr(torch, "eye", lambda n, **options: torch.ones(n, n, **options))
    assert max(compared(tiny_llama, "static")) > 1e-2


def test_drafts_that_read_on_from_the_text_are_noticed(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A negative control: every node reads what came out at the text's end."""
    plain = Branches.__call__

    def stale(
        self: Branches, head: int, paths_BFJ: Tensor, above_BF: Tensor
    ) -> tuple[Tensor, None]:
        end_B1D = self.__dict__.setdefault("_end", self._out_BFD)
        self._out_BFD = end_B1D.expand(-1, self._sees_BFS.shape[1], -1)
        return plain(self, head, paths_BFJ, above_BF)

    monkeypatch.setattr(Branches, "__call__", stale)
    assert max(compared(tiny_llama, "static")) > 1e-2
