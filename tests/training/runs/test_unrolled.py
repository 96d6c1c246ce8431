"""What modules learn from is what drafting lets them read: in every depth, of packed rows too."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_heads.inference.drafters.mtp import MtpDrafts
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.target.mtp import load_mtp
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.loss.heads import batch_loss
from medusa_heads.training.runs.unrolled import UnrolledModules
from tests.inference.native_modules import needs_modules, read_target, write_checkpoint
from tests.pairs import with_slow

pytestmark = needs_modules
DEPTHS = 4


def drafted(target: TargetModel, text: list[int]) -> tuple[list[int], list[list[float]]]:
    """A chain behind a text, and how likely its tokens and the next best ones seemed."""
    row: Any = SimpleNamespace(last=lambda count: text[-count:], finished=False, length=len(text))
    state: Any = DecodingState.__new__(DecodingState)
    state.noise = None
    state.rows, state.memories = [row], {}
    hidden_BTD = target.hidden(torch.tensor([text[:-1]]))
    state._fresh = [(hidden_BTD, [list(range(len(text) - 1))])]
    levels = MtpDrafts(target).continuation(state)
    chain, probs = [], []
    for (tokens_R,), (probs_R,) in (next(levels) for _ in range(DEPTHS)):
        chain.append(tokens_R[0])
        probs.append(sorted(probs_R))
    return chain, probs


def learnt(unrolled: UnrolledModules, target: TargetModel, rows: Any, at: int) -> Tensor:
    """probs_KV of every depth at a position of the last row."""
    ids_BT, positions_BT = rows
    hidden_BTD = target.hidden(ids_BT, None, positions_BT)
    features_KD = unrolled.features(unrolled.encode(hidden_BTD, ids_BT, positions_BT))[-1, at]
    return unrolled.project(0, features_KD).softmax(dim=-1)


@pytest.mark.parametrize(
    "kind", with_slow(["deepseek_v3", "mellum", "qwen3_5_text"], ["glm4_moe", "qwen3_next"])
)
@torch.no_grad()
def test_each_depth_reads_what_drafting_reads(kind: str, tmp_path: Path) -> None:
    target = read_target(write_checkpoint(kind, tmp_path, right=kind != "deepseek_v3"))
    text = torch.randint(3, 190, (21,), generator=torch.Generator().manual_seed(0)).tolist()
    chain, expected = drafted(target, text)
    unrolled = UnrolledModules(load_mtp(target), target, DEPTHS)
    whole = torch.tensor([text + chain])
    alone_KV = learnt(unrolled, target, (whole, None), len(text) - 2)
    for probs_V, probs_R in zip(alone_KV, expected, strict=True):
        assert probs_V.topk(len(probs_R)).values.sort().values.tolist() == pytest.approx(
            probs_R, rel=1e-3, abs=1e-5
        )
    # Behind another document, and padded beside a longer row.
    if kind.startswith("qwen"):
        return  # a recurrent state knows of no documents
    other = torch.randint(3, 190, (9,)).tolist()
    packed = torch.tensor([[*other, *text, *chain, 0, 0]])
    positions = torch.tensor([[*range(9), *range(whole.shape[1]), 0, 1]])
    packed_KV = learnt(unrolled, target, (packed, positions), 9 + len(text) - 2)
    torch.testing.assert_close(packed_KV, alone_KV, rtol=1e-3, atol=1e-5)


def test_gradients_in_blocks_of_rows_are_those_of_all_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from medusa_heads.training.loss import heads as loss

    target = read_target(write_checkpoint("glm4_moe", tmp_path, right=False))
    unrolled = UnrolledModules(load_mtp(target), target, 3)
    ids_BT = torch.randint(3, 190, (4, 40))
    inputs, hidden_BTD = {"input_ids": ids_BT, "labels": ids_BT}, target.hidden(ids_BT)
    sums = []
    for least in (64, 1 << 20):
        monkeypatch.setattr(loss, "LEAST_BLOCK", least)
        monkeypatch.setattr(loss, "BLOCK_FEATURES_CPU", 1)
        unrolled.zero_grad()
        batch_loss(unrolled, hidden_BTD, inputs, objective=LossConfig()).backward()
        sums.append({name: p.grad for name, p in unrolled.named_parameters()})
    learning = {name for name, grad in sums[0].items() if grad is not None and grad.any()}
    assert {"own.layers.0.eh_proj.weight", "own.layers.0.post_norm.weight"} <= learning
    for name in learning:
        torch.testing.assert_close(sums[0][name], sums[1][name], rtol=1e-3, atol=1e-6)
