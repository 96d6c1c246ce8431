"""Checkpoints to resume from: whole, or known not to be.

A process may be killed at any moment, also while it writes a checkpoint or removes an old one. In a
`checkpoint-*` folder `trainer_state.json` is written last, when all processes have written their
parts, and removed first; a folder without it is no checkpoint.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import (
    BatchSamplerShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    get_sampler,
)
from accelerate.state import GradientState
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerState, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from medusa_heads.config import IGNORED
from medusa_heads.contents import STATE_FILE, foreign_model, trained_in
from medusa_heads.errors import first_line, is_disk_full
from medusa_heads.files import check_folder, expanded, read_json
from medusa_heads.training.hidden.states import GroupedOrder
from medusa_heads.training.runs.record import RUN_FILE

logger = logging.getLogger(__name__)

_GIVEN = ("initial_lr", "weight_decay", "betas", "eps")  # of an optimiser's groups: no state
_OF_AN_EPOCH = 1e-6  # less than a step's share of any
_PARTS = ("*model*", "optimizer*", "scheduler.pt", "rng_state*")  # under any kind of parallelism


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint was written to its end, and nothing of it is missing."""
    try:
        state = read_json(checkpoint / STATE_FILE)
    except ValueError:
        return False
    return "global_step" in state and all(any(checkpoint.glob(pattern)) for pattern in _PARTS)


def finished_state(checkpoint: str, args: TrainingArguments) -> TrainerState | None:
    """The state of a run that came to its end, be it one that is given now, and is not asked to go
    further; else None."""
    state = TrainerState.load_from_json(str(Path(checkpoint) / STATE_FILE))
    if not any(0 < steps <= state.global_step for steps in (state.max_steps, args.max_steps)):
        return None
    more = args.max_steps > 0 and args.max_steps > state.global_step
    # By the text that was read: the state's own number of epochs is rounded up.
    unread = args.num_train_epochs - (state.epoch or 0.0)
    again = args.max_steps <= 0 and unread > _OF_AN_EPOCH
    return None if more or again else state


def say_ended(state: TrainerState, args: TrainingArguments) -> None:
    """A line for whoever resumes a run of that finished state, of which no step is trained."""
    if args.process_index:
        return
    step, most = state.global_step, args.max_steps
    if 0 < most < step:
        why = f"the checkpoint is of step {step}, and max_steps is {most}: give more to go on"
        logger.warning("nothing is trained: %s", why)
        return
    logger.warning(
        "the run had ended already, at step %d of %d: nothing is trained, and what it learnt is "
        "measured and written again",
        step,
        most if most > 0 else state.max_steps,
    )


def find_best(state: TrainerState, checkpoint: Path) -> None:
    """Name in a state the checkpoint of its best step: the one beside the `checkpoint` that the
    state is of, wherever that folder has been moved; or the one it knew, where it went on from
    another folder. No best one is left, with a sentence, where both are gone, or of other runs."""
    if not state.best_global_step:
        return
    beside = checkpoint.parent / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
    for best in (beside, Path(state.best_model_checkpoint or beside)):
        if is_whole(best) and read_json(best / STATE_FILE).get("best_metric") == state.best_metric:
            state.best_model_checkpoint = str(best)
            return
    logger.warning("the best checkpoint, %s, is gone: its heads are out of reach", beside)
    forget_best(state)


def forget_best(state: TrainerState) -> None:
    """The next evaluation is the best so far."""
    state.best_metric = state.best_global_step = state.best_model_checkpoint = None


def lies_in(checkpoint: str | None, output: Path) -> bool:
    """Whether a checkpoint is one of those in a folder."""
    return checkpoint is not None and Path(checkpoint).parent.resolve() == output.resolve()


def with_order(loader: Any, order: Callable[[int, int], Any], seed: int) -> Any:
    """A loader that accelerate has prepared, where it would draw rows by a seed with the order that
    is made of their number and that seed; of rows that are grouped by length, with one that hangs
    on `seed`. Put where accelerate looks for its own: several processes that go on in the middle of
    a later pass would begin that pass with the order of the first."""
    plain, shard = get_sampler(loader), loader.batch_sampler
    inner = shard.batch_sampler if isinstance(shard, BatchSamplerShard) else None
    plain = getattr(inner, "sampler", None) if plain is None else plain
    if isinstance(plain, SeedableRandomSampler):
        loader.set_sampler(order(len(plain), plain.initial_seed))
    elif isinstance(plain, LengthGroupedSampler):
        loader.set_sampler(GroupedOrder(plain, seed))
    elif hasattr(inner, "set_epoch"):  # makes the batches itself, as `batch_rebalance` does
        shard.sampler = inner
    return loader


def last_rows(place: GradientState) -> int:
    """How many rows the epoch's last batch of all processes has, without those that fill it up;
    below 1 where there are none of these, or it is not reached. accelerate tells, but of an epoch
    that is resumed."""
    if not place.end_of_dataloader:
        return -1
    loader: Any = place.active_dataloader
    if not isinstance(loader.batch_sampler, SkipBatchSampler):
        return place.remainder
    shard: Any = loader.batch_sampler.batch_sampler
    # Without one size of all batches (`batch_rebalance`), rows are dealt out before.
    if not isinstance(shard, BatchSamplerShard) or shard.drop_last or shard.batch_size is None:
        return -1
    processes = 1 if shard.split_batches else shard.num_processes
    return len(loader.dataset) % (shard.batch_size * processes)


def once(labels_BT: Tensor, accelerator: Accelerator) -> Tensor:
    """The labels of a process's batch, without those of rows that only fill the last one up."""
    if (rows := last_rows(accelerator.gradient_state)) < 1:
        return labels_BT
    before = accelerator.process_index * len(labels_BT)
    once_BT = labels_BT.clone()
    once_BT[max(rows - before, 0) :] = IGNORED
    return once_BT


@contextmanager
def with_rates_of_now(checkpoint: str, optimizer: Any, schedule: Any) -> Iterator[None]:
    """Within the block a checkpoint's optimiser and schedule are read; behind it their rates and
    weight decay are those that the run was given now, which both would bring along. Of a schedule
    that goes by what is measured, the rate is the checkpoint's. Raises ValueError: the rates were
    those of other parts, or these stood in another order, or the schedule is another."""
    given = [{k: group[k] for k in _GIVEN if k in group} for group in optimizer.param_groups]
    try:
        yield
    except KeyError as error:
        if "lr_lambdas" not in error.args:
            raise
        raise ValueError(
            f"{checkpoint!r} cannot be resumed: it was made with another lr_scheduler_type, whose "
            "state is of another form; resume with that, or start anew"
        ) from error
    except ValueError as error:
        if "parameter group" not in str(error):
            raise
        raise ValueError(
            f"{checkpoint!r} cannot be resumed: its parts had other learning rates, by default "
            "where one is given now, or the other way round, or by the defaults of an earlier "
            "version; resume with the learning_rate it was made with, or start anew"
        ) from error
    # Matched by place: torch compares no shapes. Averages of projections are smaller in any order.
    parts = [part.shape for part in optimizer.state]
    averages = [state.get("exp_avg", part).shape for part, state in optimizer.state.items()]
    if parts != averages and sorted(parts) == sorted(averages):
        raise ValueError(f"{checkpoint!r} was made by an earlier version: start anew")
    for group, of_now in zip(optimizer.param_groups, given, strict=True):
        group.update(of_now)
    if isinstance(schedule, LambdaLR):
        schedule.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
        # The step that it has come to, anew: also its course may be another, say to more steps.
        schedule.last_epoch -= 1
        schedule.step()
        schedule._step_count -= 1


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


def say_how_to_go_on(output: Path) -> None:
    """A line for whoever has interrupted a run, where there is something to go on from."""
    if (checkpoint := last_checkpoint(output)) is not None:
        logger.warning(
            "interrupted; the last checkpoint is %s: go on with --resume_from_checkpoint last",
            checkpoint,
        )


def find_checkpoint(name: str | None, output: Path) -> str | None:
    """The checkpoint to go on from: a folder; `"last"`, the newest whole one in `output`; `"auto"`,
    likewise, but None where there is none; or None. Raises ValueError: there is none, or it is not
    whole."""
    if name in (None, "last", "auto"):
        found = None if name is None else last_checkpoint(output)
        if found is None and name == "last":
            raise ValueError(
                f"nothing to resume: {str(output)!r} has no whole checkpoint-* folder; "
                "resume_from_checkpoint 'auto' begins anew"
            )
        return None if found is None else str(found)
    if not is_whole(expanded(name)):
        raise ValueError(
            f"expected a whole checkpoint in the folder {name!r}, found none: give 'last' for the "
            "newest whole one of the run"
        )
    return str(expanded(name))


def find_start(output: Path, resume: str | None, target: str, *, overwrite: bool) -> str | None:
    """The checkpoint to go on from; None for a run from the start. Nothing is removed yet. Raises
    ValueError: there is no such checkpoint; or there are some, or what a run has trained, and they
    may not be overwritten; or `target`, as it is named, or another model lies there; or nothing can
    be written there."""
    check_folder(output)
    found = checkpoints(output)
    _refuse_model(output, found, target)
    checkpoint = find_checkpoint(resume, output)
    goes_on_here = lies_in(checkpoint, output)
    # "auto" found none that is whole: what is left of others was never anybody's.
    if found and not (goes_on_here or overwrite or resume == "auto"):
        here = f"{str(output)!r} holds checkpoints of an earlier run ({found[0].name})"
        if not any(map(is_whole, found)):
            raise ValueError(
                f"{here}, none of them whole: resume_from_checkpoint 'auto' begins anew"
            )
        raise ValueError(
            f"{here}: go on with resume_from_checkpoint 'last', choose another output_dir, or set "
            "overwrite_output_dir"
        )
    trained = trained_in(output)
    if trained is not None and not (found or goes_on_here or overwrite):
        raise ValueError(
            f"{str(output)!r} holds {trained} already: choose another output_dir, or set "
            "overwrite_output_dir"
        )
    return checkpoint


def _refuse_model(output: Path, found: Sequence[Path], target: str) -> None:
    """Raises ValueError where a run would write over a model, or remove its target."""
    places = [path.resolve() for path in (output, *found) if path.is_dir()]
    if target and expanded(target).resolve() in places:
        raise ValueError(
            f"the target {target!r} lies in {str(output)!r}, where this run would write over it: "
            "choose another output_dir"
        )
    model = foreign_model(output)
    # Of a draft model or modules, a killed run leaves files that its checkpoints tell the story of.
    if model is not None and not any((path / RUN_FILE).is_file() for path in found):
        raise ValueError(
            f"{str(output)!r} holds a model that no run of medusa-heads wrote there ({model}): "
            "choose another output_dir"
        )


def remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint; at no moment a part of it looks like a whole."""
    (checkpoint / STATE_FILE).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


@contextmanager
def writing(checkpoint: Path) -> Iterator[None]:
    """Within the block a checkpoint is written. Where there is no room for it, nothing of it stays.
    Raises OSError: there is none; torch and safetensors do not say where."""
    try:
        yield
    except Exception as error:
        if not is_disk_full(error):
            raise
        remove_checkpoint(checkpoint)
        raise OSError(f"{checkpoint} was not written to its end: {first_line(error)}") from error
