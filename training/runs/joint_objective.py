"""Heads and an adapter in their target, and the loss that both learn by (Medusa-2).

Shapes: B batch, T tokens, R supervised rows, N positions with a supervised next token, K heads,
D hidden.
Source: Cai et al. 2024, "Medusa", arXiv:2401.10774, sections 2.2.2 and 2.3.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from medusa_heads.checkpoint.adapter import quiet_peft
from medusa_heads.errors import first_line
from medusa_heads.heads import DraftHeads
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.joint_config import JointConfig
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.loss.own import OwnRows, own_losses, own_rows
from medusa_heads.training.loss.row_blocks import rows_loss
from medusa_heads.training.loss.rows import SupervisedRows, encode_rows, per_item
from medusa_heads.training.loss.teacher import Teacher

if TYPE_CHECKING:
    from peft import PeftModel


@contextmanager
def adapted(target: TargetModel, config: JointConfig) -> Iterator[PeftModel]:
    """Within the block the target carries a fresh adapter, which changes nothing until it learns.
    Afterwards it is as it was.

    Raises:
        ValueError: it carries one already, or the names of modules are unknown or the lm_head's, or
            its 4-bit matrices have lost their gradients.
    """
    from peft import LoraConfig, get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    if any(isinstance(module, BaseTunerLayer) for module in target.model.modules()):
        raise ValueError(
            "joint training gives the target an adapter, and it carries one already: merge that "
            "first"
        )
    if any(_is_packed(module) for module in target.model.modules()):
        raise ValueError(
            "bitsandbytes has packed the target's 4-bit matrices for inference on the CPU, and so "
            "they have no gradients: load it anew, and train before it generates"
        )
    modules = config.target_modules
    lora = LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # a float serves as well
        lora_dropout=config.lora_dropout,
        target_modules=modules if isinstance(modules, str) else list(modules),
        task_type="CAUSAL_LM",
    )
    try:
        with quiet_peft():
            model = get_peft_model(target.model, lora)
    except ValueError as error:
        reason = first_line(error)
        raise ValueError(f"the target takes no adapter at {modules!r}: {reason}") from error
    try:
        for part in (target.get_output_embeddings(), target.get_input_embeddings()):
            if isinstance(part, BaseTunerLayer):
                raise ValueError(
                    "an adapter in the lm_head or the token embeddings would change what heads "
                    f"share with the target: leave them out of {modules!r}"
                )
        yield model
    finally:
        model.unload()
        target.freeze()


def _is_packed(module: nn.Module) -> bool:
    state = getattr(getattr(module, "weight", None), "quant_state", None)
    return bool(getattr(state, "packing_format_for_cpu", False))


class AdapterWeights(nn.Module):
    """The weights that learn within the target, without the target: for the optimiser, for DDP and
    for checkpoints. Of the target's modules only the adapter's dropout, and layers that drop their
    activations, know of training; the others stay in evaluation mode.
    """

    def __init__(self, model: PeftModel) -> None:
        super().__init__()
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                self.register_parameter(name.replace(".", "/"), parameter)
        # In a tuple, so that they do not become submodules.
        self._dropouts = tuple(
            module
            for name, module in model.named_modules()
            if ".lora_dropout." in name and isinstance(module, nn.Dropout)
        )
        modules = tuple(model.modules())
        self._layers = tuple(m for m in modules if isinstance(m, GradientCheckpointingLayer))
        self._linear = tuple(m for m in modules if isinstance(m, nn.Linear))
        self.train()

    def train(self, mode: bool = True) -> AdapterWeights:
        """As in nn.Module, for the adapter's parts within the target."""
        super().train(mode)
        for dropout in self._dropouts:
            dropout.train(mode)
        for layer in self._layers:
            layer.training = mode  # of the layer alone: what lies within it stays as it is
        for linear in self._linear:
            # Means nothing, but to bitsandbytes: told of evaluation on a CPU, it packs its matrices
            # into a form without gradients.
            linear.training = True
        return self


@dataclass(frozen=True)
class Reading:
    """The target's hidden states of a batch.

    Attributes:
        now_BTD: with its adapter; gradients flow through them.
        before_BTD: without.
    """

    now_BTD: Tensor
    before_BTD: Tensor | None


class JointObjective(nn.Module):
    """Heads and adapter together with their loss: what the Trainer wraps. Its state dict is theirs
    alone; the target is held beside it."""

    def __init__(
        self,
        heads: DraftHeads,
        target: TargetModel,
        model: PeftModel,
        config: JointConfig,
        heads_objective: LossConfig,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.adapter = AdapterWeights(model)
        self.settings = config  # not `config`, which Trainer would take for a model's
        self.heads_objective = heads_objective
        terms = {"cross_entropy": config.lm_weight, "forward_kl": config.kl_weight}
        self.own_objective = LossConfig({name: weight for name, weight in terms.items() if weight})
        self._beside = (target, model)  # in a tuple, so that the target does not become a part
        self.lm_head = Teacher.from_target(target)

    def activation_checkpointing_enable(self, **options: Any) -> None:
        """Let the target's layers drop their activations and make them anew; asked by Trainer."""
        model = self._beside[0].model
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)(**options)

    gradient_checkpointing_enable = activation_checkpointing_enable  # Trainer's word until 5.23

    def forward(
        self,
        inputs: Mapping[str, Tensor],
        rows: SupervisedRows,
        num_items: Tensor | int,
        heads_alone: bool = False,
    ) -> Tensor:
        """The loss; gradients of the heads' part flow into the adapter through the hidden states,
        unless the heads learn alone."""
        if heads_alone:
            hidden_BTD = self._beside[0].hidden(*_texts(inputs))
            return self._heads_loss(hidden_BTD, inputs, rows, num_items)
        reading = self.read(inputs, before=self.own_objective.needs_teacher)
        own = own_rows(inputs["labels"], inputs.get("position_ids"))
        return self.loss(reading, self.own_losses(reading, own), inputs, rows, num_items)

    def read(self, inputs: Mapping[str, Tensor], *, before: bool) -> Reading:
        """Run the target, with its adapter and, if wanted, without."""
        target, model = self._beside
        before_BTD = None
        if before:
            # First, because peft takes the adapter's requires_grad away while it is disabled.
            with model.disable_adapter():
                before_BTD = target.hidden(*_texts(inputs))
        return Reading(target.hidden_with_grad(*_texts(inputs)), before_BTD)

    def own_losses(self, reading: Reading, rows: OwnRows) -> Tensor:
        """losses_N of the target's own predictions, weighted."""
        return own_losses(
            self.lm_head, reading.now_BTD, rows, self.own_objective, reading.before_BTD
        )[0]

    @torch.no_grad()
    def measure(self, reading: Reading, rows: OwnRows) -> tuple[Tensor, Tensor]:
        """losses_N, and figures_N3: the target's own loss with the adapter and without, and
        KL(before || now)."""
        assert reading.before_BTD is not None
        both = LossConfig({"cross_entropy": 1.0, "forward_kl": 1.0})
        sums_N, log_true_N = own_losses(
            self.lm_head, reading.now_BTD, rows, both, reading.before_BTD
        )
        plain = LossConfig()
        before_N, _ = own_losses(self.lm_head, reading.before_BTD, rows, plain, None)
        figures_N3 = torch.stack([-log_true_N, before_N, sums_N + log_true_N], dim=1)
        weights = self.settings.lm_weight, self.settings.kl_weight
        losses_N = weights[0] * figures_N3[:, 0] + weights[1] * figures_N3[:, 2]
        return losses_N, figures_N3

    def loss(
        self,
        reading: Reading,
        own_losses_N: Tensor,
        inputs: Mapping[str, Tensor],
        rows: SupervisedRows,
        num_items: Tensor | int,
    ) -> Tensor:
        """The whole: the target's own part and the heads'."""
        own = per_item(own_losses_N.sum(), num_items)
        return own + self._heads_loss(reading.now_BTD, inputs, rows, num_items)

    def _heads_loss(
        self,
        hidden_BTD: Tensor,
        inputs: Mapping[str, Tensor],
        rows: SupervisedRows,
        num_items: Tensor | int,
    ) -> Tensor:
        teacher = None
        if self.heads_objective.needs_teacher:
            teacher = self.lm_head.reading(hidden_BTD.detach())
        # The same weight while they learn alone: Adam's memory of the gradients' size stays right.
        return self.settings.heads_weight * rows_loss(
            self.heads,
            encode_rows(self.heads, hidden_BTD, inputs, rows),
            rows,
            objective=self.heads_objective,
            num_items=num_items,
            teacher=teacher,
        )


def _texts(inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What the target reads of a batch."""
    return inputs["input_ids"], inputs.get("attention_mask"), inputs.get("position_ids")
