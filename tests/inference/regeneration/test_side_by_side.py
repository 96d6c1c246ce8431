"""Requests side by side: nobody waits for a thread that has failed, and none is answered otherwise
than it would be alone."""

from __future__ import annotations

from typing import Any

import pytest

from medusa_heads.inference.regeneration.answers import Answer
from medusa_heads.inference.regeneration.continuous_backend import ContinuousBackend
from medusa_heads.inference.regeneration.prompts import Prompt
from medusa_heads.inference.regeneration.side_by_side import side_by_side
from medusa_heads.inference.regeneration.transformers_backend import TransformersBackend
from medusa_heads.target.target import TargetModel
from tests.conftest import TinyLlama
from tests.inference.regeneration.test_backends import answers, prompt_ids


@pytest.mark.parametrize("kind", [ValueError, OverflowError, MemoryError, SystemExit])
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_whatever_a_thread_fails_of_is_raised_behind_the_answers(
    kind: type[BaseException],
) -> None:
    prompts = [Prompt([row], True, row) for row in (2, 1, 0)]

    def ask(prompt: Prompt) -> Answer:
        if prompt.row == 1:
            raise kind("no")
        return Answer([prompt.row])

    def take(count: int) -> list[Prompt]:
        return [prompts.pop() for _ in range(min(count, len(prompts)))]

    asking, answered = side_by_side(ask, take, 1), []
    with pytest.raises(kind, match="no"):
        for pairs in asking:
            answered += [prompt.row for prompt, _ in pairs]
    assert answered[:1] == [0]


LEFT_OUT: Any = {"repetition_penalty": 1.05, "min_new_tokens": 9, "typical_p": 0.5, "min_p": None}


@pytest.mark.parametrize("setting", LEFT_OUT)
def test_continuous_batching_refuses_what_it_would_leave_out(
    setting: str, tiny_llama: TinyLlama
) -> None:
    model, left_out = tiny_llama(), LEFT_OUT[setting]
    model.generation_config.update(**{setting: left_out or 0.1, "eos_token_id": 3})
    prompts = [Prompt(ids, i % 2 == 0, i) for i, ids in enumerate(prompt_ids(4))]
    backend = ContinuousBackend(TargetModel(model), batch_size=2)
    if left_out is None:
        assert answers(backend, prompts) == answers(TransformersBackend(backend.target), prompts)
        return
    with pytest.raises(ValueError, match=r"continuous batching has no .*: choose another"):
        answers(backend, prompts)
