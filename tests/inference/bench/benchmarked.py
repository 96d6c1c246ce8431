"""What the benchmark's tests measure: methods on a tiny model, over three prompts."""

from __future__ import annotations

from typing import Any

from medusa_heads.inference.bench.methods import PLAIN, PROMPT_LOOKUP, Models, make_method
from medusa_heads.inference.bench.prompts import Prompt
from medusa_heads.inference.bench.setting import Plan, Setting, measure
from medusa_heads.inference.bench.timed_run import Method
from medusa_heads.inference.models.medusa import MedusaModel
from medusa_heads.target.target import TargetModel

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
ASKED = [Prompt(tuple(prompt)) for prompt in PROMPTS]
HEADS = "heads:4"
NEW = 16
GREEDY = Setting("greedy", "float32")


def methods_of(medusa: MedusaModel, *names: str, draft: TargetModel | None = None) -> list[Method]:
    """The methods of these names, made of one set of models."""
    models = Models(medusa.target, medusa, (draft,) if draft else ())
    return [make_method(n, models, most_tokens=32) for n in names or (PLAIN, PROMPT_LOOKUP, HEADS)]


def result_of(
    medusa: MedusaModel,
    methods: list[Method],
    setting: Setting = GREEDY,
    prompts: list[Prompt] = ASKED,
    batch_size: int = 1,
) -> dict[str, Any]:
    """What a setting's measurement returns."""
    plan = Plan(max_new_tokens=NEW)
    return measure(setting, methods, medusa.target.model, prompts, plan, batch_size=batch_size)


def run_setting(
    medusa: MedusaModel, methods: list[Method], setting: Setting = GREEDY, **options: Any
) -> dict[str, dict[str, Any]]:
    """Its methods, by name."""
    result = result_of(medusa, methods, setting, **options)
    return {method["name"]: method for method in result["methods"]}
