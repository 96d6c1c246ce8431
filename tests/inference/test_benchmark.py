"""The benchmark: its schema, its counts, and that it notices altered output. Never its timings."""

from __future__ import annotations

import json
import time
from collections import Counter
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
from medusa_heads.inference import benchmark as benchmark_module
from medusa_heads.inference import training_free
from medusa_heads.inference.benchmark import Setting, benchmark
from medusa_heads.inference.benchmark_methods import (
    COMPILED,
    PLAIN,
    PROMPT_LOOKUP,
    Models,
    check_methods,
    make_method,
)
from medusa_heads.inference.benchmark_setting import measure
from medusa_heads.inference.benchmark_summary import accepted_by_depth, summarise
from medusa_heads.inference.machine import describe_machine
from medusa_heads.inference.model import MedusaModel
from medusa_heads.inference.peak_memory import PeakMemory
from medusa_heads.inference.prompts import Prompt
from medusa_heads.inference.step_costs import StepCosts
from medusa_heads.inference.timed_run import Method, Run
from medusa_heads.inference.training_free import DRAFTERS
from medusa_heads.target import TargetModel

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
ASKED = [Prompt(tuple(prompt)) for prompt in PROMPTS]
HEADS = "heads:4"
NEW = 16
GREEDY = Setting("greedy", "float32")


@pytest.fixture(scope="module")
def medusa(tiny_llama: Callable[..., LlamaForCausalLM]) -> MedusaModel:
    target = TargetModel(tiny_llama())
    return MedusaModel(target, MedusaHeads.from_target(target, HeadsConfig(num_heads=2)), tree=4)


def methods_of(medusa: MedusaModel, *names: str, draft: TargetModel | None = None) -> list[Method]:
    models = Models(medusa.target, medusa, draft)
    return [make_method(n, models, most_tokens=32) for n in names or (PLAIN, PROMPT_LOOKUP, HEADS)]


def run_setting(
    medusa: MedusaModel, methods: list[Method], setting: Setting = GREEDY, **options: Any
) -> dict[str, dict[str, Any]]:
    result = measure(
        setting,
        methods,
        medusa.target.model,
        ASKED,
        max_new_tokens=NEW,
        temperature=0.7,
        seed=0,
        **options,
    )
    return {method["name"]: method for method in result["methods"]}


def test_the_whole_report(tiny_llama: Callable[..., LlamaForCausalLM], tmp_path: Path) -> None:
    target = TargetModel(tiny_llama())
    target.model.save_pretrained(tmp_path / "target")
    target = TargetModel.from_pretrained(str(tmp_path / "target"))
    save_heads(
        tmp_path / "heads", MedusaHeads.from_target(target, HeadsConfig(num_heads=2)), target
    )
    settings = [
        Setting("greedy", "bfloat16", (PROMPT_LOOKUP, HEADS)),  # plain comes by itself
        Setting("sampled", "float32", (PLAIN, HEADS)),
    ]
    report = benchmark(
        tmp_path / "heads", PROMPTS, settings=settings, max_new_tokens=NEW, progress=False
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
    assert [method["name"] for method in sampled["methods"]] == [PLAIN, HEADS]
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
    methods = run_setting(medusa, methods_of(medusa))
    assert {name: method["identical"] for name, method in methods.items()} == {
        PLAIN: 1.0,
        PROMPT_LOOKUP: 1.0,
        HEADS: 1.0,
    }
    assert methods[PLAIN]["tokens_per_step"] == 1.0
    assert methods[PLAIN]["target_forwards"] == methods[PLAIN]["tokens"] == NEW * len(PROMPTS)


def test_forwards_are_those_the_engine_counts(medusa: MedusaModel) -> None:
    plain, _, heads = methods_of(medusa)
    steps = []

    def generate(input_ids: Tensor, **kwargs: Any) -> Any:
        output = medusa.generate(input_ids, **kwargs)
        steps.append(medusa.last_stats.steps)
        return output

    methods = run_setting(medusa, [plain, Method(heads.name, generate, lambda: medusa.last_stats)])
    assert methods[HEADS]["target_forwards"] == sum(steps[1:])  # the first was the warm-up


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_altered_output_is_noticed(medusa: MedusaModel, name: str) -> None:
    """The negative control: one wrong token in one of the prompts."""
    plain, _, heads = methods_of(medusa)

    def alter(input_ids: Tensor, **kwargs: Any) -> Any:
        output = medusa.generate(input_ids, **kwargs)
        if input_ids.tolist() == [PROMPTS[1]]:
            output[0, -3] = (output[0, -3] + 1) % 199
        return output

    altered = Method(heads.name, alter, lambda: medusa.last_stats)
    methods = run_setting(medusa, [plain, altered], Setting(name, "float32"))
    assert methods[HEADS]["identical"] == pytest.approx(2 / 3)


def test_methods_take_turns_in_a_rotating_order(medusa: MedusaModel) -> None:
    order: list[str] = []

    def recorded(method: Method) -> Method:
        def generate(input_ids: Tensor, **kwargs: Any) -> Any:
            order.append(method.name)
            return method.generate(input_ids, **kwargs)

        return Method(method.name, generate, method.stats)

    a, b, c = (method.name for method in methods_of(medusa))
    run_setting(medusa, [recorded(method) for method in methods_of(medusa)])
    assert order == [a, b, c, a, b, c, b, c, a, c, a, b]  # warm-up, then three prompts


def test_medians_are_of_rates_and_of_ratios_prompt_by_prompt() -> None:
    def run(token: int, count: int, seconds: float, steps: int) -> Run:
        return Run([[token] * count], seconds, steps, steps)

    plain = [run(1, 10, 1.0, 10), run(2, 10, 2.0, 10), run(3, 10, 5.0, 10)]
    fast = [run(1, 10, 0.5, 4), run(2, 10, 2.0, 5), run(4, 5, 0.5, 1)]
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
        benchmark(heads, PROMPTS, target=target, max_new_tokens=600)
    with pytest.raises(ValueError, match="expected a heads checkpoint"):
        benchmark(tmp_path / "none", PROMPTS, target=target)
    with pytest.raises(ValueError, match="batch sizes of at least 1"):
        benchmark(heads, PROMPTS, target=target, batch_sizes=[0])
    with pytest.raises(ValueError, match="leave out --target"):
        benchmark(target, PROMPTS, target=target, settings=[Setting("greedy", "float32", (PLAIN,))])


def test_the_machine_is_described() -> None:
    machine = describe_machine()
    assert machine["cores"] >= 1 and machine["cpu"] and machine["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("suffx", "expected methods among plain, plain-compiled, .*suffix.* got 'suffx'"),
        ("plain:3", "got 'plain:3'"),
        ("heads:", "got 'heads:'"),
        ("heads:8", "needs a heads checkpoint"),
        ("draft-model:chain:3", "needs a draft model: give --draft_model"),
        ("transformers-assisted", "needs a draft model"),
    ],
)
def test_methods_that_are_not_there(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_methods([PLAIN, name], heads=False, draft=False)


def test_a_method_is_named_once() -> None:
    check_methods([PLAIN, *DRAFTERS], heads=False, draft=False)
    with pytest.raises(ValueError, match="'suffix' is given twice"):
        check_methods(["suffix", PLAIN, "suffix"], heads=False, draft=False)


@pytest.fixture
def quick_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny target's steps are not worth measuring: which drafts are cut where is not asked."""
    costs = StepCosts.of_size(6)
    monkeypatch.setattr(training_free, "target_costs", lambda *_: costs)


def test_drafters_and_draft_models_in_padded_batches(
    medusa: MedusaModel, tiny_llama: Callable[..., LlamaForCausalLM], quick_costs: None
) -> None:
    draft = TargetModel(tiny_llama(num_layers=1))
    names = [PLAIN, PROMPT_LOOKUP, "transformers-assisted", HEADS, "suffix", "recycling"]
    methods = methods_of(medusa, *names, "draft-model:chain:2", draft=draft)
    for size in (1, 2):
        result = measure(
            GREEDY,
            methods,
            medusa.target.model,
            ASKED,
            batch_size=size,
            max_new_tokens=NEW,
            temperature=0.7,
            seed=0,
        )
        alone = {PROMPT_LOOKUP, "transformers-assisted"}
        assert set(result["left_out"]) == (alone if size > 1 else set())
        assert result["prompts"] == (4 if size == 2 else 3)  # the last batch is filled up
        assert [m["name"] for m in result["methods"]] == [
            m.name for m in methods if size == 1 or m.name not in alone
        ]
        for method in result["methods"]:
            assert method["identical"] == 1.0, method["name"]
            assert method["tokens"] == NEW * result["prompts"]
            assert method["first_token_seconds"] > 0
        (heads,) = [m for m in result["methods"] if m["name"] == HEADS]
        assert heads["nodes"] == 4
        kept = heads["accepted_by_depth"]
        # The first token of each text comes of its prompt alone.
        steps = heads["tokens"] / heads["tokens_per_step"] - result["prompts"]
        assert sum(kept) * steps == pytest.approx(heads["tokens"] - result["prompts"] - steps)


def test_a_row_that_ends_early_is_counted_to_its_end(
    medusa: MedusaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = medusa.target.model
    whole = model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=NEW)
    end = int(whole[0, len(PROMPTS[0]) + 5])
    monkeypatch.setattr(model.generation_config, "eos_token_id", end)
    for size in (1, 2):
        methods = run_setting(medusa, methods_of(medusa, PLAIN, HEADS), batch_size=size)
        assert methods[HEADS]["identical"] == 1.0
        assert methods[HEADS]["tokens"] == methods[PLAIN]["tokens"] < NEW * (2 + size)


def test_the_faster_plain_method_is_the_reference(medusa: MedusaModel) -> None:
    """Compiling is replaced by calling the same thing less, so that the test needs no compiler."""
    (plain,) = methods_of(medusa, PLAIN)

    def slow(input_ids: Tensor, **kwargs: Any) -> Any:
        time.sleep(0.05)
        return plain.generate(input_ids, **kwargs)

    for first, second, reference in (
        (slow, plain.generate, COMPILED),
        (plain.generate, slow, PLAIN),
    ):
        methods = [Method(PLAIN, first), Method(COMPILED, second, compiled=True)]
        found = run_setting(medusa, methods)
        assert found[reference]["speedup"] == 1.0
        assert all(m["speedup"] < 1.0 for name, m in found.items() if name != reference)
        assert found[COMPILED]["target_forwards"] == NEW * len(PROMPTS)


def test_a_compiler_that_fails_is_left_out(medusa: MedusaModel) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no C++ compiler\nand more")

    result = measure(
        GREEDY,
        [*methods_of(medusa, PLAIN), Method(COMPILED, fail, compiled=True)],
        medusa.target.model,
        ASKED,
        max_new_tokens=NEW,
        temperature=0.7,
        seed=0,
    )
    assert [method["name"] for method in result["methods"]] == [PLAIN]
    assert result["left_out"][COMPILED].endswith("seconds: no C++ compiler")
    with pytest.raises(RuntimeError):  # what is no compiler's fault is ours
        run_setting(medusa, [*methods_of(medusa, PLAIN), Method("other", fail)])


def test_plain_compiled_writes_the_same(medusa: MedusaModel, monkeypatch: Any) -> None:
    """With a static cache and without the minute of compiling."""
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    methods = run_setting(medusa, methods_of(medusa, PLAIN, COMPILED))
    assert methods[COMPILED]["identical"] == 1.0


def test_categories_are_told_apart(medusa: MedusaModel) -> None:
    asked = [Prompt(tuple(p), kind) for p, kind in zip(PROMPTS, ("a", "b", "a"), strict=True)]
    result = measure(
        GREEDY,
        methods_of(medusa, PLAIN, HEADS),
        medusa.target.model,
        asked,
        batch_size=2,
        max_new_tokens=NEW,
        temperature=0.7,
        seed=0,
    )
    plain, heads = result["methods"]
    assert list(heads["by_category"]) == ["a", "b"] and result["prompts"] == 4
    assert plain["by_category"]["b"]["speedup"] == 1.0
    assert heads["by_category"]["a"]["identical"] == 1.0


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
        settings=[Setting("greedy", "float32", (PLAIN,))],
        max_new_tokens=4,
        max_prompt_length=39,
        progress=False,
    )
    expected = model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=4)[0].tolist()
    assert answers == [expected[len(PROMPTS[0]) :]]
    assert asked == [[PROMPTS[0], [9, 10], [*expected, 3, 4]]]
    assert report["prompts_left_out"] == 1 and report["settings"][0]["prompts"] == 3


def test_accepted_by_depth() -> None:
    assert accepted_by_depth(Counter({0: 2, 1: 1, 3: 1})) == [0.5, 0.25, 0.25]
    assert accepted_by_depth(Counter({0: 2, 4: 0})) == []


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts this")
def test_peak_memory_is_of_the_block_alone() -> None:
    def needed(numbers: int) -> int:
        memory = PeakMemory(torch.device("cpu"))
        torch.ones(numbers).sum()
        peak, above = memory.read()
        assert peak is not None and above is not None and peak > above
        return above

    much, little = needed(16_000_000), needed(1000)
    assert 60_000_000 < much < 90_000_000 and little < 8_000_000
