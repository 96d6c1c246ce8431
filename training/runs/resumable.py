"""Checkpoints to resume from: whole, or known not to be.

A process may be killed at any moment, also while it writes a checkpoint or removes an old one. In a
`checkpoint-*` folder `trainer_state.json` is written last, when all processes have written their
parts, and removed first; a folder without it is no checkpoint.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput

from medusa_heads.files import parse_json
from medusa_heads.training.runs.record import write_run

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
_PARTS = ("*model*", "optimizer*", "scheduler.pt", "rng_state*")  # under any kind of parallelism


class ResumableTrainer(Trainer):
    """transformers' Trainer with checkpoints that survive a kill, and a `run.yaml` in each.

    Attributes:
        record: gives what `run.yaml` says, as plain values.
    """

    record: Callable[[], Mapping[str, Any]] | None = None

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> TrainOutput:
        """As transformers', which would take one step more where a finished run is resumed."""
        if isinstance(resume_from_checkpoint, str):
            state = TrainerState.load_from_json(str(Path(resume_from_checkpoint) / STATE_FILE))
            if _is_finished(state, self.args):
                self._load_from_checkpoint(resume_from_checkpoint)
                self.state = state
                if self.args.load_best_model_at_end and state.best_model_checkpoint:
                    self._load_best_model()
                return TrainOutput(state.global_step, 0.0, {})
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As transformers', with a sentence where the rates of the parts were others.

        Raises:
            ValueError: the checkpoint's optimiser has its parameters in other groups.
        """
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
        except ValueError as error:
            if "parameter group" not in str(error):
                raise
            raise ValueError(
                f"{checkpoint!r} cannot be resumed: its parts had other learning rates, by default "
                "where one is given now, or the other way round, or by the defaults of an earlier "
                "version; resume with the learning_rate it was made with, or start anew"
            ) from error

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial))
        if self.args.should_save:
            remove_checkpoint(folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        # The last that every process writes; what follows is trainer_state.json.
        super()._save_rng_state(output_dir)
        if self.record is not None and self.args.should_save:
            write_run(output_dir, self.record())
        self.accelerator.wait_for_everyone()


def _is_finished(state: TrainerState, args: TrainingArguments) -> bool:
    """Whether a run came to its end, and is not asked now to go further than it was then."""
    if not 0 < state.max_steps <= state.global_step:
        return False
    if args.max_steps > 0:
        return args.max_steps <= state.global_step
    return args.num_train_epochs <= state.num_train_epochs


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint was written to its end, and nothing of it is missing."""
    try:
        state = parse_json((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    parts = all(any(checkpoint.glob(pattern)) for pattern in _PARTS)
    return isinstance(state, dict) and "global_step" in state and parts


def checkpoints(output: Path) -> list[Path]:
    """All `checkpoint-*` folders, the newest first, whole or not."""
    found = [path for path in output.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.is_dir()]
    numbered = [path for path in found if path.name.rpartition("-")[2].isdigit()]
    return sorted(numbered, key=lambda path: -int(path.name.rpartition("-")[2]))


def last_checkpoint(output: Path) -> Path | None:
    """The newest whole checkpoint. transformers' `get_last_checkpoint` takes half-written ones."""
    for checkpoint in checkpoints(output):
        if is_whole(checkpoint):
            return checkpoint
        logger.warning("%s was not written to its end: passed over", checkpoint)
    return None


def find_checkpoint(name: str | None, output: Path) -> str | None:
    """The checkpoint to go on from.

    Args:
        name: a folder; `"last"`, the newest whole one in `output`; `"auto"`, likewise, but None
            where there is none; or None.
        output: the run's folder.

    Raises:
        ValueError: there is none, or it is not whole.
    """
    if name is None:
        return None
    if name in ("last", "auto"):
        found = last_checkpoint(output)
        if found is None and name == "last":
            raise ValueError(f"nothing to resume: {str(output)!r} has no whole checkpoint-* folder")
        return None if found is None else str(found)
    if not is_whole(Path(name)):
        raise ValueError(
            f"expected a whole checkpoint in the folder {name!r}, found none: give 'last' for the "
            "newest whole one of the run"
        )
    return name


def clear_checkpoints(output: Path) -> None:
    """Make room for a run from the start: leftovers of another would be mistaken for its own."""
    for checkpoint in checkpoints(output):
        remove_checkpoint(checkpoint)


def remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint; at no moment a part of it looks like a whole."""
    (checkpoint / STATE_FILE).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)
