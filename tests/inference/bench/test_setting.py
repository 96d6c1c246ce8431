"""Methods in turns on the same prompts: what is counted, and that altered output is noticed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from medusa_heads.inference.bench.methods import COMPILED, PLAIN, PROMPT_LOOKUP
from medusa_heads.inference.bench.prompts import Prompt
from medusa_heads.inference.bench.setting import Setting
from medusa_heads.inference.bench.timed_run import Method, fastest_threads, run_once
from medusa_heads.inference.models.medusa import MedusaModel
from tests.inference.bench.benchmarked import (
    HEADS,
    NEW,
    PROMPTS,
    methods_of,
    result_of,
    run_setting,
)
from tests.inference.clock import Clock


def test_in_fp32_every_method_writes_plain_decodings_text(medusa: MedusaModel) -> None:
    methods = run_setting(medusa, methods_of(medusa))
    assert {name: method["identical"] for name, method in methods.items()} == {
        PLAIN: 1.0,
        PROMPT_LOOKUP: 1.0,
        HEADS: 1.0,
    }
    assert methods[PLAIN]["tokens_per_step"] == 1.0
    assert methods[PLAIN]["target_forwards"] == methods[PLAIN]["tokens"] == NEW * len(PROMPTS)


def test_plain_decoding_has_a_cache_that_training_turned_off(medusa: MedusaModel) -> None:
    model: Any = medusa.target.model
    model.generation_config.use_cache = False
    widths = []
    with model.register_forward_pre_hook(
        lambda _, __, given: widths.append(given["input_ids"].shape[1]), with_kwargs=True
    ):
        run_setting(medusa, methods_of(medusa, PLAIN))
    assert len(widths) == NEW * (1 + len(PROMPTS)) and widths.count(1) == (NEW - 1) * 4


def test_forwards_are_those_the_engine_counts(medusa: MedusaModel) -> None:
    plain, _, heads = methods_of(medusa)
    steps = []

    def generate(input_ids: Tensor, **kwargs: Any) -> Any:
        output = medusa.generate(input_ids, **kwargs)
        steps.append(medusa.last_stats.steps)
        return output

    methods = run_setting(medusa, [plain, Method(heads.name, generate, lambda: medusa.last_stats)])
    assert methods[HEADS]["target_forwards"] == sum(steps[1:])  # the first was the warm-up


def test_forwards_that_no_hook_sees_are_counted(medusa: MedusaModel) -> None:
    """As those of a script."""
    model: Any = medusa.target.model
    known = medusa.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=NEW, do_sample=False)
    method = Method(HEADS, lambda *_, **__: known, lambda: medusa.last_stats)
    assert run_once(method, model, PROMPTS[:1], 0).forwards == medusa.last_stats.forwards > 1


def test_drafts_by_the_targets_own_layers_are_none_of_its_forwards(medusa: MedusaModel) -> None:
    for method in methods_of(medusa, "early_exit:1"):
        run = run_once(method, medusa.target.model, PROMPTS[:1], 0, max_new_tokens=NEW)
        assert run.forwards == run.steps <= NEW


def test_threads_are_tried_within_the_targets_context(monkeypatch: pytest.MonkeyPatch) -> None:
    learned = GPT2LMHeadModel(
        GPT2Config(vocab_size=24, n_positions=20, n_embd=8, n_layer=1, n_head=1)
    )
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    assert fastest_threads(learned, range(16), 4) in (1, 2)


def test_threads_are_tried_as_plain_decoding_is_timed(
    medusa: MedusaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cache: without one every token reads the whole text again, by many threads sooner."""
    model: Any = medusa.target.model
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(model.generation_config, "use_cache", False)
    widths = []
    with model.register_forward_pre_hook(
        lambda _, __, given: widths.append(given["input_ids"].shape[1]), with_kwargs=True
    ):
        fastest_threads(model, PROMPTS[0], 4)
    assert widths.count(1) == 3 * widths.count(len(PROMPTS[0])) == 3 * len(widths) // 4


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_altered_output_is_noticed(medusa: MedusaModel, name: str) -> None:
    """The negative control: one wrong token in one of the prompts."""
    plain, _, heads = methods_of(medusa)
    medusa = MedusaModel(medusa.target, medusa.heads, tree=4, rng="transformers")

    def alter(input_ids: Tensor, **kwargs: Any) -> Any:
        output = medusa.generate(input_ids, **kwargs)
        if input_ids.tolist() == [PROMPTS[1]]:
            output[0, -3] = (output[0, -3] + 1) % 24
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
        assert methods[HEADS]["tokens"] == methods[PLAIN]["tokens"] < NEW * (4 - size)


def test_the_faster_plain_method_is_the_reference(
    medusa: MedusaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling is replaced by calling the same thing less, so that the test needs no compiler."""
    (plain,) = methods_of(medusa, PLAIN)
    clock = Clock(monkeypatch)

    def slow(input_ids: Tensor, **kwargs: Any) -> Any:
        clock.work(0.05)
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
    def give_up(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no C++ compiler\nand more")

    def compiled(*_: Any, **__: Any) -> Any:
        return torch.compile(lambda x: x + 1, backend=give_up)(torch.ones(2))

    methods = [*methods_of(medusa, PLAIN), Method(COMPILED, compiled, compiled=True)]
    result = result_of(medusa, methods)
    assert [method["name"] for method in result["methods"]] == [PLAIN]
    assert result["left_out"][COMPILED].startswith("torch.compile failed after")
    assert result["left_out"][COMPILED].endswith("RuntimeError: no C++ compiler")
    for method in (Method("other", compiled), Method(COMPILED, give_up, compiled=True)):
        with pytest.raises(RuntimeError):  # not compiled, or no compiler's fault
            run_setting(medusa, [*methods_of(medusa, PLAIN), method])


def test_categories_are_told_apart(medusa: MedusaModel) -> None:
    def measured(kinds: str, size: int) -> dict[str, Any]:
        prompts = [*PROMPTS, [*PROMPTS[0], 1]]
        asked = [Prompt(tuple(p), k.strip()) for p, k in zip(prompts, kinds, strict=True)]
        return result_of(medusa, methods_of(medusa, PLAIN, HEADS), prompts=asked, batch_size=size)

    result = measured("aba ", 2)
    plain, heads = result["methods"]
    assert list(heads["by_category"]) == ["a", "mixed"] and result["prompts"] == 4
    assert plain["by_category"]["mixed"]["speedup"] == 1.0
    assert heads["by_category"]["a"]["identical"] == 1.0


def test_what_has_no_category_is_counted_with_what_is_called_other(medusa: MedusaModel) -> None:
    kinds = [None, "other", "a"]
    asked = [Prompt(tuple(p), kind) for p, kind in zip(PROMPTS, kinds, strict=True)]
    (plain,) = result_of(medusa, methods_of(medusa, PLAIN), prompts=asked)["methods"]
    assert list(plain["by_category"]) == ["other", "a"]
    rates = plain["by_category"]["other"]["tokens_per_second"]
    assert plain["by_category"]["other"]["tokens_per_step"] == 1.0 and rates > 0
