"""How fast this machine does what the demo consists of: each part is run for a moment.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from transformers.utils import logging

from medusa_heads.heads import new_heads
from medusa_heads.inference.bench.timed_run import WARM_UP_TOKENS, Method, fastest_threads, run_once
from medusa_heads.inference.regeneration.answers import Sampling
from medusa_heads.inference.regeneration.arguments import DistillArguments
from medusa_heads.inference.regeneration.prompts import Prompt
from medusa_heads.inference.regeneration.transformers_backend import generate_batch
from medusa_heads.machine.products import dtype_name
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.batch import MOST_ROWS
from medusa_heads.training.arguments.training import OptimisationArguments, to_training_arguments
from medusa_heads.training.runs.heads_trainer import HeadsTrainer
from scripts.demo.plan import Speeds

if TYPE_CHECKING:
    from medusa_heads.config import HeadsConfig
    from scripts.demo.recipe import Recipe

_ROWS_WRITTEN = 64  # at once: a row is written nearly as fast as in larger batches
_TOKENS_WRITTEN = 24
_STEPS = 5  # of which the first one is not counted


def measure_speeds(recipe: Recipe, decode_dtypes: list[str]) -> Speeds:
    """Run every part for a moment.

    Args:
        recipe: of the demo.
        decode_dtypes: that texts are decoded in.
    """
    to_distill: DistillArguments = recipe.settings["DistillArguments"]
    to_optimise: OptimisationArguments = recipe.settings["OptimisationArguments"]
    device = recipe.train.device

    def load(dtype: str) -> TargetModel:
        loaded: Any = getattr(torch, dtype)
        return TargetModel.from_pretrained(recipe.target, dtype=loaded, device=device)

    threads = torch.get_num_threads()
    logging.disable_progress_bar()  # of weights that are loaded
    try:
        text = {
            dtype: _text_seconds(load(dtype), to_distill.prompt_length, recipe.new_tokens)
            for dtype in dict.fromkeys(decode_dtypes)
        }
        target = load(dtype_name(recipe.train.dtype))
        writers = to_distill.generation_workers
        torch.set_num_threads(max(threads // writers, 1))
        with ThreadPoolExecutor(writers) as pool:  # what cores share makes each of them slower
            each = pool.map(lambda _: _writing_seconds(target, to_distill), range(writers))
            row_written = fmean(each)
        torch.set_num_threads(threads)
        to_optimise = replace(to_optimise, bf16=target.dtype == torch.bfloat16)
        of_row = _learning_seconds(target, to_distill, to_optimise, recipe.heads_config)
    finally:
        torch.set_num_threads(threads)
        logging.enable_progress_bar()
    return Speeds(row_written, *of_row, text)


def _tokens(target: TargetModel, rows: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(target.vocab_size, (rows, length), generator=generator)
    ids: list[list[int]] = tokens_BT.tolist()
    return ids


def _text_seconds(target: TargetModel, prompt_length: int, new_tokens: int) -> float:
    """Of plain decoding, with the threads that the benchmark would take."""
    model: Any = target.model
    (prompt,) = _tokens(target, 1, prompt_length)
    before = torch.get_num_threads()
    torch.set_num_threads(fastest_threads(model, prompt))
    method = Method("plain", model.generate)
    done = run_once(method, model, [prompt], 0, max_new_tokens=2 * WARM_UP_TOKENS, do_sample=False)
    torch.set_num_threads(before)
    return done.seconds / done.num_tokens * new_tokens


def _writing_seconds(target: TargetModel, to_distill: DistillArguments) -> float:
    """Of one row: its prompt is read once, and then every token costs the same."""
    ids = _tokens(target, _ROWS_WRITTEN, to_distill.prompt_length)
    prompts = [Prompt(row, greedy=True) for row in ids]

    def seconds(new_tokens: int) -> float:
        sampling = Sampling(new_tokens, 1.0, 0)
        return _seconds(lambda: generate_batch(target.model, prompts, sampling))

    seconds(1)  # the first call of a size chooses its kernels
    reading = seconds(1)
    token = max(seconds(1 + _TOKENS_WRITTEN) - reading, 0.0) / _TOKENS_WRITTEN
    return (reading + token * to_distill.continuation_length) / _ROWS_WRITTEN


class _Clock(TrainerCallback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


def _learning_seconds(
    target: TargetModel,
    to_distill: DistillArguments,
    to_optimise: OptimisationArguments,
    heads: HeadsConfig,
) -> tuple[float, float]:
    """Of one row: the target reads it, and the heads learn from it."""
    size = to_optimise.per_device_train_batch_size or MOST_ROWS
    length = to_distill.prompt_length + to_distill.continuation_length
    ids = _tokens(target, size * _STEPS, length)
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
    clock = _Clock()
    with tempfile.TemporaryDirectory() as folder:
        short = replace(to_optimise, output_dir=folder, max_steps=_STEPS, training_args=None)
        args = to_training_arguments(short, heads.vocab_matrix)
        args.set_save(strategy="no")
        args.set_evaluate(strategy="no")
        args.load_best_model_at_end, args.disable_tqdm = False, True
        trainer = HeadsTrainer(new_heads(target, heads), target, args, rows, callbacks=[clock])
        trainer.remove_callback(PrinterCallback)
        trainer.health.leave_text_unjudged()
        trainer.train()
        step = (clock.ends[-1] - clock.ends[0]) / (_STEPS - 1)
        batch = trainer.hidden_states.collate([*rows.select(range(size))])
        read = min(_seconds(lambda: trainer.hidden_states.of(batch)) for _ in range(_STEPS))
    return read / size, max(step - read, 0.1 * step) / size


def _seconds(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started
