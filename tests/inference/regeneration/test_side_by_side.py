"""Requests side by side: nobody waits for a thread that has failed."""

from __future__ import annotations

import pytest

from medusa_heads.inference.regeneration.answers import Answer
from medusa_heads.inference.regeneration.prompts import Prompt
from medusa_heads.inference.regeneration.side_by_side import side_by_side


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
