"""The target's own text: equal to generate(), resumable, and made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import LlamaForCausalLM

from medusa_heads.inference.regeneration import regenerate as module
from medusa_heads.inference.regeneration import transformers_backend
from medusa_heads.inference.regeneration.prompts import is_greedy
from medusa_heads.inference.regeneration.regenerate import regenerate
from medusa_heads.target.target import TargetModel
from tests.training.processes import forked

NEW = 12


@pytest.fixture(scope="module")
def target(tiny_llama: Callable[..., LlamaForCausalLM]) -> TargetModel:
    return TargetModel(tiny_llama())


@pytest.fixture(scope="module")
def prompts() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    return Dataset.from_dict(
        {"input_ids": torch.randint(0, 199, (10, 6), generator=generator).tolist()}
    )


def run(target: TargetModel, prompts: Dataset, folder: Path, **changes: Any) -> Dataset:
    settings: dict[str, Any] = {
        "max_new_tokens": NEW,
        "batch_size": 3,
        "greedy_share": 0.5,
        "temperature": 0.7,
        "seed": 0,
        "cache_dir": folder,
        "progress": False,
    }
    return regenerate(target, prompts, **(settings | changes))


def plain(target: TargetModel, ids: list[int]) -> list[int]:
    inputs = torch.tensor([ids])
    model: Any = target.model
    output: list[int] = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
    )[0].tolist()
    return output


def test_greedy_rows_are_generates_rows_and_labels_cover_the_continuation(
    target: TargetModel, prompts: Dataset, tmp_path: Path
) -> None:
    rows = run(target, prompts, tmp_path, greedy_share=1.0)
    assert rows.column_names == ["input_ids", "labels"]
    for row, ids in zip(rows, prompts["input_ids"], strict=True):
        assert row["input_ids"] == plain(target, ids)
        assert row["labels"] == [-100] * len(ids) + row["input_ids"][len(ids) :]


def test_text_is_written_with_a_cache_that_training_turned_off(
    tiny_llama: Callable[..., LlamaForCausalLM], prompts: Dataset, tmp_path: Path
) -> None:
    model: Any = tiny_llama()
    model.generation_config.use_cache = False
    widths = set()
    model.register_forward_pre_hook(
        lambda _, __, given: widths.add(given["input_ids"].shape[1]), with_kwargs=True
    )
    run(TargetModel(model), prompts, tmp_path)
    assert widths == {6, 1}


def test_the_share_of_greedy_rows(target: TargetModel, prompts: Dataset, tmp_path: Path) -> None:
    rows = run(target, prompts, tmp_path, greedy_share=0.4, temperature=5.0)
    pairs = zip(rows["input_ids"], prompts["input_ids"], strict=True)
    greedy = [row == plain(target, ids) for row, ids in pairs]
    assert [i for i, is_greedy in enumerate(greedy) if is_greedy] == [2, 4, 7, 9]


def test_prompts_of_unequal_length_are_padded_left(target: TargetModel, tmp_path: Path) -> None:
    prompts = Dataset.from_dict({"input_ids": [[5, 6, 7, 8, 9], [10, 11], [12]]})
    rows = run(target, prompts, tmp_path, greedy_share=1.0)
    assert [row["input_ids"] for row in rows] == [plain(target, p) for p in prompts["input_ids"]]


@pytest.mark.parametrize("pad", [-1, 199])
def test_a_token_for_padding_that_the_target_does_not_have_is_not_used(
    pad: int, tiny_llama: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    prompts, made = Dataset.from_dict({"input_ids": [[1, 2, 3], [4], [5, 6], [7]]}), []
    for name in (None, pad):
        model: Any = tiny_llama()
        model.generation_config.pad_token_id = name
        target = TargetModel(model)
        options: dict[str, Any] = {"max_new_tokens": 4, "progress": False}
        made.append(regenerate(target, prompts, cache_dir=tmp_path / str(name), **options))
    assert made[0].to_dict() == made[1].to_dict()


@pytest.mark.parametrize(("name", "value"), [("num_beams", 2), ("prompt_lookup_num_tokens", 1)])
def test_another_way_to_decode_that_a_target_asks_for_is_refused(
    name: str,
    value: int,
    tiny_llama: Callable[..., LlamaForCausalLM],
    prompts: Dataset,
    tmp_path: Path,
) -> None:
    model: Any = tiny_llama()
    setattr(model.generation_config, name, value)
    with pytest.raises(ValueError, match=f"generation_config asks for {name}={value}"):
        run(TargetModel(model), prompts, tmp_path)


def test_a_target_that_asks_for_more_than_tokens_answers_the_same(
    tiny_llama: Callable[..., LlamaForCausalLM], prompts: Dataset, tmp_path: Path
) -> None:
    model, made = tiny_llama(), []
    for told in (False, True):
        model.generation_config.return_dict_in_generate = told
        made.append(run(TargetModel(model), prompts, tmp_path / str(told)).to_dict())
    assert made[0] == made[1]


def test_text_ends_with_the_end_token(
    tiny_llama: Callable[..., LlamaForCausalLM], prompts: Dataset, tmp_path: Path
) -> None:
    model = tiny_llama()
    free = run(TargetModel(model), prompts, tmp_path, greedy_share=1.0)[0]["input_ids"]
    end = free[6 + 3]
    length = free.index(end, 6) + 1
    model.generation_config.eos_token_id = [end, 198]
    rows = run(TargetModel(model), prompts, tmp_path, greedy_share=1.0)
    assert rows[0]["input_ids"] == free[:length]
    assert rows[0]["labels"] == [-100] * 6 + free[6:length]


def test_an_interrupted_run_goes_on_and_gives_the_same_rows(
    target: TargetModel, prompts: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(target, prompts, tmp_path / "whole")
    model: Any = target.model
    generate, calls = model.generate, 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return generate(*args, **kwargs)

    monkeypatch.setattr(model, "generate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(target, prompts, tmp_path / "parts")
    torch.manual_seed(123)  # rows depend on the seed given, not on the global one
    resumed = run(target, prompts, tmp_path / "parts")
    assert calls == 3 + 2  # four batches in all, two of them finished before the interruption
    assert resumed[:] == whole[:]


def test_the_bar_counts_what_was_answered(
    target: TargetModel, prompts: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that only were read would fill it at once."""
    bars: list[Any] = []

    class Watched(module._Progress):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            bars.append(self)

    monkeypatch.setattr(module, "_Progress", Watched)
    generate, seen = transformers_backend._generate, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(bars[0].n)
        return generate(*args, **kwargs)

    monkeypatch.setattr(transformers_backend, "_generate", watched)
    run(target, prompts, tmp_path, progress=True)
    greedy = sum(is_greedy(row, 0.5) for row in range(10))
    sizes = (greedy, 10 - greedy)
    batches = [min(3, size - start) for size in sizes for start in range(0, size, 3)]
    assert seen == [sum(batches[:done]) for done in range(len(batches))] and bars[0].n == 10
    run(target, prompts, tmp_path, progress=True)
    # Known answers count as well, but not for the speed.
    assert (bars[2].n, bars[2].initial) == (10, 10) and len(seen) == len(batches)
    assert bars[0].initial == 0


def test_the_second_call_reads_instead_of_generating(
    target: TargetModel, prompts: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(target, prompts, tmp_path)

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the model ran")

    monkeypatch.setattr(transformers_backend, "_generate", never)
    assert run(target, prompts, tmp_path)[:] == first[:]
    with pytest.raises(AssertionError, match="the model ran"):
        run(target, prompts, tmp_path, seed=1)
    assert not list(tmp_path.rglob(".part-*"))


def test_other_weights_are_other_text(
    tiny_llama: Callable[..., LlamaForCausalLM],
    target: TargetModel,
    prompts: Dataset,
    tmp_path: Path,
) -> None:
    other = TargetModel(tiny_llama(seed=1))
    assert run(target, prompts, tmp_path)[:] != run(other, prompts, tmp_path)[:]


def test_the_global_random_state_is_left_alone(
    target: TargetModel, prompts: Dataset, tmp_path: Path
) -> None:
    before = torch.random.get_rng_state()
    run(target, prompts, tmp_path)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 600}, "606 tokens .* do not fit the target's context of 512"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"batch_size": 0}, "at least 1"),
        ({"greedy_share": 1.5}, "between 0 and 1"),
        ({"temperature": 0.0}, "temperature above 0"),
    ],
)
def test_impossible_settings_are_refused(
    target: TargetModel, prompts: Dataset, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(target, prompts, tmp_path, **changes)


def test_empty_prompts_are_refused(target: TargetModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        run(target, Dataset.from_dict({"input_ids": []}), tmp_path)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        run(target, Dataset.from_dict({"input_ids": [[1], []]}), tmp_path)


@pytest.mark.parametrize("spawned", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_workers_write_what_one_does(
    target: TargetModel,
    prompts: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spawned: bool,
) -> None:
    """Whether each imports torch for itself or not, it is sent the model and the batches."""
    if not spawned:
        monkeypatch.setattr(transformers_backend, "get_context", lambda _: forked())
    alone = run(target, prompts, tmp_path / "alone")
    together = run(target, prompts, tmp_path / "together", num_workers=2)
    assert together.to_dict() == alone.to_dict()
