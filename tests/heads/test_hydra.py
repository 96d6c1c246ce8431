"""Hydra heads: what each may see, fresh heads, and what the state dict holds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from medusa_heads.config import HeadsConfig
from medusa_heads.heads import DraftHeads, HydraHeads, MedusaHeads, new_heads
from medusa_heads.target.target import TargetModel
from tests.conftest import TinyLlama


def random_heads(model: object, **config: object) -> HydraHeads:
    """Hydra heads whose every weight matters."""
    heads = HydraHeads.from_target(model, HeadsConfig(kind="hydra", num_heads=3, **config))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return heads


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, 64, generator=generator), torch.randint(199, (5, 3), generator=generator)


@pytest.mark.parametrize("vocab_matrix", ["shared", "own"])
@pytest.mark.parametrize("prefix_attention", [False, True])
def test_fresh_heads_predict_what_the_target_does(
    tiny_llama: TinyLlama, vocab_matrix: str, prefix_attention: bool
) -> None:
    target = TargetModel(tiny_llama())
    config = HeadsConfig(
        kind="hydra",
        num_heads=3,
        num_layers=2,
        vocab_matrix=vocab_matrix,  # type: ignore[arg-type]
        prefix_attention=prefix_attention,
    )
    heads = new_heads(target, config)
    assert isinstance(heads, HydraHeads)
    ids_BT = torch.arange(24).view(2, 12)
    hidden_BTD = heads.encode(target.hidden(ids_BT), ids_BT)
    tokens_BTK = torch.randint(199, (2, 12, 3), generator=torch.Generator().manual_seed(0))
    logits_BTKV = heads(hidden_BTD, tokens_BTK)
    expected_BTV = target.model(ids_BT).logits
    torch.testing.assert_close(logits_BTKV, expected_BTV[:, :, None].expand_as(logits_BTKV))


def test_a_head_sees_the_tokens_before_its_own_and_no_other(tiny_llama: TinyLlama) -> None:
    heads = random_heads(tiny_llama())
    hidden_RD, tokens_RK = inputs()
    logits_RKV = heads(hidden_RD, tokens_RK)
    for changed in range(3):
        other_RK = tokens_RK.clone()
        other_RK[:, changed] = (other_RK[:, changed] + 1) % 199
        differs_K = (heads(hidden_RD, other_RK) != logits_RKV).any(dim=-1).any(dim=0)
        # Head i predicts t + 2 + i and has seen tokens t + 1 .. t + 1 + i.
        assert differs_K.tolist() == [head >= changed for head in range(3)]


def test_one_head_alone_equals_all_together(tiny_llama: TinyLlama) -> None:
    heads = random_heads(tiny_llama(), num_layers=2)
    hidden_RD, tokens_RK = inputs()
    features_RKD = heads.features(hidden_RD, tokens_RK)
    for head in range(3):
        alone_RD = heads.head_features(head, hidden_RD, tokens_RK[:, : head + 1])
        torch.testing.assert_close(alone_RD, features_RKD[:, head])


def test_tokens_are_asked_for(tiny_llama: TinyLlama) -> None:
    with pytest.raises(ValueError, match="pass tokens_RK"):
        random_heads(tiny_llama())(torch.zeros(1, 64))


def test_embeddings_come_at_unit_scale(tiny_llama: TinyLlama) -> None:
    heads = random_heads(tiny_llama())
    assert heads.embed(torch.arange(199)).square().mean() == pytest.approx(1.0, rel=1e-4)


def test_state_dict_holds_nothing_of_the_target(tiny_llama: TinyLlama) -> None:
    heads: DraftHeads = random_heads(tiny_llama())
    shapes = {name: list(tensor.shape) for name, tensor in heads.state_dict().items()}
    assert shapes == {
        f"{i}.0.{module}.{part}": ([64, 64 * (i + 2)] if part == "weight" else [64])
        for i in range(3)
        for module in ("linear", "res_connection")
        for part in ("weight", "bias")
    }
    assert not any(tensor.shape[0] == 199 for tensor in heads.state_dict().values())


def test_embeddings_of_another_width_are_refused() -> None:
    class Narrow:
        def get_output_embeddings(self) -> torch.nn.Module:
            return torch.nn.Linear(8, 20)

        def get_input_embeddings(self) -> torch.nn.Module:
            return torch.nn.Embedding(20, 4)

    with pytest.raises(ValueError, match="as wide as its hidden state of 8"):
        HydraHeads.from_target(Narrow(), HeadsConfig(kind="hydra"))
    with pytest.raises(ValueError, match="'medusa' without prefix_attention and induction"):
        MedusaHeads.from_target(Narrow(), HeadsConfig(induction=True))
