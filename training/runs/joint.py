"""Heads and an adapter in their target, trained together (Medusa-2).

Shapes: B batch, T tokens, R supervised rows, N positions with a supervised next token, K heads,
D hidden.
Source: Cai et al. 2024, "Medusa", arXiv:2401.10774, sections 2.2.2 and 2.3.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer

from medusa_heads.checkpoint.adapter import quiet_peft
from medusa_heads.errors import first_line
from medusa_heads.heads import DraftHeads
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.joint_config import JointConfig
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.arguments.rates import rate_groups
from medusa_heads.training.data.pack import hidden_of
from medusa_heads.training.loss.fused import Pairs
from medusa_heads.training.loss.heads import batch_loss
from medusa_heads.training.loss.next_token import next_losses
from medusa_heads.training.loss.rows import next_rows, per_item
from medusa_heads.training.loss.teacher import Teacher
from medusa_heads.training.measure.metrics import TARGET_FIGURES
from medusa_heads.training.runs.heads_trainer import HeadsTrainer
from medusa_heads.training.runs.trainer import Inputs, Judged, TaughtTrainer

if TYPE_CHECKING:
    from peft import PeftModel

HEADS_TO_ADAPTER_RATE = 4  # the paper's


@contextmanager
def adapted(target: TargetModel, config: JointConfig) -> Iterator[PeftModel]:
    """Within the block the target carries a fresh adapter, which changes nothing until it learns.
    Afterwards it is as it was. Raises ValueError: the target, or modules that were named, cannot
    carry one."""
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
        if lora.target_parameters:  # where there were modules, and peft now finds experts in one
            others = sorted({name.rpartition(".")[2] for name in lora.target_modules or ()})
            raise ValueError(
                f"an adapter at {modules!r} would lie in the parameters of the target's experts, "
                "which no plain LoRA adapter does, and so it could not be saved: name linear "
                f"modules of other names, of these {others}"
            )
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
    activations, know of training; the others stay in evaluation mode."""

    def __init__(self, model: PeftModel) -> None:
        super().__init__()
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                self.register_parameter(name.replace(".", "/"), parameter)
        # In a tuple, so that they do not become submodules.
        self._within = tuple(model.named_modules())
        self.train()

    def train(self, mode: bool = True) -> AdapterWeights:
        super().train(mode)
        for name, module in self._within:
            if isinstance(module, nn.Dropout) and ".lora_dropout." in name:
                module.train(mode)
            elif isinstance(module, GradientCheckpointingLayer):
                module.training = mode  # of the layer alone: what lies within it stays as it is
            elif isinstance(module, nn.Linear):
                # Means nothing, but to bitsandbytes: told of evaluation on a CPU, it packs its
                # matrices into a form without gradients.
                module.training = True
        return self


class JointObjective(nn.Module):
    """Heads and adapter together with their loss: what the Trainer wraps. Its state dict is theirs
    alone; the target is held beside it."""

    def __init__(
        self,
        heads: DraftHeads,
        target: TargetModel,
        model: PeftModel,
        config: JointConfig,
        objective: LossConfig,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.adapter = AdapterWeights(model)
        self.settings = config  # not `config`, which Trainer would take for a model's
        terms = {"cross_entropy": config.lm_weight, "forward_kl": config.kl_weight}
        self.own_objective = LossConfig({name: weight for name, weight in terms.items() if weight})
        self._beside = (target, model)  # in a tuple, so that the target does not become a part
        self.lm_head = Teacher.from_target(target)
        self.heads_loss = partial(batch_loss, heads, objective=objective, teacher=self.lm_head)

    def activation_checkpointing_enable(self, **options: Any) -> None:
        """Let the target's layers drop their activations and make them anew; asked by Trainer."""
        model = self._beside[0].model
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)(**options)

    gradient_checkpointing_enable = activation_checkpointing_enable  # Trainer's word until 5.23

    def forward(
        self, inputs: Mapping[str, Tensor], num_items: Tensor | int, heads_alone: bool = False
    ) -> Tensor:
        """The loss; gradients of the heads' part flow into the adapter too, unless heads learn
        alone."""
        if heads_alone:  # with the same weight: Adam's memory of the gradients' size stays right
            with torch.no_grad():
                hidden_BTD = self.read_now(inputs)
            return self.loss(hidden_BTD, hidden_BTD.new_zeros(()), inputs, num_items)
        before_BTD = self.read_before(inputs) if self.own_objective.needs_teacher else None
        now_BTD = self.read_now(inputs)
        own = next_rows(inputs["labels"], inputs.get("position_ids"))
        losses_N, _ = next_losses(self.lm_head, now_BTD, own, self.own_objective, before_BTD)
        return self.loss(now_BTD, losses_N, inputs, num_items)

    def read_now(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """hidden_BTD of the target with its adapter; gradients flow through it."""
        return hidden_of(self._beside[0], inputs, with_grad=True)

    @torch.no_grad()
    def read_before(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """hidden_BTD without the adapter; to be read first, because peft takes the adapter's
        requires_grad away while it is disabled."""
        with self._beside[1].disable_adapter():
            return self.read_now(inputs)

    @torch.no_grad()
    def read_twice(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """hidden_BTD with the adapter and without."""
        before_BTD = self.read_before(inputs)
        return self.read_now(inputs), before_BTD

    @torch.no_grad()
    def measure(self, now_BTD: Tensor, before_BTD: Tensor, rows: Pairs) -> tuple[Tensor, Tensor]:
        """losses_N, and figures_N3: the target's own loss with the adapter and without, and
        KL(before || now)."""
        both = LossConfig({"cross_entropy": 1.0, "forward_kl": 1.0})
        sums_N, log_true_N = next_losses(self.lm_head, now_BTD, rows, both, before_BTD)
        before_N, _ = next_losses(self.lm_head, before_BTD, rows, LossConfig())
        figures_N3 = torch.stack([-log_true_N, before_N, sums_N + log_true_N], dim=1)
        weights = self.settings.lm_weight, self.settings.kl_weight
        return weights[0] * figures_N3[:, 0] + weights[1] * figures_N3[:, 2], figures_N3

    def loss(
        self,
        hidden_BTD: Tensor,
        own_losses_N: Tensor,
        inputs: Mapping[str, Tensor],
        num_items: Tensor | int,
    ) -> Tensor:
        """The whole: the target's own part and the heads'."""
        part = self.heads_loss(hidden_BTD, inputs, num_items)
        return per_item(own_losses_N.sum(), num_items) + self.settings.heads_weight * part


class JointTrainer(HeadsTrainer):
    """Trains heads, and after a warm-up an adapter of their target with them: `model` is what
    `adapted` gave, and the learning rate of `args` is the heads'.

    Evaluation measures what HeadsTrainer's does, and the target's own loss per token:
    `eval_target_loss` with the adapter, `eval_target_loss_before` without, and `eval_target_kl`,
    how far its predictions have moved.
    """

    rates = "learning_rate or lora_learning_rate"
    with_adapter = True
    unusable: ClassVar = {**TaughtTrainer.unusable, "neftune_noise_alpha": None}

    def __init__(
        self,
        heads: DraftHeads,
        target: TargetModel,
        model: PeftModel,
        args: TrainingArguments,
        *sets: Dataset,
        config: JointConfig,
        objective: LossConfig | None = None,
        **kwargs: Any,
    ) -> None:
        joint = JointObjective(heads, target, model, config, objective or LossConfig())
        super().__init__(heads, target, args, *sets, trained=joint, **kwargs)
        joint.adapter.requires_grad_(True)  # which freezing the target took away
        self.joint = joint
        self._adapter_rate = config.learning_rate or args.learning_rate / HEADS_TO_ADAPTER_RATE
        self.health.more_rates["lora_learning_rate"] = self._adapter_rate

    def _groups(self) -> list[dict[str, Any]]:
        # All in one where nothing decays, as in checkpoints of earlier versions.
        decaying = self._decaying() if self.args.weight_decay else list(self.heads.parameters())
        of_heads = rate_groups(self.heads, self.args, decaying)
        adapter = {"params": list(self.joint.adapter.parameters()), "lr": self._adapter_rate}
        return [*of_heads, {**adapter, "weight_decay": self.args.weight_decay}]

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """The run's course; where it is a function of the step, the adapter's rate rises again from
        its own first step on."""
        fresh = self.lr_scheduler is None
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if fresh and isinstance(scheduler, LambdaLR):
            course = scheduler.lr_lambdas[0]
            first = self.joint.settings.warmup(num_training_steps)
            rise = max(self.args.get_warmup_steps(num_training_steps), 1)

            def of_adapter(step: int) -> float:
                return float(course(step)) * min(max((step - first) / rise, 0.0), 1.0)

            scheduler.lr_lambdas[-1] = of_adapter
            group = scheduler.optimizer.param_groups[-1]
            group["lr"] = scheduler.base_lrs[-1] * of_adapter(0)
        return scheduler

    def _loss(self, model: nn.Module, inputs: Inputs, items: Any) -> Tensor:
        alone = self.state.global_step < self.joint.settings.warmup(self.state.max_steps)
        loss: Tensor = model(inputs, items, heads_alone=alone)
        # Also without the adapter: one gone wrong would spoil fresh heads' loss as well.
        self._compare(inputs, lambda: self.joint.read_twice(inputs))
        return loss

    def _read(self, inputs: Inputs) -> Tensor | None:
        return self.joint.read_before(inputs)

    def _judge(self, model: nn.Module, inputs: Inputs, items: Any) -> Judged:
        own = next_rows(inputs["labels"], inputs.get("position_ids"))
        now_BTD, before_BTD = self.joint.read_twice(inputs)
        losses_N, figures_N3 = self.joint.measure(now_BTD, before_BTD, own)
        for name, figure_N in zip(TARGET_FIGURES, figures_N3.unbind(dim=1), strict=True):
            self._add_up(f"target_{name}", figure_N.sum(), torch.ones_like(figure_N).sum())
        loss = self.joint.loss(now_BTD, losses_N, inputs, items)
        return loss, *self._ranks(now_BTD, inputs)
