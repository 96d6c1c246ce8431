"""What recipes are compared by, once they are trained."""

from __future__ import annotations

from typing import Any

from scripts.compare.recipes import CompareArguments, gains, show


def result(recipe: str, prompts: int, greedy: float) -> dict[str, Any]:
    figures: dict[str, Any] = {"tokens_per_step": {16: 2.0, 32: greedy, 64: 3.0}, "top_1": [0.5]}
    figures["dynamic"] = {31: 3.1}
    told = {"recipe": recipe, "prompts": prompts, "training_tokens": 128.0 * prompts}
    measured = {"greedy": figures, "T = 0.7": figures}
    return told | {"measured": measured, "parameters": 1, "seconds": 1}


def test_what_twice_the_text_gives() -> None:
    results = [result("one", 100 * 2**n, 2.5 + 0.25 * n) for n in range(4)]
    results.append(result("other", 100, 3.0))
    assert gains(results) == [
        "one: twice the text gives +0.25 at 32 nodes, greedy",
        "one: twice the text gives +0.25 at 32 nodes, T = 0.7",
    ]
    show(results)


def test_one_amount_of_text_is_the_default() -> None:
    assert len(CompareArguments().num_prompts) == 1
