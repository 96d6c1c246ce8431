"""The benchmark as a whole: its schema, its mistakes, its further turns. Never its timings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from medusa_heads.checkpoint.checkpoint import save_heads
from medusa_heads.config import HeadsConfig
from medusa_heads.heads import MedusaHeads
from medusa_heads.inference.bench import run as benchmark_module
from medusa_heads.inference.bench.methods import PLAIN, PROMPT_LOOKUP, STREAM
from medusa_heads.inference.bench.plots import where_measured
from medusa_heads.inference.bench.prompts import Prompt
from medusa_heads.inference.bench.run import benchmark
from medusa_heads.inference.bench.setting import Plan, Setting, default_settings, measure
from medusa_heads.inference.models.medusa import MedusaModel
from medusa_heads.machine import facts
from medusa_heads.machine.facts import describe_machine
from medusa_heads.target.target import TargetModel
from tests.inference.bench.benchmarked import HEADS, NEW, PROMPTS


def test_the_whole_report(tiny_llama: Callable[..., LlamaForCausalLM], tmp_path: Path) -> None:
    target = TargetModel(tiny_llama())
    target.model.save_pretrained(tmp_path / "target")
    target = TargetModel.from_pretrained(str(tmp_path / "target"))
    save_heads(
        tmp_path / "heads", MedusaHeads.from_target(target, HeadsConfig(num_heads=2)), target
    )
    settings = [
        Setting("greedy", "bfloat16", (PROMPT_LOOKUP, HEADS)),  # plain comes by itself
        Setting("sampled", "float32", (PLAIN, HEADS + STREAM)),
    ]
    report = benchmark(
        tmp_path / "heads", PROMPTS, Plan(settings, max_new_tokens=NEW), progress=False
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
    assert [method["name"] for method in greedy["methods"]] == [PLAIN, PROMPT_LOOKUP, HEADS]
    assert [method["name"] for method in sampled["methods"]] == [PLAIN, HEADS + STREAM]
    for method in (*greedy["methods"], *sampled["methods"]):
        assert method["tokens_per_second"] > 0 and method["speedup"] > 0
        assert method["tokens_per_step"] >= 1.0
        assert 0.0 <= method["identical"] <= 1.0
    assert greedy["methods"][0]["speedup"] == greedy["methods"][0]["identical"] == 1.0
    assert sampled["methods"][1]["identical"] == 1.0
    assert {"prefill", "draft", "target", "walk", "cache", "other"} == set(
        sampled["methods"][1]["seconds_by_phase"]
    )


def test_mistakes_are_refused(medusa: MedusaModel, tmp_path: Path) -> None:
    heads = tmp_path / "heads"
    medusa.target.model.save_pretrained(tmp_path / "target")
    target = str(tmp_path / "target")
    save_heads(heads, medusa.heads, medusa.target)
    with pytest.raises(ValueError, match="at least one prompt"):
        benchmark(heads, [], target=target)
    with pytest.raises(ValueError, match="a batch of 4 rows needs as many prompts, got 3"):
        benchmark(heads, PROMPTS, Plan(batch_sizes=[1, 4]), target=target)
    with pytest.raises(ValueError, match="given twice: name it once"):
        benchmark(heads, PROMPTS, target=target, draft_model=[target, f"{target}/"])
    with pytest.raises(ValueError, match="do not fit the target's context of 512"):
        benchmark(heads, PROMPTS, Plan(max_new_tokens=600), target=target)
    with pytest.raises(ValueError, match="expected a heads checkpoint"):
        benchmark(tmp_path / "none", PROMPTS, target=target)
    alone = Plan([Setting("greedy", "float32", (PLAIN,))])
    with pytest.raises(ValueError, match="leave out --target"):
        benchmark(target, PROMPTS, alone, target=target)
    with pytest.raises(ValueError, match="none of the methods plain drafts with it"):
        benchmark(target, PROMPTS, alone, draft_model=target)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"settings": []}, "needs at least one setting"),
        ({"batch_sizes": [0]}, r"batch_sizes must be at least 1, got \[0\]"),
        ({"batch_sizes": []}, r"batch_sizes must be at least 1, got \[\]"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"threads": 0}, "threads must be at least 1, got 0"),
        ({"temperature": float("nan")}, "temperature must be above 0"),
        ({"temperature": 0.0}, "temperature must be above 0"),
    ],
)
def test_plans_of_nothing_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(**wrong)


def test_threads_are_given_back_where_it_fails(medusa: MedusaModel, tmp_path: Path) -> None:
    medusa.target.model.save_pretrained(tmp_path)

    def fail(_: dict[str, Any]) -> None:
        assert torch.get_num_threads() == 2
        raise OSError("no space left")

    plan = Plan([Setting("greedy", "float32", (PLAIN,))], max_new_tokens=2, threads=2)
    assert torch.get_num_threads() == 1
    with pytest.raises(OSError, match="no space left"):
        benchmark(tmp_path, PROMPTS, plan, progress=False, on_setting=fail)
    assert torch.get_num_threads() == 1


def test_further_turns_follow_plain_decodings_answers(
    tiny_llama: Callable[..., LlamaForCausalLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = tiny_llama()
    model.save_pretrained(tmp_path)
    answers, asked = [], []

    def follow_up(answer: list[int]) -> Prompt:
        answers.append(answer)
        return Prompt((*PROMPTS[0], *answer, 3, 4))

    def long(answer: list[int]) -> Prompt:
        return Prompt((7,) * 40)

    def record(*arguments: Any, **options: Any) -> Any:
        asked.append([list(prompt.tokens) for prompt in arguments[3]])
        return measure(*arguments, **options)

    monkeypatch.setattr(benchmark_module, "measure", record)
    report = benchmark(
        tmp_path,
        [Prompt(tuple(PROMPTS[0]), None, follow_up), Prompt((9, 10), None, long)],
        Plan(
            [Setting("greedy", "float32", (PLAIN,))],
            max_new_tokens=4,
            max_prompt_length=39,
        ),
        progress=False,
    )
    expected = model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=4)[0].tolist()
    assert answers == [expected[len(PROMPTS[0]) :]]
    assert asked == [[PROMPTS[0], [9, 10], [*expected, 3, 4]]]
    assert report["prompts_left_out"] == 1 and report["settings"][0]["prompts"] == 3


def test_the_token_that_ends_an_answer_is_not_in_the_next_turn(
    tiny_llama: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    """Without a chat template the target would begin another text behind it."""
    model: Any = tiny_llama()
    written = model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=4)[0, len(PROMPTS[0]) :]
    *said, end = written[:3].tolist()
    assert end not in said
    model.generation_config.eos_token_id = end
    model.save_pretrained(tmp_path)
    answers = []

    def follow_up(answer: list[int]) -> Prompt:
        answers.append(answer)
        return Prompt((*PROMPTS[0], *answer, 3))

    plan = Plan([Setting("greedy", "float32", (PLAIN,))], max_new_tokens=4)
    benchmark(tmp_path, [Prompt(tuple(PROMPTS[0]), None, follow_up)], plan, progress=False)
    assert answers == [said]


def test_no_setting_remembers_what_another_one_read(
    medusa: MedusaModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have the same prompts, and some drafters remember every text."""
    medusa.target.model.save_pretrained(tmp_path)
    drafters: list[Any] = []

    def record(setting: Setting, methods: Any, *arguments: Any, **options: Any) -> Any:
        drafters.append(methods[1].generate.__self__.drafter)
        return measure(setting, methods, *arguments, **options)

    monkeypatch.setattr(benchmark_module, "measure", record)
    both = [Setting(name, "float32", ("recycling:4",)) for name in ("greedy", "sampled")]
    benchmark(tmp_path, PROMPTS, Plan(both, (1, 2), max_new_tokens=4), progress=False)
    assert len({id(drafter) for drafter in drafters}) == len(drafters) == 4


def test_a_gpu_that_computes_nothing_is_not_named(
    medusa: MedusaModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever measures on the CPU beside one publishes no figures of the GPU."""
    medusa.target.model.save_pretrained(tmp_path)
    beside = {"gpu": "A GPU", "gpu_toolkit": "1", "gpu_driver": "1"}
    monkeypatch.setattr(facts, "_gpu", lambda: beside)
    monkeypatch.setattr(facts, "_facts", facts._facts.__wrapped__)
    plan = Plan([Setting("greedy", "float32", (PLAIN,))], max_new_tokens=2)
    machine = benchmark(tmp_path, PROMPTS, plan, device="cpu", progress=False)["machine"]
    assert describe_machine()["gpu"] == "A GPU"
    assert machine["device"] == "cpu" and not beside.keys() & machine.keys()
    assert where_measured(machine) == f"{machine['cores']} cores, {machine['cpu']}"


def test_dtypes_that_are_given_twice_are_one() -> None:
    assert default_settings(["float32", "float32"]) == default_settings(["float32"])


def test_the_machine_is_described() -> None:
    machine = describe_machine()
    assert machine["cores"] >= 1 and machine["cpu"] and machine["torch"] == torch.__version__
