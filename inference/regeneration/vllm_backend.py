"""The target answers in vLLM, within this process: no server, and no text between tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import count
from typing import Any

from medusa_heads.inference.regeneration.answers import (
    Answers,
    Backend,
    OnTokens,
    Sampling,
    Take,
    as_answer,
)
from medusa_heads.inference.regeneration.prompts import Prompt
from medusa_heads.interop.vllm_engine import import_vllm, open_engine, that_matter

_AT_HAND = 2  # requests for each that vLLM has in a batch


class VllmBackend(Backend):
    """vLLM's engine, with its continuous batching, its kernels and as many GPUs of this node as it
    is told. Raises ValueError: vLLM is not installed, or cannot run the target so.

    Args:
        model: the target, a hub id or a folder.
        ends: the tokens that end its text.
        engine: arguments of `vllm.LLM`, such as `tensor_parallel_size`.
    """

    def __init__(self, model: str, *, ends: Collection[int], **engine: Any) -> None:
        self._vllm, self._model, self._ends = import_vllm(), model, ends
        self._arguments = that_matter(engine)
        self._engine = open_engine(model, **engine).llm_engine
        config = self._engine.vllm_config.model_config
        self.max_positions = config.max_model_len
        self.vocab_size = config.get_vocab_size()
        self._dtype, self._defaults = str(config.dtype), config.get_diff_sampling_param()
        self._most = self._engine.vllm_config.scheduler_config.max_num_seqs

    def describe(self) -> dict[str, Any]:
        """The target by name, and how vLLM decodes it by default."""
        return {
            "backend": "vllm",
            "model": self._model,
            "dtype": self._dtype,
            "engine_args": self._arguments,
            "vllm": self._vllm.__version__,
            "generation_config": self._defaults,
        }

    def answer(self, take: Take, sampling: Sampling, on_tokens: OnTokens) -> Iterator[Answers]:
        """Answer the prompts, each starting as soon as another has ended."""
        running: dict[str, Prompt] = {}
        names = map(str, count())
        while True:
            for name, prompt in zip(
                names, take(_AT_HAND * self._most - len(running)), strict=False
            ):
                ids = self._vllm.TokensPrompt(prompt_token_ids=list(prompt.input_ids))
                self._engine.add_request(name, ids, self._parameters(prompt, sampling))
                running[name] = prompt
            if not running:
                return
            ended = [made for made in self._engine.step() if made.finished]
            texts = [list(made.outputs[0].token_ids) for made in ended]
            on_tokens(sum(map(len, texts)))
            answers = (as_answer(text, self._ends) for text in texts)
            prompts = (running.pop(made.request_id) for made in ended)
            yield list(zip(prompts, answers, strict=True))

    def _parameters(self, prompt: Prompt, sampling: Sampling) -> Any:
        drawn = {"temperature": 0.0} if prompt.greedy else sampling.warpers()
        return self._vllm.SamplingParams.from_optional(
            **self._defaults
            | drawn
            | {
                "max_tokens": sampling.max_new_tokens,
                "seed": prompt.number(sampling.seed) & 0x7FFFFFFF,
                "detokenize": False,
                "output_kind": self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
            }
        )
