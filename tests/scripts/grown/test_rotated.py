"""Rotated targets: the logits stay, no channel is empty, and what cannot be rotated is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from scripts.grown.llama import grow_llama
from scripts.grown.rotated import random_basis, rotate
from scripts.grown.shape import Shape
from scripts.grown.target import main
from tests.conftest import Refused, TinyLlama
from tests.scripts.grown.test_target import IDS_BT, spread_out


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"rms_norm_eps": 1e-2, "tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
    ],
    ids=["plain", "large epsilon, tied", "biases"],
)
@pytest.mark.parametrize("width", [64, 192])
def test_logits_stay_and_every_channel_is_used(
    tiny_llama: TinyLlama, overrides: dict[str, Any], width: int
) -> None:
    small = tiny_llama(**overrides)
    spread_out(small)
    shape = Shape.of(small.config).with_sizes({"hidden_size": width})
    grown, place = grow_llama(small, shape, dtype=torch.float32)
    rotate(grown, place, seed=3)
    with torch.no_grad():
        before, after = small(IDS_BT), grown(IDS_BT, output_hidden_states=True)
    assert float((after.logits - before.logits).abs().max()) < 1e-3
    for stream_BTD in after.hidden_states:
        assert float(stream_BTD.square().mean(dim=(0, 1)).min()) > 0
    # Heads read a hidden state whose squares are 1 in the mean: epsilon takes little off.
    squares_BT = after.hidden_states[-1].square().mean(dim=-1)
    assert 0.5 < float(squares_BT.mean()) <= 1.0001
    for name, parameter in grown.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert float((parameter == 0).float().mean()) < 0.01, name


def test_a_basis_is_orthogonal_and_hangs_on_the_seed() -> None:
    basis, other = random_basis(96, 0), random_basis(96, 1)
    torch.testing.assert_close(basis @ basis.T, torch.eye(96), atol=1e-5, rtol=0)
    assert torch.equal(basis, random_basis(96, 0)) and not torch.equal(basis, other)


def test_from_the_command_line(
    tiny_llama: TinyLlama, tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Refused
) -> None:
    small = tiny_llama(tie_word_embeddings=True)
    small.save_pretrained(tmp_path / "small")
    argv = [str(tmp_path / "small"), str(tmp_path / "out"), "--dtype", "float32", "--rotate", "5"]
    wide = [*argv, "--hidden_size", "128"]
    for more, message in (
        (["--heads", str(tmp_path / "heads")], "heads cannot be rotated with their target"),
        (["--vocab_size", "256"], "a rotated target keeps its vocabulary"),
    ):
        assert message in refused(main, [*wide, *more])
    assert not (tmp_path / "out").exists()

    assert main(wide) == 0
    assert "logits differ by" in capsys.readouterr().out
    rotated: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "target")
    assert rotated.config.grown_from["rotated_with_seed"] == 5
    with torch.no_grad():
        before, after = small(IDS_BT).logits, rotated(IDS_BT).logits
    assert float((after - before).abs().max()) < 1e-3
