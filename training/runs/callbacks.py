"""What a run does besides steps: stop in time, stop when told, and know its best heads."""

from __future__ import annotations

import logging
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import (
    EarlyStoppingCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy, SaveStrategy

from medusa_heads.training.hidden.sharding import anywhere

logger = logging.getLogger(__name__)


class StopInTime(EarlyStoppingCallback):
    """transformers' early stopping, which a resumed run takes up where it was interrupted, with the
    patience it is given now."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the count of the checkpoint; where the patience had run out, stop at once."""
        super().on_train_begin(args, state, control, **kwargs)
        # An entry must be there: saving fails on a callback that the checkpoint did not know.
        states: Any = state.stateful_callbacks
        before = states.setdefault(type(self).__name__, self.state())
        name = "early_stopping_patience_counter"
        self.early_stopping_patience_counter = before["attributes"][name]
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True


class Interruptions(TrainerCallback):
    """Checkpoints that a run can be resumed from exactly, also after SIGTERM.

    - On SIGTERM the step in hand is finished, a checkpoint written, and the process ends with exit
      code 143. A second SIGTERM ends it at once. transformers' `enable_jit_checkpoint` saves in the
      middle of a step, and goes on as if training had come to its end.
    - A loss line comes with every checkpoint. The lines after it then average over the same steps
      whether the run was interrupted there or not.
    - The last step is evaluated and saved, so that its heads can be the best.
    - The best checkpoint is looked for in the folder of the run, wherever that has been moved.
    """

    def __init__(self) -> None:
        self._told = False
        self._stopping = False
        self._handler_before: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Listen for SIGTERM; find the best checkpoint so far."""
        if threading.current_thread() is threading.main_thread():
            self._handler_before = signal.signal(signal.SIGTERM, self._on_sigterm)
        if state.best_global_step:
            best = Path(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
            if best.is_dir():
                state.best_model_checkpoint = str(best)
            else:
                logger.warning("the best checkpoint, %s, is gone: its heads are out of reach", best)
                state.best_metric = state.best_global_step = state.best_model_checkpoint = None

    def _on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        self._told = True
        signal.signal(signal.SIGTERM, self._handler_before or signal.SIG_DFL)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Decide what else is to be done after this step."""
        if state.global_step >= state.max_steps:
            if args.eval_strategy == IntervalStrategy.STEPS:
                control.should_evaluate = True
            if args.save_strategy == SaveStrategy.STEPS:
                control.should_save = True
        self._stopping = anywhere(self._told, args.device)  # all after the same step
        if self._stopping:
            control.should_save = control.should_training_stop = True
        if control.should_save:
            control.should_log = True

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """As after a step."""
        if control.should_save:
            control.should_log = True

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End the process where it was told to."""
        if self._stopping:
            if state.is_world_process_zero:
                logger.warning(
                    "SIGTERM: stopped after step %d, its checkpoint is in %s; go on with "
                    "--resume_from_checkpoint last",
                    state.global_step,
                    args.output_dir,
                )
            # Here, because what follows a loop that ends would remove this checkpoint.
            raise SystemExit(128 + signal.SIGTERM)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Hand SIGTERM back, also one that came too late to stop a step."""
        if self._handler_before is not None:
            signal.signal(signal.SIGTERM, self._handler_before)
            if self._told:
                signal.raise_signal(signal.SIGTERM)
