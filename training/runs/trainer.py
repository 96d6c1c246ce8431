"""transformers' Trainer for a model that a frozen target teaches: the target runs beside it.

Shapes: B batch, T tokens, P positions of a batch (B * T), R measured positions, F figures of each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainingArguments

from medusa_heads.config import IGNORED
from medusa_heads.target.target import TargetModel
from medusa_heads.training.hidden.launched import launched_sharding, learning_whole
from medusa_heads.training.hidden.sharding import is_sharded
from medusa_heads.training.measure.fresh_heads import Comparison
from medusa_heads.training.runs.resumable import ResumableTrainer

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState
    from transformers.trainer_utils import EvalLoopOutput


class TaughtTrainer(ResumableTrainer, ABC):
    """Trains what fits a target, which is no part of the model: no checkpoint holds any of it, no
    optimiser knows it.

    Args:
        model: what learns.
        target: on the same device.
        args: of the run.
        record: gives what the `run.yaml` in each checkpoint says.
        describe: the line that the screen shows of an evaluation's metrics, None where there is
            nothing to show.
        kwargs: further arguments of transformers.Trainer.

    Raises:
        ValueError: the launch would take the model apart, or wants a spread target and got a whole
            one; or the run is given a setting of transformers that has no place in it.
    """

    # Settings of transformers that would be dropped in silence or end in a fault, and what they are
    # where nobody set them.
    unusable: ClassVar[Mapping[str, Any]] = {
        "label_smoothing_factor": 0.0,
        "prediction_loss_only": False,
        "batch_eval_metrics": False,
        "eval_do_concat_batches": True,
        "push_to_hub": False,  # the folder as it is, with all that a run leaves there
    }

    def __init__(
        self,
        model: nn.Module,
        target: TargetModel,
        args: TrainingArguments,
        *,
        record: Callable[[], Mapping[str, Any]] | None,
        describe: Callable[[dict[str, Any]], str | None],
        **kwargs: Any,
    ) -> None:
        if args.fsdp or args.deepspeed:
            raise ValueError(
                "heads and draft models are trained whole in each process: leave fsdp and "
                "deepspeed out of training_args, and launch with configs/accelerate/fsdp.yaml, "
                "which spreads the target of heads, or with configs/accelerate/ddp.yaml"
            )
        if launched_sharding() is not None and not is_sharded(target):
            raise ValueError(
                "this is an FSDP launch, and the target is whole in this process: spread it with "
                "shard_target first, or launch with configs/accelerate/ddp.yaml"
            )
        for name, unset in self.unusable.items():
            if getattr(args, name, unset) != unset:
                raise ValueError(
                    f"training_args: {name} has no place in this training: leave it out, got "
                    f"{getattr(args, name)!r}"
                )
        # Every resumable checkpoint holds the arguments: no token that nothing here reads.
        args.hub_token = None
        # Inputs are made from these columns, not by the model's own forward.
        args.remove_unused_columns = False
        if args.n_gpu > 1:
            # DataParallel would copy the model to every GPU, but not the target.
            args._n_gpu = 1
        target.freeze()
        self.target = target
        self.record = record
        self._held_out_sums: list[Tensor] = []  # of each batch, [2]: its loss, its tokens
        super().__init__(model=model, args=args, **kwargs)
        self.model_accepts_loss_kwargs = True  # the divisor is given: no second average
        if not args.disable_tqdm:
            self.remove_callback(ProgressCallback)
            self.add_callback(ReadableProgress(describe))

    def create_accelerator_and_postprocess(self) -> None:
        """As transformers', without FSDP: a launch's is for the target, which has it already."""
        with learning_whole():
            super().create_accelerator_and_postprocess()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss over `num_items_in_batch` generated tokens, those of the whole step."""
        counted = num_items_in_batch is not None
        items = num_items_in_batch if counted else (inputs["labels"] != IGNORED).sum()
        loss = self._loss(model, inputs, items)
        if counted and self.args.average_tokens_across_devices:
            # The count is over all processes, and DDP averages gradients: undo the average.
            loss = loss * self.accelerator.num_processes
        return (loss, {}) if return_outputs else loss

    def _check_progress(self, comparison: Comparison, losses_2F: Tensor) -> None:
        """Hand on the losses of a comparison, averaged so that all processes stop together."""
        losses_2F = self.accelerator.reduce(losses_2F, reduction="mean")
        comparison.check(losses_2F, self.state.global_step, self.args.learning_rate)

    @abstractmethod
    def _loss(self, model: nn.Module, inputs: dict[str, Any], items: Any) -> Tensor:
        """The loss of a batch, over so many tokens."""

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Loss, figures_BTF (-100 where nothing is measured) and labels_BT."""
        inputs = self._prepare_inputs(inputs)
        labels_BT = inputs["labels"] = self._once(inputs["labels"])
        items = (labels_BT != IGNORED).sum()
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, figures = self._judge(model, inputs, items)
            sums_2 = torch.stack([loss.float() * items, items.float()])
            self._held_out_sums.append(self.accelerator.reduce(sums_2, reduction="sum"))
            if prediction_loss_only:
                return loss, None, None
            positions_R, figures_RF = figures()
        figures_PF = figures_RF.new_full((labels_BT.numel(), figures_RF.shape[1]), IGNORED)
        figures_PF[positions_R] = figures_RF
        return loss, figures_PF.view(*labels_BT.shape, -1), labels_BT

    def _once(self, labels_BT: Tensor) -> Tensor:
        """The labels of a held-out batch, without those of rows that only fill the last one up."""
        place = self.accelerator.gradient_state
        if not place.end_of_dataloader or place.remainder <= 0:
            return labels_BT
        before = self.accelerator.process_index * len(labels_BT)
        once_BT = labels_BT.clone()
        once_BT[max(place.remainder - before, 0) :] = IGNORED
        return once_BT

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As in transformers, with a loss per token in place of a mean over batches."""
        self._held_out_sums.clear()
        output = super().evaluation_loop(*args, **kwargs)
        if self._held_out_sums and output.metrics is not None:
            loss, items = torch.stack(self._held_out_sums).cpu().double().sum(dim=0).tolist()
            prefix = kwargs.get("metric_key_prefix", "eval")
            output.metrics[f"{prefix}_loss"] = loss / max(items, 1)
        return output

    @abstractmethod
    def _judge(
        self, model: nn.Module, inputs: dict[str, Any], items: Any
    ) -> tuple[Tensor, Callable[[], tuple[Tensor, Tensor]]]:
        """The loss of a held-out batch; and what measures positions_R of it, and figures_RF."""


class ReadableProgress(ProgressCallback):
    """The Trainer's progress bars, with lines of a few figures in place of whole dictionaries.

    Args:
        describe: see TaughtTrainer.
    """

    def __init__(self, describe: Callable[[dict[str, Any]], str | None]) -> None:
        super().__init__()
        self.describe = describe

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or logs is None:
            return
        place = f"step {state.global_step}/{state.max_steps}"
        if (line := self.describe(logs)) is not None:
            tqdm.write(f"{place}  {line}")
        elif "loss" in logs:
            tqdm.write(
                f"{place}  loss {float(logs['loss']):.3f}  "
                f"learning rate {float(logs['learning_rate']):.2e}"
            )
