"""The target answers in this process or in several: by its own `generate`, or with heads.

Shapes: B batch, T tokens (prompt, left-padded, then answer).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from medusa_heads.inference.regeneration.answers import Answer, Finished, Sampling, as_answer
from medusa_heads.inference.regeneration.draws import RowDraws
from medusa_heads.inference.regeneration.prompts import Prompt
from medusa_heads.inference.regeneration.target_backend import TargetBackend
from medusa_heads.target.prompts import left_padded, pad_id, stop_ids
from medusa_heads.target.target import TargetModel

logger = logging.getLogger(__name__)

Decode = Callable[..., Any]  # a decoding method, as generate(custom_generate=...) calls it


class TransformersBackend(TargetBackend):
    """The target's own `generate`, in batches.

    Args:
        target: as loaded; generation runs in its dtype, on its device.
        batch_size: rows a call. 128 is near the best for a small target on a CPU. A batch that does
            not fit the memory is halved.
        num_workers: processes that share the batches, each with its share of the CPU's threads; on
            a CPU two small processes outrun one large one. The calling script needs the usual
            `if __name__ == "__main__":` where there is more than one.

    Raises:
        ValueError: a size below one.
    """

    name = "transformers"

    def __init__(self, target: TargetModel, *, batch_size: int = 128, num_workers: int = 1) -> None:
        super().__init__(target, batch_size)
        if num_workers < 1:
            raise ValueError(f"expected num_workers of at least 1, got {num_workers}")
        if num_workers > 1 and target.device.type != "cpu":
            logger.warning("num_workers is for a CPU: on %s one process generates", target.device)
            num_workers = 1
        self.num_workers = num_workers

    def answer(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        finished: Finished,
        on_tokens: Callable[[int], object],
    ) -> None:
        """Answer the prompts, batch by batch."""
        batches = in_batches(prompts, self.batch_size)
        workers = min(self.num_workers, len(batches))
        if workers > 1:
            _answer_side_by_side(self.target.model, batches, sampling, workers, finished)
            return
        for batch in batches:
            answers = generate_batch(self.target.model, batch, sampling, on_tokens=on_tokens)
            finished(list(zip(batch, answers, strict=True)))


def in_batches(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
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
    on_tokens: Callable[[int], object] = lambda count: None,
    decode: Decode | None = None,
) -> list[Answer]:
    """Answers to prompts that are all greedy or all sampled.

    Args:
        model: a transformers causal LM.
        prompts: of any lengths; padded left.
        sampling: how to draw.
        on_tokens: told how many tokens were made.
        decode: the decoding method; by default transformers' own.
    """
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
    on_tokens: Callable[[int], object],
    decode: Decode | None,
) -> list[Answer]:
    device = TargetModel(model).device
    greedy = prompts[0].greedy
    assert all(prompt.greedy == greedy for prompt in prompts)
    ends, pad = stop_ids(model), pad_id(model)
    input_ids_BT, mask_BT = left_padded([prompt.input_ids for prompt in prompts], pad, device)
    width = input_ids_BT.shape[1]

    options: dict[str, Any] = {"do_sample": False}
    if not greedy:
        draws = RowDraws(
            prompts,
            seed=sampling.seed,
            max_new_tokens=sampling.max_new_tokens,
            width=width,
            device=device,
        )
        options = {"do_sample": True, "temperature": sampling.temperature}
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
            stopping_criteria=StoppingCriteriaList([_Count(on_tokens)]),
            **options,
        )
    return [as_answer(tokens, ends) for tokens in output_BT[:, width:].tolist()]


class _Count(StoppingCriteria):
    """Ends no row, and tells how many tokens were made."""

    def __init__(self, on_tokens: Callable[[int], object]) -> None:
        self._on_tokens = on_tokens

    def of_row(self, row: int) -> _Count:
        """What stands for this in a row of a batch: it tells of that row's tokens alone."""
        return self

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self._on_tokens(len(input_ids))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _with_own_draws(
    decode: Decode,
    draws: RowDraws,
    model: Any,
    input_ids_BT: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    **model_kwargs: Any,
) -> Any:
    """Decode by argmax, which the draws at the end of the processors make a sample."""
    generation_config = copy.copy(generation_config)
    generation_config.do_sample = False  # generate() has made the warpers of sampling by now
    return decode(
        model,
        input_ids_BT,
        logits_processor=LogitsProcessorList([*logits_processor, draws]),
        stopping_criteria=stopping_criteria,
        generation_config=generation_config,
        **model_kwargs,
    )


def _plain_decode(model: Any, input_ids_BT: Tensor, **kwargs: Any) -> Any:
    return model._sample(input_ids_BT, **kwargs)


_worker_model: Any = None


def _answer_side_by_side(
    model: Any, batches: list[list[Prompt]], sampling: Sampling, workers: int, finished: Finished
) -> None:
    """The batches in processes of their own, which share the model's memory."""
    threads = max(torch.get_num_threads() // workers, 1)
    pool = ProcessPoolExecutor(
        workers, get_context("spawn"), initializer=_start_worker, initargs=(model, threads)
    )
    try:
        running = {pool.submit(_answer_in_worker, batch, sampling): batch for batch in batches}
        for done in as_completed(running):
            finished(list(zip(running[done], done.result(), strict=True)))
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(model: Any, threads: int) -> None:
    global _worker_model
    torch.set_num_threads(threads)
    _worker_model = model


def _answer_in_worker(batch: list[Prompt], sampling: Sampling) -> list[Answer]:
    return generate_batch(_worker_model, batch, sampling)
