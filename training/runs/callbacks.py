"""What a run does besides steps: stop in time, stop when told, know its best heads, and tell."""

from __future__ import annotations

import logging
import signal
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import EarlyStoppingCallback, ProgressCallback, TrainerCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from medusa_heads.machine.devices import wait_for
from medusa_heads.training.hidden.sharding import any_process
from medusa_heads.training.runs.record import judged_by_another
from medusa_heads.training.runs.resumable import find_best, forget_best

logger = logging.getLogger(__name__)

_HANDED_ON = 5.0  # seconds from a SIGTERM to the same one, by way of a launcher


class StopInTime(EarlyStoppingCallback):
    """transformers' early stopping, which a resumed run takes up where it was interrupted, with the
    patience it is given now; where that had run out, it stops at once, if the best is known. An
    evaluation before the first step (`eval_on_start`) counts for nothing: a run that goes on had
    it already."""

    _began = -1  # behind which step

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        # An entry must be there: saving fails on a callback that the checkpoint did not know.
        before = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        count = before["attributes"]["early_stopping_patience_counter"]
        self.early_stopping_patience_counter = count
        if count >= self.early_stopping_patience and state.best_metric is not None:
            control.should_training_stop = True
        self._began = state.global_step

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any
    ) -> None:
        """Count an evaluation without a new best."""
        if state.global_step > self._began:
            super().on_evaluate(args, state, control, metrics, **kwargs)


class BestSoFar(TrainerCallback):
    """What was best before a run was interrupted; nothing, where it was chosen by other text or
    another metric than is now: figures of two kinds do not compare."""

    def __init__(self, record: Callable[[], Mapping[str, Any]] | None) -> None:
        self.record = record
        self.checkpoint: str | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find its checkpoint."""
        if self.checkpoint is None or not state.best_global_step:
            return
        other = self.record and judged_by_another(self.checkpoint, self.record())
        if not other:
            find_best(state, Path(self.checkpoint))
            return
        forget_best(state)
        if state.is_world_process_zero:
            logger.warning(
                "the best so far was chosen by another %s: it is forgotten, and the best is looked "
                "for from step %d on",
                other,
                state.global_step,
            )


class Interruptions(TrainerCallback):
    """Checkpoints that a run can be resumed from exactly, also after SIGTERM.

    - On SIGTERM the step in hand is finished, and evaluated where that is due, a checkpoint
      written, and the process ends with exit code 143. A second SIGTERM ends it at once, unless it
      comes right behind the first: a launcher hands on what its processes got as well.
      transformers' `enable_jit_checkpoint` saves in the middle of a step, and goes on as if
      training had come to its end.
    - A loss line comes with every checkpoint, and with every evaluation, behind which one may be
      saved. The lines after it then average over the same steps whether the run was interrupted
      there or not.
    - The last step is evaluated and saved, so that its heads can be the best.
    """

    def __init__(self) -> None:
        self._told: float | None = None  # when
        self._stopping = False
        self._handler_before: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Listen for SIGTERM; a run that begins anew, with smaller batches, does so already."""
        listens = self._handler_before is not None
        if not listens and threading.current_thread() is threading.main_thread():
            self._handler_before = signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, *_: Any) -> None:
        if self._told is None:
            self._told = time.monotonic()
        elif time.monotonic() - self._told > _HANDED_ON:
            signal.signal(signal.SIGTERM, self._handler_before or signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:
            control.should_evaluate |= args.eval_strategy == IntervalStrategy.STEPS
            control.should_save |= args.save_strategy == SaveStrategy.STEPS
        self._stopping = any_process(self._told is not None, args.device)  # all after the same step
        # An epoch's evaluation comes behind its last step, and is not made up for later.
        ends_epoch = state.epoch % 1 == 0 or state.global_step >= state.max_steps
        if self._stopping and not (ends_epoch and args.eval_strategy == IntervalStrategy.EPOCH):
            control.should_save = control.should_training_stop = True
        control.should_log |= control.should_save or control.should_evaluate

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._stopping:
            control.should_save = control.should_training_stop = True
        control.should_log |= control.should_save or control.should_evaluate

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
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

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Hand SIGTERM back, also one that came too late to stop a step."""
        self.hand_back()
        if self._told is not None:
            signal.raise_signal(signal.SIGTERM)

    def hand_back(self) -> None:
        """SIGTERM is the program's again, which had it before; also behind a run that failed."""
        if self._handler_before is not None:
            signal.signal(signal.SIGTERM, self._handler_before)
            self._handler_before = None


class Pace(TrainerCallback):
    """What a step takes; batches are at hand when it begins."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, *_: Any, **__: Any) -> None:
        """The optimiser has done its part."""
        wait_for(args.device)
        self._seconds.append(time.perf_counter() - self._began)

    def median(self) -> float | None:
        """Seconds of a step, the first one left out, which warms up; None of no step."""
        return statistics.median(self._seconds[1:] or self._seconds) if self._seconds else None


class ReadableProgress(ProgressCallback):
    """The Trainer's progress bars, with lines of a few figures in place of whole dictionaries."""

    def __init__(self, describe: Callable[[Mapping[str, Any]], str | None]) -> None:
        super().__init__()
        self.describe = describe

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or logs is None:
            return
        line = self.describe(logs)
        if line is None and "loss" in logs:
            rate = float(logs["learning_rate"])
            line = f"loss {float(logs['loss']):.3f}  learning rate {rate:.2e}"
        if line is not None:
            tqdm.write(f"step {state.global_step}/{state.max_steps}  {line}")
