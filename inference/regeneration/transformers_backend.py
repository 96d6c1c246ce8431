"""The target answers in this process or in several: by its own `generate`, or with heads.

Shapes: B batch, T tokens (prompt, left-padded, then answer).
"""

from __future__ import annotations

import copy
import logging
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from itertools import chain
from multiprocessing import get_context
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from medusa_heads.data.prompts import left_padded, pad_id, stop_ids
from medusa_heads.errors import first_line
from medusa_heads.inference.models.medusa import MedusaModel
from medusa_heads.inference.regeneration.answers import (
    Answer,
    Answers,
    Backend,
    OnTokens,
    Sampling,
    Take,
    as_answer,
)
from medusa_heads.inference.regeneration.prompts import Prompt, RowDraws
from medusa_heads.target.target import TargetModel

logger = logging.getLogger(__name__)

Decode = Callable[..., Any]  # a decoding method, as generate(custom_generate=...) calls it

_BATCHES_AHEAD = 32  # of prompts at hand, out of which batches of like lengths are made


class TargetBackend(Backend):
    """A target in memory, answering in its dtype and on its device, so many prompts at the same
    time. 128 is near the best for a small target on a CPU."""

    name: ClassVar[str]

    def __init__(self, target: TargetModel, *, batch_size: int = 128) -> None:
        if batch_size < 1:
            raise ValueError(f"expected a batch_size of at least 1, got {batch_size}")
        for name, usual in (("num_beams", 1), ("prompt_lookup_num_tokens", None)):
            if (given := getattr(target.model.generation_config, name, None)) not in (None, usual):
                raise ValueError(
                    f"the target's generation_config asks for {name}={given}, and its answers are "
                    "greedy or sampled: leave that out of it"
                )
        self.target = target
        self.batch_size = batch_size
        self.max_positions = target.max_positions
        self.vocab_size = target.vocab_size

    def describe(self) -> dict[str, Any]:
        """The weights, bit for bit, and how the target decodes by default."""
        return {
            "backend": self.name,
            "weights_sha256": self.target.weights_digest(),
            "dtype": str(self.target.dtype),
            "generation_config": self.target.model.generation_config.to_dict(),
        }

    def ahead(self, take: Take) -> Iterator[list[Prompt]]:
        """As many prompts at a time as are at hand together."""
        while prompts := take(_BATCHES_AHEAD * self.batch_size):
            yield prompts


class TransformersBackend(TargetBackend):
    """The target's own `generate`, in batches; one that does not fit the memory is halved.

    `num_workers` processes share several batches, each with its share of the CPU's threads: two
    small ones outrun a large one. The calling script needs the usual `if __name__ == "__main__":`.
    """

    name = "transformers"
    decode: Decode | None = None  # the decoding method; by default transformers' own

    def __init__(self, target: TargetModel, *, batch_size: int = 128, num_workers: int = 1) -> None:
        super().__init__(target, batch_size=batch_size)
        if num_workers < 1:
            raise ValueError(f"expected num_workers of at least 1, got {num_workers}")
        if num_workers > 1 and target.device.type != "cpu":
            logger.warning("num_workers is for a CPU: on %s one process generates", target.device)
            num_workers = 1
        self.num_workers = num_workers

    def answer(self, take: Take, sampling: Sampling, on_tokens: OnTokens) -> Iterator[Answers]:
        """Answer the prompts, batch by batch."""
        model = self.target.model
        first = next(rounds := self.ahead(take), [])
        in_batches = (_in_batches(each, self.batch_size) for each in chain([first], rounds))
        if self.num_workers > 1 and len(first) > self.batch_size:
            yield from _answer_side_by_side(model, in_batches, sampling, self.num_workers)
            return
        for batch in chain.from_iterable(in_batches):
            answers = generate_batch(
                model, batch, sampling, on_tokens=on_tokens, decode=self.decode
            )
            yield list(zip(batch, answers, strict=True))


class HeadsBackend(TransformersBackend):
    """A target with heads, lossless: token for token what its own `generate` answers in fp32, in
    fewer forward passes. In batches of 8, or of 1 on a CPU, which a batch keeps busy without heads.
    """

    name = "heads"  # which they are is no part of the description: lossless, they decide the speed

    def __init__(self, model: MedusaModel, *, batch_size: int | None = None) -> None:
        if not model.lossless:
            raise ValueError(
                f"{model.acceptance} acceptance is lossy, and the text must be the target's own: "
                "use lossless acceptance"
            )
        if batch_size is None:
            batch_size = 1 if model.target.device.type == "cpu" else 8
        super().__init__(model.target, batch_size=batch_size)
        self.decode = model.decode


def _in_batches(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """Batches of prompts that are all greedy or all sampled, and of nearly equal lengths: the
    longest first, so that what does not fit the memory is known at once."""
    batches = []
    for greedy in (True, False):
        alike = [prompt for prompt in prompts if prompt.greedy == greedy]
        alike.sort(key=lambda prompt: -len(prompt.input_ids))
        batches += [alike[start : start + size] for start in range(0, len(alike), size)]
    return batches


def generate_batch(
    model: Any,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    on_tokens: OnTokens = lambda count: None,
    decode: Decode | None = None,
) -> list[Answer]:
    """Answers of a transformers causal LM to prompts that are all greedy or all sampled, of any
    lengths, by transformers' own decoding method or another. `on_tokens` is told how many tokens
    were made."""
    try:
        return _generate(model, prompts, sampling, on_tokens, decode)
    except torch.OutOfMemoryError:
        if len(prompts) == 1:
            raise
        # A row's text does not hang on its neighbours: smaller batches give the same.
        logger.warning("a batch of %d does not fit the memory: halving it", len(prompts))
    middle = len(prompts) // 2
    return [
        answer
        for half in (prompts[:middle], prompts[middle:])
        for answer in generate_batch(model, half, sampling, on_tokens=on_tokens, decode=decode)
    ]


def _generate(
    model: Any,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    on_tokens: OnTokens,
    decode: Decode | None,
) -> list[Answer]:
    device = TargetModel(model).device
    (greedy,) = {prompt.greedy for prompt in prompts}
    ends, pad = stop_ids(model), pad_id(model)
    input_ids_BT, mask_BT = left_padded([prompt.input_ids for prompt in prompts], pad, device)
    width = input_ids_BT.shape[1]

    options: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": False}
    if not greedy:
        numbers = [prompt.draws(sampling.seed, sampling.max_new_tokens) for prompt in prompts]
        draws = RowDraws(torch.from_numpy(np.stack(numbers)).to(device), width)
        options |= {"do_sample": True, **sampling.warpers()}
        decode = partial(_with_own_draws, decode or _plain_decode, draws)
    if decode is not None:
        options["custom_generate"] = decode
    # Not where accelerate moves weights in the middle of a forward: they would be left as
    # inference tensors.
    with torch.inference_mode(not hasattr(model, "_hf_hook")):
        output_BT = model.generate(
            input_ids_BT,
            attention_mask=mask_BT,
            max_new_tokens=sampling.max_new_tokens,
            pad_token_id=pad,
            stopping_criteria=StoppingCriteriaList([_Count(on_tokens, ends, len(prompts))]),
            use_cache=True,  # which training may have turned off
            **options,
        )
    return [as_answer(tokens, ends) for tokens in output_BT[:, width:].tolist()]


class _Count(StoppingCriteria):
    """Ends no row, and tells how many tokens were made: a row that has ended gets padding alone."""

    def __init__(self, on_tokens: OnTokens, ends: Collection[int], rows: int) -> None:
        self._on_tokens, self._ends = on_tokens, ends
        self._going = [*range(rows)]  # places of the rows that have not ended

    def of_row(self, row: int) -> _Count:
        """What stands for this in a row of a batch: it tells of that row's tokens alone."""
        return _Count(self._on_tokens, self._ends, 1)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        newest = input_ids[:, -1].tolist()
        self._on_tokens(len(self._going))
        self._going = [row for row in self._going if newest[row] not in self._ends]
        return torch.zeros(len(newest), dtype=torch.bool, device=input_ids.device)


def _with_own_draws(
    decode: Decode,
    draws: RowDraws,
    model: Any,
    input_ids_BT: Tensor,
    *,
    logits_processor: LogitsProcessorList,
    generation_config: Any,
    **more: Any,
) -> Any:
    """Decode by argmax, which the draws at the end of the processors make a sample."""
    generation_config = copy.copy(generation_config)
    generation_config.do_sample = False  # generate() has made the warpers of sampling by now
    processors = LogitsProcessorList([*logits_processor, draws])
    more |= {"logits_processor": processors, "generation_config": generation_config}
    return decode(model, input_ids_BT, **more)


def _plain_decode(model: Any, input_ids_BT: Tensor, **kwargs: Any) -> Any:
    return model._sample(input_ids_BT, **kwargs)


def _answer_side_by_side(
    model: Any, in_batches: Iterator[list[list[Prompt]]], sampling: Sampling, workers: int
) -> Iterator[Answers]:
    """The batches in processes of their own, which share the model's memory."""
    threads = max(torch.get_num_threads() // workers, 1)
    pool = ProcessPoolExecutor(
        workers, get_context("spawn"), initializer=_start_worker, initargs=(model, threads)
    )
    try:
        for batches in in_batches:
            with _without_ctrl_c():
                running = {
                    pool.submit(_answer_in_worker, batch, sampling): batch for batch in batches
                }
            for done in as_completed(running):
                yield list(zip(running[done], done.result(), strict=True))
    except BaseException as error:  # nobody waits for what they are at
        for process in [*pool._processes.values()]:
            process.terminate()
        if "allocate shared memory" in str(error):  # in /dev/shm, which is small in many containers
            raise ValueError(
                f"the model does not fit the memory that processes share ({first_line(error)}): "
                "leave num_workers out, or start the container with more (docker's --shm-size)"
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Processes that start within are not reached by Ctrl-C, of which this one hears and which each
    would answer with a traceback; here it waits for the end of the block."""
    if not hasattr(signal, "pthread_sigmask"):  # no POSIX system
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_worker_model: Any = None


def _start_worker(model: Any, threads: int) -> None:
    global _worker_model
    torch.set_num_threads(threads)
    _worker_model = model


def _answer_in_worker(batch: list[Prompt], sampling: Sampling) -> list[Answer]:
    return generate_batch(_worker_model, batch, sampling)
