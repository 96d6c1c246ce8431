"""The target answers through transformers' continuous batching: rows come and go one by one.

Shapes: R requests in a forward, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig
from transformers.generation import logits_process as known
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
)

from medusa_heads.data.prompts import stop_ids
from medusa_heads.inference.regeneration.answers import (
    SERVER_ERROR,
    Answer,
    Answers,
    OnTokens,
    Sampling,
    Take,
    as_answer,
)
from medusa_heads.inference.regeneration.prompts import Prompt, draw
from medusa_heads.inference.regeneration.transformers_backend import TargetBackend

_CPU_PAGE = 32  # tokens
_GREEDY = -1.0  # instead of a number in [0, 1): take the likeliest token
# Look at the scores of one position alone, as transformers runs them here, and leave the likeliest
# token there: greedy requests go through them too.
_USABLE = (
    known.EpsilonLogitsWarper, known.EtaLogitsWarper, known.InfNanRemoveLogitsProcessor,
    known.LogitNormalization, known.MinPLogitsWarper, known.SuppressTokensLogitsProcessor,
    known.TemperatureLogitsWarper, known.TopKLogitsWarper, known.TopPLogitsWarper,
)  # fmt: skip


class ContinuousBackend(TargetBackend):
    """transformers' continuous batching, with each row's own random numbers. On a GPU transformers
    changes to flash attention where it can."""

    name = "continuous"

    def answer(self, take: Take, sampling: Sampling, on_tokens: OnTokens) -> Iterator[Answers]:
        """Answer the prompts, each starting as soon as another has ended. Raises ValueError: the
        target's scores are processed in a way that this does not know."""
        for prompts in self.ahead(take):
            yield from self._answer(prompts, sampling)

    def _answer(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[Answers]:
        model: Any = self.target.model
        ends = stop_ids(model)
        only_greedy = all(prompt.greedy for prompt in prompts)
        options: dict[str, Any] = {"do_sample": False}
        if not only_greedy:
            options = {"do_sample": True, **sampling.warpers()}
        # With the defaults that generate() fills in, such as its top_k.
        config, _ = model._prepare_generation_config(
            None, max_new_tokens=sampling.max_new_tokens, eos_token_id=sorted(ends) or -1, **options
        )
        _check_processors(model, config)
        longest = max(len(prompt.input_ids) for prompt in prompts) + sampling.max_new_tokens
        manager = model.init_continuous_batching(config, self._batching(longest))
        if not only_greedy:
            processors = manager.logit_processor
            processors.logits_processor.append(_RequestDraws(prompts, sampling))
            processors.tensors_required += 1
            processors.do_processing = True
            config.do_sample = False  # the warpers of sampling are made by now
        waiting = [*range(len(prompts))][::-1]
        under_way = 0
        manager.start()
        try:
            while waiting or under_way:
                while waiting and under_way < 2 * self.batch_size:  # the next ones are at hand
                    index = waiting.pop()
                    manager.add_request(
                        list(prompts[index].input_ids),
                        request_id=str(index),
                        max_new_tokens=sampling.max_new_tokens,
                        eos_token_id=config.eos_token_id,
                    )
                    under_way += 1
                result = manager.get_result(timeout=1)
                if result is None:
                    if not manager.is_running():
                        raise RuntimeError("transformers' generation thread died")
                    continue
                under_way -= 1
                answer = as_answer(result.generated_tokens, ends)
                if result.error is not None:
                    answer = Answer(failure=SERVER_ERROR, detail=result.error)
                yield [(prompts[int(result.request_id)], answer)]
        finally:
            manager.stop(block=True, hard_stop=True)
            manager.destroy()

    def _batching(self, longest: int) -> ContinuousBatchingConfig:
        sizes: dict[str, Any] = {}
        if self.target.device.type == "cpu":
            # Else transformers takes and fills over half of the machine's memory, for many seconds.
            pages = -(-longest // _CPU_PAGE)
            sizes = {
                "page_size": _CPU_PAGE,
                "num_blocks": self.batch_size * pages,
                "max_batch_tokens": max(self.batch_size, longest),
            }
        return ContinuousBatchingConfig(max_requests_per_batch=self.batch_size, **sizes)


def _check_processors(model: Any, config: Any) -> None:
    """Raises ValueError where generate() would process scores as batches here do not: transformers
    drops a repetition penalty with a line in its log, and others with none."""
    told = copy.deepcopy(config)
    model._prepare_special_tokens(told, True, device=model.device)
    made = model._get_logits_processor(told, input_ids_seq_length=1, device=str(model.device))
    others = sorted({type(each).__name__ for each in made if type(each) not in _USABLE})
    if others:
        raise ValueError(
            f"continuous batching has no {', '.join(others)}, which the target's generation_config "
            "asks for, and would write another text: choose another backend"
        )


class _RequestDraws(ContinuousBatchingLogitsProcessor):
    """RowDraws for requests: a request's number for its next token travels with it, as fp32."""

    supported_kwargs: dict[str, type] = {}  # noqa: RUF012  (the base class wants it on the class)
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        self._prompts = prompts
        self._draws = lru_cache(maxsize=1 << 14)(
            lambda index: prompts[index].draws(sampling.seed, sampling.max_new_tokens)
        )

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Where there is no request, nothing is drawn."""
        numbers = torch.full_like(int32_tensor, _GREEDY, dtype=torch.float32)
        int32_tensor.copy_(numbers.view(torch.int32))

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Tensor:
        """The number of each request's next token."""
        numbers_R = [self._number(request.state) for request in requests_with_new_token]
        return torch.tensor(numbers_R, dtype=torch.float32).view(torch.int32)

    def _number(self, state: Any) -> float:
        if not state.request_id.isdecimal():
            return _GREEDY  # a rehearsal of transformers' own
        index = int(state.request_id)
        if self._prompts[index].greedy:
            return _GREEDY
        # Counted from the position, which is right also where a request was put off and taken up
        # again. One token more than asked for may be made ahead of time; it is thrown away.
        made = state.position_offset - len(self._prompts[index].input_ids)
        draws = self._draws(index)
        return float(draws[min(made, len(draws) - 1)])

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """scores_RV, the drawn token's raised to infinity."""
        uniform_R = tensor_arg[: scores.shape[0]].view(torch.float32)
        drawn_R = draw(scores, uniform_R.clamp_min(0.0))
        tokens_R = torch.where(uniform_R < 0, scores.argmax(dim=-1), drawn_R)
        return scores.scatter(1, tokens_R[:, None], torch.inf)
