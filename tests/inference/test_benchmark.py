"""The benchmark: its schema, its counts, and that it notices altered output. Never its timings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from medusa_heads.checkpoint import save_heads
from medusa_heads.config import HeadsConfig
from medusa_heads.heads import MedusaHeads
from medusa_heads.inference.benchmark import (
    MEDUSA,
    PLAIN,
    PROMPT_LOOKUP,
    Method,
    Run,
    Setting,
    available_methods,
    benchmark,
    measure,
    summarise,
)
from medusa_heads.inference.machine import describe_machine
from medusa_heads.inference.model import MedusaModel
from medusa_heads.inference.prompts import encode_prompts, read_prompts
from medusa_heads.target import TargetModel

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
NEW = 16
GREEDY = Setting("greedy", "float32")


@pytest.fixture(scope="module")
def medusa(tiny_llama: Callable[..., LlamaForCausalLM]) -> MedusaModel:
    target = TargetModel(tiny_llama())
    return MedusaModel(target, MedusaHeads.from_target(target, HeadsConfig(num_heads=2)), tree=4)


def run_setting(
    medusa: MedusaModel, methods: list[Method], setting: Setting = GREEDY
) -> dict[str, dict[str, Any]]:
    result = measure(
        setting,
        methods,
        medusa.target.model,
        PROMPTS,
        max_new_tokens=NEW,
        temperature=0.7,
        seed=0,
    )
    return {method["name"]: method for method in result["methods"]}


def test_the_whole_report(tiny_llama: Callable[..., LlamaForCausalLM], tmp_path: Path) -> None:
    target = TargetModel(tiny_llama())
    target.model.save_pretrained(tmp_path / "target")
    target = TargetModel.from_pretrained(str(tmp_path / "target"))
    save_heads(
        tmp_path / "heads", MedusaHeads.from_target(target, HeadsConfig(num_heads=2)), target
    )
    settings = [Setting("greedy", "bfloat16"), Setting("sampled", "float32", (PLAIN, MEDUSA))]
    report = benchmark(
        tmp_path / "heads", PROMPTS, settings=settings, max_new_tokens=NEW, tree=4, progress=False
    )
    assert json.loads(json.dumps(report)) == report
    assert report["target"] == str(tmp_path / "target")
    assert {"cpu", "cores", "load_average", "python", "torch", "transformers"} <= set(
        report["machine"]
    )
    greedy, sampled = report["settings"]
    assert {key: greedy[key] for key in ("name", "dtype", "prompts", "new_tokens")} == {
        "name": "greedy",
        "dtype": "bfloat16",
        "prompts": len(PROMPTS),
        "new_tokens": NEW,
    }
    assert [method["name"] for method in greedy["methods"]] == [PLAIN, PROMPT_LOOKUP, MEDUSA]
    assert [method["name"] for method in sampled["methods"]] == [PLAIN, MEDUSA]
    for method in (*greedy["methods"], *sampled["methods"]):
        assert method["tokens_per_second"] > 0 and method["speedup"] > 0
        assert method["tokens_per_step"] >= 1.0
        assert 0.0 <= method["identical"] <= 1.0
    assert greedy["methods"][0]["speedup"] == greedy["methods"][0]["identical"] == 1.0
    assert sampled["methods"][1]["identical"] == 1.0
    assert {"prefill", "draft", "target", "walk", "cache", "other"} == set(
        sampled["methods"][1]["seconds_by_phase"]
    )


def test_in_fp32_every_method_writes_plain_decodings_text(medusa: MedusaModel) -> None:
    methods = run_setting(medusa, available_methods(medusa))
    assert {name: method["identical"] for name, method in methods.items()} == {
        PLAIN: 1.0,
        PROMPT_LOOKUP: 1.0,
        MEDUSA: 1.0,
    }
    assert methods[PLAIN]["tokens_per_step"] == 1.0
    assert methods[PLAIN]["target_forwards"] == methods[PLAIN]["tokens"] == NEW * len(PROMPTS)


def test_forwards_are_those_the_engine_counts(medusa: MedusaModel) -> None:
    plain, _, heads = available_methods(medusa)
    steps = []

    def generate(input_ids: Tensor, **kwargs: Any) -> Any:
        output = medusa.generate(input_ids, **kwargs)
        steps.append(medusa.last_stats.steps)
        return output

    methods = run_setting(medusa, [plain, Method(heads.name, generate, heads.stats)])
    assert methods[MEDUSA]["target_forwards"] == sum(steps[1:])  # the first was the warm-up


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_altered_output_is_noticed(medusa: MedusaModel, name: str) -> None:
    """The negative control: one wrong token in one of the prompts."""
    plain, _, heads = available_methods(medusa)

    def alter(input_ids: Tensor, **kwargs: Any) -> Any:
        output = medusa.generate(input_ids, **kwargs)
        if input_ids.tolist() == [PROMPTS[1]]:
            output[0, -3] = (output[0, -3] + 1) % 199
        return output

    altered = Method(heads.name, alter, heads.stats)
    methods = run_setting(medusa, [plain, altered], Setting(name, "float32"))
    assert methods[MEDUSA]["identical"] == pytest.approx(2 / 3)


def test_methods_take_turns_in_a_rotating_order(medusa: MedusaModel) -> None:
    order: list[str] = []

    def recorded(method: Method) -> Method:
        def generate(input_ids: Tensor, **kwargs: Any) -> Any:
            order.append(method.name)
            return method.generate(input_ids, **kwargs)

        return Method(method.name, generate, method.stats)

    a, b, c = (method.name for method in available_methods(medusa))
    run_setting(medusa, [recorded(method) for method in available_methods(medusa)])
    assert order == [a, b, c, a, b, c, b, c, a, c, a, b]  # warm-up, then three prompts


def test_medians_are_of_rates_and_of_ratios_prompt_by_prompt() -> None:
    plain = [Run([1] * 10, 1.0, 10), Run([2] * 10, 2.0, 10), Run([3] * 10, 5.0, 10)]
    fast = [Run([1] * 10, 0.5, 4), Run([2] * 10, 2.0, 5), Run([4] * 5, 0.5, 1)]
    summary = summarise(fast, plain)
    assert summary["tokens_per_second"] == 10.0  # of 20, 5, 10
    assert summary["speedup"] == 2.0  # of 2, 1, 5
    assert summary["tokens_per_step"] == 25 / 10  # totals, then the ratio
    assert summary["identical"] == pytest.approx(2 / 3)
    assert summary["speedup_quartiles"] == [1.5, 3.5]


def test_mistakes_are_refused(medusa: MedusaModel, tmp_path: Path) -> None:
    heads = tmp_path / "heads"
    medusa.target.model.save_pretrained(tmp_path / "target")
    target = str(tmp_path / "target")
    save_heads(heads, medusa.heads, medusa.target)
    with pytest.raises(ValueError, match="at least one prompt"):
        benchmark(heads, [], target=target)
    with pytest.raises(ValueError, match="temperature above 0"):
        benchmark(heads, PROMPTS, target=target, temperature=0.0)
    with pytest.raises(ValueError, match="do not fit the target's context of 512"):
        benchmark(heads, PROMPTS, target=target, tree=4, max_new_tokens=600)
    with pytest.raises(ValueError, match="expected a heads checkpoint"):
        benchmark(tmp_path / "none", PROMPTS, target=target)


def test_the_machine_is_described() -> None:
    machine = describe_machine()
    assert machine["cores"] >= 1 and machine["cpu"] and machine["torch"] == torch.__version__


def test_prompts_from_files(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("first\n\n second \n")
    assert read_prompts(lines) == ["first", " second "]
    rows = tmp_path / "prompts.jsonl"
    rows.write_text('{"prompt": "a\\nb"}\n\n{"text": "c", "id": 1}\n')
    assert read_prompts(rows) == ["a\nb", "c"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", "\n \n", "holds no prompts"),
        ("bad.jsonl", '{"prompt": "a"}\nnot json\n', "line 2 is not JSON"),
        ("key.jsonl", '{"question": "a"}\n', "line 1: expected an object with a string"),
        ("list.jsonl", '["prompt"]\n', "line 1: expected an object"),
        ("number.jsonl", '{"prompt": 3}\n', "line 1: expected an object"),
    ],
)
def test_unreadable_prompts_are_refused(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_prompts(tmp_path / name)
    with pytest.raises(ValueError, match="found none"):
        read_prompts(tmp_path / "missing.txt")


def test_a_prompt_without_tokens_is_refused() -> None:
    def tokenizer(text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}

    encode: Any = encode_prompts
    assert encode(["ab", "c", "d"], tokenizer, num_prompts=2) == [[97, 98], [99]]
    with pytest.raises(ValueError, match="prompt 1 has no tokens"):
        encode(["a", ""], tokenizer, num_prompts=5)
