"""Features fused into the target's last hidden state, for heads of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from medusa_heads.config import HeadsConfig
from medusa_heads.heads import new_heads
from medusa_heads.heads.fusion import Fusion
from medusa_heads.target.target import TargetModel
from tests.conftest import TinyLlama

SHAPES: dict[str, dict[str, Any]] = {
    "medusa": {},
    "hydra": {"kind": "hydra"},
    "prefix": {"prefix_attention": True},
    "induction": {"induction": True},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_fresh_heads_predict_what_the_target_does(tiny_llama: TinyLlama, shape: str) -> None:
    config = HeadsConfig(num_heads=2, features=[0, 1], **SHAPES[shape])
    target = TargetModel(tiny_llama()).with_features(config.features)
    heads = new_heads(target, config)
    ids_BT = torch.arange(24).view(2, 12)
    encoded_BTD = heads.encode(target.hidden(ids_BT), ids_BT)
    logits_BTKV = heads(encoded_BTD, ids_BT[:, :, None].expand(-1, -1, 2))
    expected_BTV = target.model(ids_BT).logits
    torch.testing.assert_close(logits_BTKV, expected_BTV[:, :, None].expand_as(logits_BTKV))


def test_each_feature_is_brought_to_unit_scale() -> None:
    fusion = Fusion(6, 2)
    torch.nn.init.normal_(fusion.linear.weight)
    low_RD, high_RD, last_RD = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(0))
    fused_RD = fusion(torch.cat([low_RD, high_RD, last_RD], dim=-1))
    unit = [x_RD / x_RD.square().mean(-1, keepdim=True).sqrt() for x_RD in (low_RD, high_RD)]
    expected_RD = last_RD + torch.cat(unit, dim=-1) @ fusion.linear.weight.T
    torch.testing.assert_close(fused_RD, expected_RD)
    features_RND, split_RD = fusion.split(torch.cat([9 * low_RD, high_RD, last_RD], dim=-1))
    assert torch.equal(features_RND, torch.stack([9 * low_RD, high_RD], dim=1))
    assert torch.equal(split_RD, last_RD)


def test_heads_without_them_are_stored_as_ever() -> None:
    assert "features" not in HeadsConfig().to_dict()
    config = HeadsConfig(features=[4, 1])
    assert config.to_dict()["features"] == [4, 1]
    assert HeadsConfig.from_dict(config.to_dict()) == config
    assert not config.is_plain_medusa


@pytest.mark.parametrize("given", [[], [1, 1], [-1], [True], ["1"], [1.0], 3, "1", [10**30]])
def test_what_are_no_layers_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="features must be different numbers of layers"):
        HeadsConfig(features=given)
