"""The loss of joint training, as written out."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

from medusa_heads.decoder_shape import DecoderShape
from medusa_heads.heads import DraftHeads
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.loss.next_token import next_losses
from medusa_heads.training.loss.rows import next_rows
from medusa_heads.training.loss.teacher import Teacher
from medusa_heads.training.runs.joint import JointObjective, adapted
from tests.training.joint_cases import SMALL, Rows, disturb, fresh, text


def written_out(
    heads: DraftHeads, target: TargetModel, model: PeftModel, batch: dict[str, Tensor]
) -> Tensor:
    """The loss with weights 0.7, 0.4 and 0.3 from whole logits, summed over all tokens."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad(), model.disable_adapter():
        p_BTV = target.model(**inputs).logits.softmax(-1)
    with target.capture_hidden() as hidden:
        log_q_BTV = target.model(**inputs).logits.log_softmax(-1)
        tokens_BTK = F.pad(batch["input_ids"], (0, 3)).unfold(1, 3, 1)[:, 1:]
        encoded_BTE = heads.encode(hidden(), batch["input_ids"])
        heads_BTKV = heads(encoded_BTE, tokens_BTK).log_softmax(-1)
    loss = torch.zeros(())
    labels = batch["labels"].tolist()
    for b, row in enumerate(labels):
        for t in range(len(row) - 1):
            if row[t + 1] == -100:
                continue
            p_V, log_q_V = p_BTV[b, t], log_q_BTV[b, t]
            loss = loss - 0.7 * log_q_V[row[t + 1]] + 0.4 * (p_V * (p_V.log() - log_q_V)).sum()
            for i in range(3):
                if t + 2 + i < len(row) and row[t + 2 + i] != -100:
                    loss = loss - 0.3 * 0.5**i * heads_BTKV[b, t, i, row[t + 2 + i]]
    return loss


SHAPES: dict[str, dict[str, Any]] = {
    "medusa": {},
    "features": {"features": (0, 1)},
    "hydra": {"kind": "hydra", "prefix_attention": True},
    "induction": {"induction": True},
    "block": {"kind": "block"},
    "eagle3": {"kind": "eagle3"},
    "eagle3, features": {"kind": "eagle3", "features": (0, 1)},
    "eagle3, norm_output": {
        "kind": "eagle3",
        "decoder": replace(DecoderShape.of_width(16), norm_output=True),
    },
}


@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_gradients_are_those_of_the_written_out_formula(
    target: TargetModel, make_rows: Rows, shape: str
) -> None:
    target = target.with_features(SHAPES[shape].get("features"))
    heads, batch = fresh(target, **SHAPES[shape]), text(make_rows)
    config = replace(SMALL, lm_weight=0.7, kl_weight=0.4, heads_weight=0.3)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    with adapted(target, config) as model:
        disturb(model)
        joint = JointObjective(heads, target, model, config, LossConfig(decay=0.5))
        learning = list(joint.parameters())
        loss = joint(batch, 7)
        gradients = torch.autograd.grad(loss, learning)
        expected = written_out(heads, target, model, batch) / 7
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        for got, wanted in zip(gradients, torch.autograd.grad(expected, learning), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-6)

        # Without the target's own part there still is a gradient in the adapter: the heads' one.
        heads_alone = joint.loss(joint.read_now(batch), torch.zeros(1), batch, 7)
        through = torch.autograd.grad(heads_alone, list(joint.adapter.parameters()))
        assert all(gradient.abs().max() > 0 for gradient in through)
        in_warm_up = joint(batch, 7, heads_alone=True)
        assert in_warm_up.item() == pytest.approx(heads_alone.item(), rel=1e-6)
        none = torch.autograd.grad(in_warm_up, list(joint.adapter.parameters()), allow_unused=True)
        assert none == (None,) * len(none)


def tiny(kind: str) -> TargetModel:
    shape: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    torch.manual_seed(0)
    if kind == "capped":
        gemma = Gemma2Config(**shape, final_logit_softcapping=2.0)
        model: Any = Gemma2ForCausalLM(gemma)
    else:
        model = GraniteForCausalLM(GraniteConfig(**shape, logits_scaling=0.25))
    with torch.no_grad():
        model.get_output_embeddings().weight.copy_(torch.randn(61, 16))
    return TargetModel(model.eval())


@pytest.mark.parametrize("kind", ["capped", "scaled"])
def test_own_loss_follows_what_the_target_does_behind_its_lm_head(
    kind: str, make_rows: Rows
) -> None:
    target, batch = tiny(kind), text(make_rows)
    with target.capture_hidden() as last:
        logits_BTV = target.model(batch["input_ids"]).logits
        hidden_BTD = last()
    before_BTD = hidden_BTD.detach() + 0.3
    before_V = F.log_softmax(_logits(target, before_BTD), dim=-1)
    labels_N = batch["labels"][:, 1:].flatten()
    plain = F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_N, reduction="sum")
    kl_BT = F.kl_div(logits_BTV.log_softmax(-1), before_V, log_target=True, reduction="none").sum(
        -1
    )
    plain = plain + 0.5 * kl_BT[:, :-1].flatten()[labels_N != -100].sum()
    objective = LossConfig({"cross_entropy": 1.0, "forward_kl": 0.5})
    rows = next_rows(batch["labels"])
    got_N, _ = next_losses(Teacher.from_target(target), hidden_BTD, rows, objective, before_BTD)
    torch.testing.assert_close(got_N.sum(), plain, rtol=1e-5, atol=1e-5)
    got, wanted = (
        torch.autograd.grad(x, hidden_BTD, retain_graph=True)[0] for x in (got_N.sum(), plain)
    )
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-5)


def _logits(target: TargetModel, hidden_BTD: Tensor) -> Tensor:
    head = Teacher.from_target(target)
    return head.shaped(hidden_BTD @ head.weight_WD.T).detach()


def test_own_rows_do_not_cross_documents() -> None:
    labels_BT = torch.tensor([[-100, -100, 5, 6, -100, 7, 8, 9]])
    positions_BT = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1]])
    assert next_rows(labels_BT).positions_N.tolist() == [1, 2, 4, 5, 6]
    rows = next_rows(labels_BT, positions_BT)
    assert (rows.positions_N.tolist(), rows.labels_N.tolist()) == ([1, 2, 4, 6], [5, 6, 7, 9])


def test_dropped_activations_are_made_anew_with_the_same_gradients(
    target: TargetModel, make_rows: Rows
) -> None:
    batch, heads = text(make_rows), fresh(target)
    gradients = []
    with adapted(target, SMALL) as model:
        disturb(model)
        joint = JointObjective(heads, target, model, SMALL, LossConfig()).train()
        kept: list[int] = []
        for dropping in (False, True):
            if dropping:
                joint.activation_checkpointing_enable()
            count = 0

            def keep(tensor: Tensor) -> Tensor:
                nonlocal count
                count += 1
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = joint(batch, 7)
            kept.append(count)
            gradients.append(torch.autograd.grad(loss, list(joint.parameters())))
    assert kept[1] < kept[0] / 2
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)
