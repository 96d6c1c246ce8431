"""What says early that a run goes wrong: a sentence each, with what to do.

A text that the target wrote costs it, in the mean, its own entropy: -sum p log p at every position,
or less where it was drawn at a lower temperature. What it would never write costs more.

Shapes: B batch, T tokens, N measured positions, X columns of hidden states with features.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from medusa_heads.heads import product_dtype
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.loss_config import LossConfig
from medusa_heads.training.hidden.layout import CacheError
from medusa_heads.training.hidden.sharding import any_process
from medusa_heads.training.hidden.states import refuse_not_finite
from medusa_heads.training.loss.fused import chunk_pairs
from medusa_heads.training.loss.rows import next_rows
from medusa_heads.training.loss.teacher import Lessons, Teacher

logger = logging.getLogger(__name__)

FALLEN = 0.95  # of the best tokens per step; from one evaluation to the next they vary by less
SURPRISING = 1.0  # nats a token beyond the entropy; other people's text of a known kind costs 0.6
_POSITIONS = 256  # that are judged at least
_OF_A_BATCH = 1024  # at most


class Health(TrainerCallback, ExportableState):
    """Looks at a run of training. What it finds is said once, in the log of the first process, and
    kept in `said` for the end, and in checkpoints for runs that go on from them. A loss that is not
    finite ends the run before the optimiser takes it, in all processes together. Raises ValueError,
    then; the checkpoints so far are whole.

    `more_rates` are the peak rates of other flags than learning_rate.
    """

    def __init__(self, target: TargetModel) -> None:
        self.said: list[str] = []
        self.more_rates: dict[str, float] = {}
        self._teacher: Teacher | None = None
        try:
            self._teacher = Teacher.from_target(target)
        except ValueError:  # how it makes its logits is not known: its text is not judged
            self._sums: list[float] | None = None
        else:
            self._sums = [0.0] * 3  # of `surprise`, over batches and processes, until it is judged
        self._nothing_3 = torch.zeros(3, device=target.device)
        self._fell = self._lost = False
        self._read: Callable[[], Tensor | None] = lambda: None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"args": {}, "attributes": {"said": list(self.said), "sums": self._sums}}

    def leave_text_unjudged(self) -> None:
        """The text is nobody's: drawn tokens, to measure steps with."""
        self._sums = self._teacher = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Go on from a checkpoint: say again what was said."""
        # An entry must be there: saving fails on a callback that the checkpoint did not know.
        before = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        for sentence in before["attributes"]["said"]:
            self.say(sentence, state.is_world_process_zero)
        if (sums := before["attributes"].get("sums")) is None:
            self.leave_text_unjudged()
        elif self._sums is not None:
            self._sums = sums

    def before_loss(
        self, read: Callable[[], Tensor | None], inputs: Mapping[str, Any], reduce: Any, first: bool
    ) -> None:
        """Of a batch to learn from, before its loss: of the first ones, whether the target would
        write such text. `read` gives what the target reads there, None where it is no text of the
        corpus; `reduce` sums over processes, all of which come here together."""
        if not self._lost:  # else it is the batch to look at
            self._read = read
        if self._sums is None or self._teacher is None:
            return
        hidden_BTX = None
        with suppress(CacheError):  # whoever makes the loss meets it too
            hidden_BTX = read()
        sums_3 = self._nothing_3
        if hidden_BTX is not None:
            sums_3 = surprise(self._teacher, hidden_BTX, inputs)
        sums_3 = reduce(sums_3, reduction="sum")
        loss, entropy, count = (a + b for a, b in zip(self._sums, sums_3.tolist(), strict=True))
        self._sums = [loss, entropy, count]
        if count < _POSITIONS:
            return
        self._sums = self._teacher = None
        found = surprising(loss / count, entropy / count)
        if found is not None:
            self.say(found, first)

    def after_loss(self, loss: Tensor) -> None:
        """Of the same batch, its loss."""
        self._lost = self._lost or not bool(loss.detach().isfinite())

    def after_held_out(self, loss: Tensor, read: Callable[[], Tensor | None]) -> None:
        """Of a held-out batch, its loss: without one it is the batch to look at."""
        if not bool(loss.isfinite()):
            self._read = read

    def say(self, sentence: str, first: bool) -> None:
        """Once; `first` says whether this is the process that does."""
        if sentence not in self.said:
            self.said.append(sentence)
            if first:
                logger.warning(sentence)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End a run that would learn nothing but NaN."""
        if any_process(self._lost, args.device):
            self._end(args, state, f"the loss is not finite in step {state.global_step + 1}")

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any
    ) -> None:
        """Whether what learns has become worse."""
        self.on_predict(args, state, control, metrics)
        if not self._fell and (found := falling(state.log_history)) is not None:
            self._fell = True
            self.say(found, state.is_world_process_zero)

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        """Also behind the last step, which no evaluation may follow."""
        if not math.isfinite((metrics or {}).get("eval_loss", 0.0)):
            self._end(args, state, f"the held-out loss is not finite by step {state.global_step}")

    def _end(self, args: Any, state: Any, what: str) -> None:
        reason = ""
        try:
            if (hidden_BTX := self._read()) is not None:
                refuse_not_finite(hidden_BTX)
        except ValueError as error:
            reason = str(error)
        found = [each for each in gather_object([reason]) if each]
        if not state.is_world_process_zero:
            raise SystemExit(2)  # the first process says why
        if found:
            raise ValueError(found[0])
        kept = any(Path(args.output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"))
        again = "resume_from_checkpoint 'last', or start anew," if kept else "start anew"
        rates = {"learning_rate": args.learning_rate, **self.more_rates}
        below = " or ".join(f"a {name} below {rate:g}" for name, rate in rates.items())
        raise ValueError(f"{what}: {again} with {below}, or with bf16 and fp16 off")


@torch.no_grad()
def surprise(teacher: Teacher, hidden_BTX: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """Sums over learnt tokens of a batch: of the target's loss on them, of its entropy there, and
    how many they are, [3]. Of many, some from all over the batch."""
    rows = next_rows(inputs["labels"], inputs.get("position_ids"))
    some = slice(None, None, -(-len(rows.positions_N) // _OF_A_BATCH) or 1)
    positions_N, labels_N = rows.positions_N[some], rows.labels_N[some]
    sums_3 = torch.zeros(3, device=hidden_BTX.device)
    sums_3[2] = len(positions_N)
    compute = product_dtype(teacher.weight_WD)
    with torch.autocast(hidden_BTX.device.type, enabled=False):
        lessons = Lessons(teacher.reading(hidden_BTX), None, LossConfig(), compute)
        size = chunk_pairs(lessons.width, hidden_BTX.device.type, torch.float32)
        parts = zip(positions_N.split(size), labels_N.split(size), strict=True)
        for part_N, true_N in parts:
            lesson = lessons.of(part_N)
            sums_3[0] -= lesson.log_p_UV[lesson.rows_C, true_N].sum()
            sums_3[1] -= lesson.certainty_U[lesson.rows_C].sum()
    return sums_3


def surprising(loss: float, entropy: float) -> str | None:
    """The sentence for a text that costs the target far more than its own, in nats a token."""
    if not loss - entropy > SURPRISING:
        return None
    return (
        "the target would not write the text of the training set: its perplexity there is "
        f"{math.exp(min(loss, 99)):.3g}, on text of its own it would be {math.exp(entropy):.3g} or "
        "less; look at template, tokenizer and language, or let the target write the text "
        "(medusa-heads regenerate)"
    )


def falling(log: Sequence[Mapping[str, Any]]) -> str | None:
    """The sentence for the first fall of tokens per step in the Trainer's history, which a resumed
    run then says too; those of the largest tree, or the longest chain."""
    prefix = "eval_tokens_per_step_"
    sizes = {int(k.removeprefix(prefix)) for line in log for k in line if k.startswith(prefix)}
    if not sizes:
        return None
    name = f"{prefix}{max(sizes)}"
    best, at = 0.0, 0
    for now, step in ((line[name], line["step"]) for line in log if name in line):
        if now < FALLEN * best:
            break
        best, at = max((best, at), (now, step))
    else:
        return None
    return (
        f"tokens per step have fallen on held-out text, from {best:.2f} in step {at} to {now:.2f} "
        f"in step {step}: train for fewer steps (early_stopping_patience), with a lower "
        "learning_rate, or on more text"
    )
